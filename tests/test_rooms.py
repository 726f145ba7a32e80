"""Structure: each room imports only rooms below it, no modules import each other in a circle, and
few need torch.

Read from the code by `ast`, imports inside functions and for type checkers alone included.
"""

import ast
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

# From the ground up: a room imports rooms of lower floors only. On the roof: the command line,
# `eval.cli`
FLOORS = [
    ["lazyllm.errors", "eval.settings"],
    ["lazyllm.files", "lazyllm.machine", "lazyllm.presets"],
    ["lazyllm.spec"],
    ["lazyllm.engine"],
    ["lazyllm.measuring", "lazyllm.models"],
    ["lazyllm.methods"],
    ["lazyllm.integrations"],
    ["lazyllm"],
    ["lazyllm.check", "eval.benchmarks"],
    ["eval.config"],
    ["eval.arms", "eval.compose", "eval.store"],
    ["eval.analysis"],
    ["eval.report"],
    ["eval.run"],
    ["eval.tune"],
    ["eval.cli"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Rooms of settings, records and tables: no import of theirs leads to torch, unless a function makes
# it
LIGHT = [
    "eval.arms",
    "eval.benchmarks",
    "eval.compose",
    "eval.config",
    "eval.settings",
    "eval.store",
    "eval.analysis",
]


@cache
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
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> set[str]:
    """The modules of both packages that a module imports."""
    return imported_in(tree_of(module)) - {module}


class _AtRunTime(ast.NodeTransformer):
    """Leaves out what only type checkers read: a type may come from a module that imports this
    one.
    """

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def imported_in(tree: ast.Module) -> set[str]:
    """The modules of both packages that some code imports, by a statement or by `import_module`."""
    nodes = [*ast.walk(tree)]
    names = {name for node in nodes for name in named_by(node)}
    if (
        "importlib.import_module" in names or "importlib" in names
    ):  # each text that names a module may be its argument
        names |= {
            str(node.value)
            for node in nodes
            if isinstance(node, ast.Constant) and node.value in modules()
        }
    return {module for name in names if (module := ours(name))}


def named_by(node: ast.AST) -> Iterator[str]:
    """The dotted names of an import statement."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(name: str) -> str:
    """The module of both packages that a dotted name lies in; "" for another's."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


@cache
def needed(module: str) -> frozenset[str]:
    """The dotted names that importing a module imports, without those in functions and for type
    checkers.
    """
    found = set[str]()
    waiting: list[ast.AST] = [tree_of(module)]
    while waiting:
        node = waiting.pop()
        found.update(named_by(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        waiting += (
            [] if isinstance(node, ast.FunctionDef | ast.Lambda) else ast.iter_child_nodes(node)
        )
    return frozenset({*found, module.rpartition(".")[0]})  # a module's package is imported first


def test_each_room_imports_only_rooms_below_it() -> None:
    arrows = [(module, other) for module in modules() for other in imports(module)]
    rooms = [(module, other, room_of(module), room_of(other)) for module, other in arrows]
    assert len(rooms) > 500
    assert not [
        arrow for *arrow, room, below in rooms if room != below and FLOOR[room] <= FLOOR[below]
    ]


def test_no_modules_import_each_other_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in imported_in(_AtRunTime().visit(deepcopy(tree_of(module)))) - {module}:
                visit(imported, [*path, module])
            done.add(module)

    for module in modules():
        visit(module, [])


@pytest.mark.parametrize(
    "code",
    [
        "from importlib import import_module\nimport_module('eval.run.loop').measure",
        "import importlib\nimportlib.import_module('eval.run.loop')",
        "def measure():\n    from eval.run import loop\n    return loop",
    ],
)
def test_an_import_by_name_or_in_a_function_is_seen(code: str) -> None:
    assert imported_in(ast.parse(code)) == {"eval.run.loop"}


@pytest.mark.parametrize("room", LIGHT)
def test_settings_records_and_tables_need_no_torch(room: str) -> None:
    waiting = [module for module in modules() if room_of(module) == room]
    assert waiting
    reached = dict.fromkeys(waiting, "")
    while waiting:
        module = waiting.pop()
        for name in needed(module):
            assert name.partition(".")[0] not in ("torch", "transformers"), (
                f"{reached[module]} -> {module} -> {name}"
            )
            if (known := ours(name)) and known not in reached:
                reached[known] = f"{reached[module]} -> {module}"
                waiting.append(known)
