"""The table of docs/troubleshooting.md: every message of every error that TIDE raises on purpose.

Read from the source, so that a message that is new, or changed, is on the page.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

from results import ROOT, table

sys.path.insert(0, str(ROOT / "src"))

# Error -> its usual cause and the way out.
ADVICE = {
    "UnsupportedModelError": "The model keeps state that depth ranges cannot carry, is not a "
    "decoder, or is not in a state to be run (training mode, a static cache). Load it with "
    "`AutoModelForCausalLM` and call `model.eval()`; for a family that is refused, use "
    "`model.generate`. `tide env --model MODEL` shows what TIDE makes of a model.",
    "UnsupportedCacheError": "A cache of your own, or one that another loop has filled. Let TIDE "
    "make it: pass the whole prompt and no `past_key_values`.",
    "SelfCheckError": "TIDE ran the model in parts and the result was not the model's own, so it "
    "refuses. Try `attn_implementation='eager'` and float32 first, then report it with what `tide "
    "env --model MODEL` prints.",
    "NumericsError": "Numbers overflow in this dtype, or a logits processor rules out every token. "
    "Try float32 first, then the call without the processor.",
    "RangeError": "Only for those who call `tide.attach(model).run` themselves: layers, tokens and "
    "states do not fit together. The message names what was given and what fits.",
    "ConfigError": "A setting or an option has a value that is not allowed, or excludes another. "
    "The message names the allowed ones.",
    "ArtifactError": "The folder holds no artifact, a damaged one, one of another version, or one "
    "of another model. Make it again with `tide calibrate MODEL -o DIR`.",
    "StorageError": "The disk is full or read-only. What was there before is unchanged.",
    "CertificateError": "`risk=` needs a certificate for this model, dtype, KV strategy and these "
    "exits. Make one with `tide certify MODEL DIR --risk R`, or use `mode='lossless'`, which "
    "needs none.",
    "UnsupportedGenerationError": "An option of `generate` that decoding by depth does not take "
    "([all of them](huggingface.md)). Omit it, or call `model.generate` for this request.",
    "DataError": "A file of prompts or results cannot be read, or too few prompts remain. One JSON "
    "object per line, with the prompt under a key that the message names.",
    "MissingPackageError": "An optional package is missing. The message names the extra that "
    "installs it.",
}


def public(module: ModuleType) -> list[type]:
    """The error classes of a module, without their base."""
    found = [of for of in vars(module).values() if inspect.isclass(of)]
    return [of for of in found if of.__module__ == module.__name__ and of.__bases__ != (Exception,)]


def messages() -> Iterator[tuple[str, str, str]]:
    """Error, message and file of everything that is raised; `...` stands for what is filled in."""
    for path in sorted((ROOT / "src" / "tide").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                text = _text(node.args[0])
                if text and node.func.id in ADVICE:
                    yield node.func.id, text, str(path.relative_to(ROOT / "src" / "tide"))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else "..." for part in node.values
        )
    return ""


def errors() -> str:
    """A section for each error: what it is, the way out, and its messages."""
    from tide import errors as module

    found = list(messages())
    sections = []
    for error in public(module):
        name, builtin = error.__name__, error.__bases__[1].__name__
        if name not in ADVICE:
            raise SystemExit(f"{name} is new: add its cause and way out to ADVICE.")
        rows = [
            (text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*"), f"`{path}`")
            for of, text, path in found
            if of == name
        ]
        sections.append(
            f"## {name}\n\n{(error.__doc__ or '').strip()} Also a `{builtin}`.\n\n"
            + f"{ADVICE[name]}\n\n"
            + table(("message", "raised in"), rows)
        )
    return "\n\n".join(sections)
