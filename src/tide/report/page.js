// Says below the text what is known of the token under the pointer or the focus; arrow keys move.
const text = document.querySelector(".text");
const details = document.querySelector(".details");
const say = (event) => {
  const token = event.target.closest(".text .token");
  if (token) details.textContent = token.dataset.says;
};
for (const kind of ["mouseover", "focusin", "click"]) text.addEventListener(kind, say);
text.addEventListener("keydown", (event) => {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && document.activeElement[step];
  if (next) { next.focus(); event.preventDefault(); }
});
