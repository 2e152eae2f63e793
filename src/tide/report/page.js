// Shows the details of the token under the pointer or the focus; the arrow keys move the focus.
const text = document.querySelector(".text");
const details = document.querySelector(".details");
const show = (event) => {
  const token = event.target.closest(".text .token");
  if (token) details.textContent = token.dataset.details;
};
for (const name of ["mouseover", "focusin", "click"]) text.addEventListener(name, show);
text.addEventListener("keydown", (event) => {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && document.activeElement[step];
  if (next) { next.focus(); event.preventDefault(); }
});
