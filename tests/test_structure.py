"""The shape of the code: no import circles, small files, short parameter lists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT

SOURCE = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
} | {path.stem: path for path in (ROOT / "scripts").glob("*.py")}
PACKAGE = SOURCE / "tide"
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
LINES = {"decode/loop.py": 150, "engine.py": 200}  # others: 300
INTERNAL = ("decode/", "models/", "exits/", "engine.py", "risk.py")
PUBLIC = {"engine.py: TIDE.__init__"}  # options of the engine, by keyword


def imports(name: str, path: Path) -> set[str]:
    """Modules of ours that a module imports: anywhere in it, and for type checkers too."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            whole = [f"{base}.{alias.name}" for alias in node.names]
            # `from package import module` needs the module, anything else the package itself.
            found |= {full if full in MODULES else base for full in whole}
    return {module for module in found if module in MODULES}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each is imported by the others, directly or not."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            if (module := ahead.pop()) not in seen:
                seen.add(module)
                ahead += graph[module]
        return seen

    reached = {module: reach(module) for module in graph}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function and method with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = f"{name}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef):
                yield inner, node
        yield from functions(node, inner)


def parameters(function: ast.FunctionDef) -> int:
    """How many there are besides self and cls."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return sum(a is not None and a.arg not in ("self", "cls") for a in every)


def test_no_import_circles() -> None:
    graph = {name: imports(name, path) for name, path in MODULES.items()}
    assert len(graph) > 100 and graph["tide.engine"] > {"tide.risk", "tide.decode.session"}
    assert not circles(graph)


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(graph) == [["b", "c"], ["e"]]


def test_files_are_small() -> None:
    lines = {name: len((PACKAGE / name).read_text().splitlines()) for name in FILES}
    assert len(lines) > 100 and LINES.keys() <= lines.keys()
    assert not {name: n for name, n in lines.items() if n > LINES.get(name, 300)}


def test_parameter_lists_are_short() -> None:
    found = {}
    for name in FILES:
        if name.startswith(INTERNAL):
            for function, node in functions(ast.parse((PACKAGE / name).read_text())):
                found[f"{name}: {function}"] = parameters(node)
    assert len(found) > 300 and {name for name, n in found.items() if n > 6} >= PUBLIC
    assert not {name: n for name, n in found.items() if n > 6 and name not in PUBLIC}
