"""Structure: each room imports only rooms below it, and there is no import cycle.

Read from the code by `ast`, imports inside functions and for type checkers alone included.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

# From the ground up: a room imports rooms of lower floors only. On the roof: the command line, `eval.cli`
FLOORS = [
    ["lazyllm.errors"],
    ["lazyllm.files", "lazyllm.machine", "lazyllm.presets"],
    ["lazyllm.spec"],
    ["lazyllm.engine"],
    ["lazyllm.measuring", "lazyllm.models"],
    ["lazyllm.methods"],
    ["lazyllm.integrations"],
    ["lazyllm"],
    ["lazyllm.check", "eval.benchmarks"],
    ["eval.score", "eval.store"],
    ["eval.analysis"],
    ["eval.report"],
    ["eval.run"],
    ["eval.tune"],
    ["eval.cli"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """{dotted name: file} of both packages."""
    found = {}
    for file in [*(ROOT / "lazyllm").rglob("*.py"), *(ROOT / "eval").rglob("*.py")]:
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def room_of(module: str) -> str:
    """The room that holds a module; of `eval` itself, "" (it is an empty file)."""
    return max((room for room in FLOOR if f"{module}.".startswith(f"{room}.")), key=len, default="")


@cache
def imports() -> dict[str, set[str]]:
    """{module: modules of both packages that it names in an import}."""
    known = modules()
    return {module: {name for name in imports_of(file, known) if name != module} for module, file in known.items()}


def imports_of(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file imports. If it calls `import_module`, the texts that name modules count too."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    imports_by_name = any(isinstance(node, ast.Name) and node.id == "import_module" for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif imports_by_name and isinstance(node, ast.Constant) and node.value in known:
            names = [str(node.value)]
        else:
            continue
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name


def test_each_room_imports_only_rooms_below_it() -> None:
    arrows = [(module, other) for module, others in imports().items() for other in others]
    rooms = [(module, other, room_of(module), room_of(other)) for module, other in arrows]
    assert not [arrow for *arrow, room, below in rooms if room != below and FLOOR[room] <= FLOOR[below]]


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
