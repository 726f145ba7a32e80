"""Structure: each room imports only rooms below it, there is no import cycle, and every module name is unique.

Read from the code by `ast`, imports inside functions included; imports for type checkers alone are left out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# {room: rooms that it may import}. `eval` may import all of `lazyllm`; the command line, `eval.cli`, anything.
BELOW = {
    "lazyllm.errors": [],
    "lazyllm.engine": ["lazyllm.errors"],
    "lazyllm.models": ["lazyllm.errors", "lazyllm.engine"],
    "lazyllm.methods": ["lazyllm.errors", "lazyllm.engine", "lazyllm.models"],
    "lazyllm.integrations": ["lazyllm.errors", "lazyllm.engine", "lazyllm.models", "lazyllm.methods"],
    "lazyllm": ["lazyllm.errors", "lazyllm.engine", "lazyllm.models", "lazyllm.methods", "lazyllm.integrations"],
    "lazyllm.check": ["lazyllm", "lazyllm.errors", "lazyllm.engine", "lazyllm.models", "lazyllm.methods"],
    "lazyllm.bench": ["lazyllm", "lazyllm.errors", "lazyllm.engine", "lazyllm.models", "lazyllm.methods"],
    "eval.benchmarks": [],
    "eval.score": ["eval.benchmarks"],
    "eval.store": ["eval.benchmarks"],
    "eval.paper": ["eval.benchmarks", "eval.store"],
    "eval.run": ["eval.benchmarks", "eval.store", "eval.paper"],
    "eval.report": ["eval.benchmarks", "eval.store", "eval.paper"],
    "eval.tune": ["eval.benchmarks", "eval.store", "eval.paper", "eval.run"],
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


def imports_of(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of both packages that a file imports when it runs."""
    nodes: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes.extend(ast.iter_child_nodes(node))
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
    known = modules()
    wrong = []
    for module, file in known.items():
        room = room_of(module)
        if room not in BELOW:  # the command line (`eval.cli`) may import every room
            continue
        for imported in imports_of(file, known):
            other = room_of(imported)
            into_library = room.startswith("eval") and other.startswith("lazyllm")
            if other != room and other not in BELOW[room] and not into_library:
                wrong.append(f"{module} imports {imported}")
    assert not wrong


def test_the_rooms_themselves_lie_on_floors() -> None:
    floors: dict[str, int] = {}
    for room in BELOW:  # listed bottom-up: a room that names a later one would fail here
        floors[room] = 1 + max((floors[below] for below in BELOW[room]), default=0)


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    arrows = {module: {name for name in imports_of(file, known) if name != module} for module, file in known.items()}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in arrows[module]:
                visit(imported, [*path, module])
            done.add(module)

    for module in arrows:
        visit(module, [])


def test_no_two_modules_share_a_base_name() -> None:
    by_name = defaultdict(list)
    for module in modules():
        by_name[module.rpartition(".")[2]].append(module)
    by_name.pop("__main__", None)
    assert {name: found for name, found in by_name.items() if len(found) > 1} == {}


def test_no_two_public_classes_share_a_name() -> None:
    by_name = defaultdict(list)
    for module, file in modules().items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                by_name[node.name].append(module)
    assert {name: found for name, found in by_name.items() if len(found) > 1} == {}
