"""Files as a stranger might write them: for each case, a few deliberate changes to good ones.

A case is decided by its seed and number alone. Knows nothing of how files are read: see hostile.py.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tide.exits import files

MARKUP = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</svg><svg onload=alert(1)>",
    "--><script>alert(1)</script>", "]]><b>", "javascript:alert(1)", "$\\frac{x", "a$b$c",
    "&lt;b&gt;", "</td></table><h1>", "x\x00y\x1b[2J", "\u202etxt.exe", "\ud800",
    "名前 🌊", "%s{}", "`id`",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 64, 4096, 30_000, 100_000, 2**31, 2**63, 10**400, 0.5, -0.0, 1.5, 1e-320,
    1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
OTHERS = (
    None, True, False, "", "3", "nan", "../../../etc/passwd", "/dev/zero", "x" * 100_000, [], {},
    [[]], [None], ["context"] * 1000, {"a": {"b": []}}, {"__class__": "os.system"}, [0.5, 0.5],
    [math.nan],
)  # fmt: skip
DTYPES = (
    torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def value(rng: random.Random) -> Any:
    """A value that has no business where it will be put."""
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, OTHERS, MARKUP))))


def changed_json(rng: random.Random, good: Any, under: tuple[str, ...] = ()) -> tuple[Any, str]:
    """A JSON value with one to three changes, and what they are.

    Args:
        under: keys that lead to the part that is changed; all of it by default.
    """
    bad, done = copy.deepcopy(good), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        whole: Any = bad
        for key in under:
            whole = whole[key]
        places = [(holder, key) for holder, key in _places(whole)]
        if not places:
            break
        holder, key = rng.choice(places)
        how = rng.choice(("set", "set", "set", "drop", "add", "nest", "number"))
        if how == "drop":
            del holder[key]
        elif how == "add" and isinstance(holder, dict):
            holder[rng.choice(("surprise", "", "__proto__", *MARKUP))] = value(rng)
        elif how == "add":
            holder.extend(copy.deepcopy(holder[:1]) * rng.choice((1, 3, 2000)))
        elif how == "nest":
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"x": holder[key]}
        elif how == "number":
            holder[key] = rng.choice(NUMBERS)
        else:
            holder[key] = value(rng)
        done.append(f"{how} {str(key)[:40]!r}")
    return bad, ", ".join(done)


def _places(at: Any) -> list[tuple[Any, Any]]:
    keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
    return [place for key in keys for place in ((at, key), *_places(at[key]))]


def changed_text(rng: random.Random, text: str) -> tuple[bytes, str]:
    """The text of a JSON object, changed so that a parser must notice."""
    body = text.strip()[1:-1]
    how = rng.choice(
        (
            "duplicate",
            "late",
            "deep",
            "digits",
            "cut",
            "flip",
            "not utf-8",
            "bom",
            "large",
            "empty",
            "many",
        )
    )
    if how == "duplicate":
        key = rng.choice(list(json.loads(text)))
        return f"{{{json.dumps(key)}: 1, {body}}}".encode(), f"duplicate key {key}"
    if how == "late":
        keys = ", ".join(f'"{i}": 0' for i in range(300_000))
        return f'{{{keys}, "z": 0, "z": 0}}'.encode(), "a duplicate key after many others"
    if how == "deep":
        mark = rng.choice(("[", '{"a":'))
        return f'{{"x": {mark * rng.choice((900, 50_000, 500_000))}'.encode(), how
    if how == "digits":
        return f'{{"x": {"9" * rng.choice((5_000, 1_000_000))}, {body}}}'.encode(), how
    if how == "large":
        return f'{{"x": "{"x" * (9 << 20)}", {body}}}'.encode(), how
    if how == "many":
        count = rng.choice((390_000, 2_600_000))
        return f'{{"x": [{"[]," * (count // 2)}[]], {body}}}'.encode(), f"{how} {count}"
    raw = bytearray(text.encode())
    if how == "cut":
        return bytes(raw[: rng.randrange(len(raw))]), how
    if how == "flip":
        for _ in range(rng.choice((1, 3, 30))):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return bytes(raw), how
    wrong = {"not utf-8": b"\xff\xfe" + raw, "bom": b"\xef\xbb\xbf" + raw, "empty": b""}
    return bytes(wrong[how]), how


def changed_tensors(rng: random.Random, good: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Tensors with one or two changes of type, shape, size or content."""
    bad, done = {name: tensor.clone() for name, tensor in good.items()}, []
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(bad))
        tensor = bad[name]
        how = rng.choice(
            ("dtype", "shape", "length", "content", "content", "drop", "add", "rename", "empty")
        )
        if how == "dtype":
            bad[name] = tensor.to(rng.choice(DTYPES))
        elif how == "shape":
            bad[name] = rng.choice((tensor.flatten(), tensor[None], tensor[..., None])).clone()
        elif how == "length":
            flat = tensor.flatten()
            bad[name] = rng.choice((flat[:-1], torch.cat([flat, flat]))).clone()
        elif how == "content":
            _spoil(rng, tensor)
        elif how == "drop":
            del bad[name]
        elif how == "add":
            bad[rng.choice(("surprise", "table.keys_9", "table.keys_³", *MARKUP[:12]))] = (
                tensor.clone()
            )
        elif how == "rename":
            bad[name.swapcase()] = bad.pop(name)
        else:
            bad[name] = tensor.new_empty(rng.choice(((0,), (0, 4), (4, 0))))
        done.append(f"{how} {name}")
    return bad, ", ".join(done)


def _spoil(rng: random.Random, tensor: Tensor) -> None:
    """Change some of the numbers of a tensor."""
    if not tensor.numel():
        return
    flat = tensor.view(-1)
    if tensor.is_floating_point():
        flat[rng.randrange(len(flat))] = rng.choice(
            (math.nan, math.inf, -math.inf, 3e38, -1.0, 0.0)
        )
    elif tensor.dtype == torch.bool:
        flat.logical_not_()
    else:
        low, high = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
        flat[rng.randrange(len(flat))] = rng.choice((low, high, 0, 1, 96, 97, 2**7 - 1))


def signed(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A header with the digest that a stranger would compute."""
    try:
        return {**header, "digest": files.digest(header, tensors)}
    except (RuntimeError, TypeError, ValueError):  # of a tensor whose bytes torch does not show
        return {**header, "digest": "0" * 64}


def write_artifact(path: Path, text: bytes | str, tensors: dict[str, Tensor]) -> None:
    """Write an artifact of any form with this header, as text, whatever it is."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    if path.suffix:
        shown = raw.decode("utf-8", "replace").replace("\x00", " ")
        path.write_bytes(save(tensors, metadata={"tide": shown}))
        return
    path.mkdir()
    (path / files.HEADER).write_bytes(raw)
    (path / "tide.safetensors").write_bytes(save(tensors))


def changed_bytes(rng: random.Random, good: bytes) -> tuple[bytes, str]:
    """A safetensors file with a changed header, offsets or bytes."""
    size = struct.unpack("<Q", good[:8])[0]
    head, body = json.loads(good[8 : 8 + size]), good[8 + size :]
    how = rng.choice(
        ("length", "entry", "entry", "entry", "overlap", "cut", "flip", "tail", "deep")
    )
    if how == "length":
        wrong = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**40, 2**63, 2**64 - 1))
        return struct.pack("<Q", wrong) + good[8:], f"header length {wrong}"
    if how == "cut":
        return good[: rng.randrange(len(good))], how
    if how == "flip":
        raw = bytearray(good)
        for _ in range(rng.choice((1, 3, 30))):
            raw[rng.randrange(min(len(raw), 8 + size))] ^= 1 << rng.randrange(8)
        return bytes(raw), how
    if how == "tail":
        return good + b"\0" * rng.choice((1, 4096)), how
    if how == "deep":
        text = b'{"x":' + b"[" * 200_000
        return struct.pack("<Q", len(text)) + text, how
    names = [name for name in head if name != "__metadata__"]
    name = rng.choice(names)
    if how == "overlap":
        head[name] = copy.deepcopy(head[rng.choice(names)])
    else:
        field, wrong = rng.choice((
            ("dtype", rng.choice(("F64", "F8_E4M3", "BOOL", "I64", "C64", "F4", "X", "", None))),
            ("shape", rng.choice(([], [0], [-1], [2**32, 2**32], [2**62], [1.5], "x", [1] * 5000))),
            ("data_offsets", rng.choice(([0, 2**63], [8, 0], [-1, 4], [0], [], None, [0, 1.5]))),
        ))  # fmt: skip
        head[name][field] = wrong
        how = f"{field} {str(wrong)[:30]}"
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + body, f"{how} of {name}"


class Payload:
    """Runs code when it is unpickled: touches a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.canary,))


def pickled(
    rng: random.Random, canary: Path, text: str, tensors: dict[str, Tensor]
) -> tuple[bytes, str]:
    """A pickle: with code, with a bomb, or the artifact itself as torch would save it."""
    how = rng.choice(
        ("code", "torch code", "honest", "stride 0", "zip bomb", "memo", "bytearray", "gz")
    )
    held: Any = {"header": text, "tensors": tensors}
    if how == "code":
        return pickle.dumps(Payload(canary), rng.randrange(5)), how
    if how == "memo":  # a table of 2 ** 31 entries in the C unpickler
        return b"\x80\x02]r\xff\xff\xff\x7f.", how
    if how == "bytearray":
        return b"cbuiltins\nbytearray\n(L99999999999L\ntR.", how
    if how == "torch code":
        held["header"] = Payload(canary)
    if how == "stride 0":
        held["tensors"] = {name: torch.zeros(1).expand(2**40) for name in tensors}
    buffer = io.BytesIO()
    torch.save(held, buffer)
    if how in ("zip bomb", "gz"):
        bomb = io.BytesIO()
        with (
            zipfile.ZipFile(buffer) as good,
            zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bad,
        ):
            for entry in good.namelist():
                bad.writestr(entry, good.read(entry))
            names = [n for n in good.namelist() if "/data/" in n]
            for name in rng.sample(names, 1) if how == "zip bomb" else ["../../escaped", "/abs"]:
                bad.writestr(f"{name}.more", b"\0" * (64 << 20))
        return bomb.getvalue(), how
    return buffer.getvalue(), how


def folder_trick(rng: random.Random, folder: Path, outside: Path) -> str:
    """Replace a file of a good artifact folder by something that is not a file, or leads away."""
    header = folder / files.HEADER
    tensors = next(folder.glob("*.safetensors"))
    target = rng.choice((header, tensors))
    away = {"device": Path("/dev/zero"), "outside": outside, "proc": Path("/proc/self/mem")}
    how = rng.choice(("fifo", "directory", "loop", "sparse", "hub", "dangling", "digest", *away))
    if how == "hub":  # as the hub's cache has it: this one is to load
        blob = folder.parent / "blob"
        target.rename(blob)
        target.symlink_to(os.path.relpath(blob, folder))
        return how
    if how == "digest":  # names tensors elsewhere
        (folder / "tide-").mkdir()
        text = json.loads(header.read_text())
        text["digest"] = rng.choice(
            ("/../../outside/t", "../../outside/te", 5, ["x"] * 20, "é" * 64)
        )
        header.write_text(json.dumps(text))
        return f"digest {text['digest']!r}"
    target.unlink()
    if how == "fifo":
        os.mkfifo(target)
    elif how == "directory":
        target.mkdir()
    elif how == "sparse":
        with target.open("wb") as file:
            file.write(struct.pack("<Q", 2**33) if target == tensors else b'{"x": "')
            file.truncate(8 << 30)
    else:
        links: dict[str, Callable[[], Path]] = {
            "loop": lambda: target, "dangling": lambda: folder / "nowhere"
        }  # fmt: skip
        target.symlink_to(away[how] if how in away else links[how]())
    return f"{how} {target.name}"


def add_code(rng: random.Random, folder: Path, canary: Path) -> str:
    """Add files that would run if anything imported or executed them."""
    code = f"import os; os.mkdir({str(canary)!r})\n"
    some = rng.sample(
        ("custom_generate/generate.py", "custom_generate/__init__.py", "tide.py", "torch.py",
         "sitecustomize.py", "conftest.py", "modeling.py", "safetensors/__init__.py", "json.py"),
        rng.randrange(1, 5),
    )  # fmt: skip
    for name in some:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.X"}}))
    return "code in " + ", ".join(some)


def add_links(rng: random.Random, folder: Path, outside: Path) -> str:
    """Let files that saving writes lead out of the folder."""
    name = rng.choice(
        ("README.md", "custom_generate", "custom_generate/generate.py", "tide.json.tmp")
    )
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside if name == "custom_generate" else outside / "precious.txt")
    return f"{name} is a link to the outside"
