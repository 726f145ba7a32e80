"""Structure: each room imports only rooms below it, and there is no import cycle.

Read from the code by `ast`, imports inside functions and for type checkers alone included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# {room: rooms that it may import}. `eval` may import all of `lazyllm`; the command line, `eval.cli`, anything.
_BASE = ["lazyllm.errors", "lazyllm.machine", "lazyllm.presets", "lazyllm.spec"]
_LIBRARY = [*_BASE, "lazyllm.engine", "lazyllm.models", "lazyllm.methods"]
BELOW = {
    "lazyllm.errors": [],
    "lazyllm.machine": [],
    "lazyllm.presets": ["lazyllm.errors"],
    "lazyllm.spec": ["lazyllm.errors", "lazyllm.presets"],
    "lazyllm.engine": _BASE,
    "lazyllm.models": [*_BASE, "lazyllm.engine"],
    "lazyllm.methods": [*_BASE, "lazyllm.engine", "lazyllm.models"],
    "lazyllm.integrations": _LIBRARY,
    "lazyllm": [*_LIBRARY, "lazyllm.integrations"],
    "lazyllm.check": [*_LIBRARY, "lazyllm"],
    "lazyllm.bench": [*_LIBRARY, "lazyllm"],
    "eval.benchmarks": [],
    "eval.score": ["eval.benchmarks"],
    "eval.store": ["eval.benchmarks"],
    "eval.analysis": ["eval.benchmarks", "eval.store"],
    "eval.run": ["eval.benchmarks", "eval.store", "eval.analysis"],
    "eval.board": ["eval.benchmarks", "eval.store", "eval.analysis", "eval.report"],
    "eval.report": ["eval.benchmarks", "eval.store", "eval.analysis"],
    "eval.tune": ["eval.benchmarks", "eval.store", "eval.analysis", "eval.run"],
}


def modules() -> dict[str, Path]:
    """{dotted name: file} of both packages."""
    found = {}
    for file in [*(ROOT / "lazyllm").rglob("*.py"), *(ROOT / "eval").rglob("*.py")]:
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def room_of(module: str) -> str:
    return next((room for room in sorted(BELOW, key=len, reverse=True) if f"{module}.".startswith(f"{room}.")), module)


@cache
def imports() -> dict[str, set[str]]:
    """{module: modules of both packages that it names in an import}."""
    known = modules()
    return {module: {name for name in imports_of(file, known) if name != module} for module, file in known.items()}


def imports_of(file: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name


def test_each_room_imports_only_rooms_below_it() -> None:
    wrong = []
    for module, others in imports().items():
        room = room_of(module)
        for other in map(room_of, others):
            into_library = room.startswith("eval") and other.startswith("lazyllm")
            # the command line (`eval.cli`) may import every room
            if room in BELOW and other != room and other not in BELOW[room] and not into_library:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in imports()[module]:
                visit(imported, [*path, module])
            done.add(module)

    for module in imports():
        visit(module, [])
