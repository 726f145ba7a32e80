"""The stdlib suite: completion of the next line of real Python source, in two datasets scored like LongBench's code.

| name       | the prompt                                        | the gold line                                      |
|------------|---------------------------------------------------|----------------------------------------------------|
| next_line  | the file up to a line (as LongBench's lcc)        | has a name that the 20 lines before it lack        |
| cross_file | chunks of other files, then the file up to a line | has a name that only the other files have          |
|            | (as LongBench's repobench-p)                      |                                                    |

Every name of a gold line occurs in its prompt, so distant parts of the prompt matter. The files come from the standard
library of CPython 3.11.7: the modules that `is_held_out` selects. They are part of this package
(`stdlib_held_out.json.xz`; copyright Python Software Foundation, PSF License 2), so that rows do not depend on the
installed version of Python. `scripts/dev/train.py` leaves the same modules out of training.

Chunks of other files are chosen without the gold line: those that share most names with the lines before it, the best
one last.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import lzma
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path, PurePosixPath
from typing import Any

from eval.benchmarks.metrics import score_example
from eval.benchmarks.rows import canonical, load_lines
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite

LENGTHS = (3_000, 6_000, 9_000)
"""Prompt lengths in characters, taken in turn by rows: about 1,000, 2,000 and 3,000 tokens of the coder's tokenizer."""

ROWS = 240
"""The number of rows of each dataset, 80 per prompt length; a run takes the first `limit` rows."""

RECENT = 20
"""The number of lines before the gold line that must lack one of its names, in `next_line`."""

CHUNK = 20
"""The number of lines of a chunk of another file."""

MAX_NEW_TOKENS = 48

TEMPLATES = {"next_line": "{context}", "cross_file": "{context}{input}"}

_HELD_OUT = Path(__file__).with_name("stdlib_held_out.json.xz")
_NAME = re.compile(r"[A-Za-z_]\w{2,}")
_STATEMENT = re.compile(r"\s*[A-Za-z_@].*[=(.\[]")
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
_WORDS = {*keyword.kwlist, "self", "cls", "None", "True", "False"}

Lines = list[str]


def module_of(path: str) -> str:
    """The module of a file of the library: http for http/client.py, io for _pyio.py."""
    name = PurePosixPath(path).parts[0].removesuffix(".py")
    return name.lstrip("_").removeprefix("py") or name


def is_held_out(path: str) -> bool:
    """Whether a file's module is left out of training: 1 of 8 modules, by the hash of its name."""
    return hashlib.sha256(module_of(path).encode()).digest()[0] % 8 == 0


def related(path: str, text: str, files: Iterable[str]) -> list[str]:
    """The files related to a file: those of its package, and those of modules that it imports."""
    imported = {name.split(".")[0] for name in _IMPORT.findall(text)}
    package = PurePosixPath(path).parent
    return [
        file
        for file in files
        if file != path and (PurePosixPath(file).parent == package != PurePosixPath(".") or module_of(file) in imported)
    ]


def header(path: str) -> str:
    """The line before code of a file in a prompt."""
    return f"# {path}\n"


@cache
def held_out_files() -> dict[str, Lines]:
    """The lines of every held-out file, by its path below the library's folder."""
    files = json.loads(lzma.decompress(_HELD_OUT.read_bytes()))
    return {path: text.splitlines(keepends=True) for path, text in files.items()}


def names(lines: Iterable[str]) -> set[str]:
    """The names in code, except keywords and names of fewer than three letters."""
    return set().union(*map(_names, lines))


@cache
def _names(line: str) -> frozenset[str]:
    return frozenset(_NAME.findall(line)) - _WORDS


@dataclass(frozen=True)
class Target:
    """A line to complete: line `number` (from 0) of a file."""

    path: str
    number: int

    @property
    def gold(self) -> str:
        return held_out_files()[self.path][self.number].rstrip("\n")

    def before(self, characters: int) -> Lines:
        """The last whole lines before the target with at most N characters."""
        lines = held_out_files()[self.path][: self.number]
        taken = 0
        for i in reversed(range(len(lines))):
            taken += len(lines[i])
            if taken > characters:
                return lines[i + 1 :]
        return lines


@cache
def _targets() -> list[Target]:
    """All possible gold lines, in a fixed random order: statements of 12 to 80 characters without comments."""
    found = []
    for path, lines in held_out_files().items():
        in_text = False  # inside a string of several lines
        for number, line in enumerate(lines):
            marks = line.count('"""') + line.count("'''")
            usable = not in_text and not marks and not {"#", "`"} & {*line} and "//" not in line
            if usable and 12 <= len(line.strip()) <= 80 and _STATEMENT.match(line) and names([line]):
                found.append(Target(path, number))
            in_text ^= marks % 2 == 1
    random.Random("stdlib").shuffle(found)
    return found


def _next_line(target: Target, length: int) -> tuple[str, str] | None:
    """Context and input of a `next_line` row; None if the target needs no distant line."""
    lines = target.before(length)
    wanted = names([target.gold])
    if sum(map(len, lines)) < 0.8 * length or not wanted <= names(lines) or wanted <= names(lines[-RECENT:]):
        return None
    return header(target.path) + "".join(lines), ""


@cache
def _chunks(path: str) -> list[tuple[str, set[str]]]:
    """The chunks of a file in a prompt's format, and the names in each."""
    lines = held_out_files()[path]
    parts = [lines[i : i + CHUNK] for i in range(0, len(lines), CHUNK)]
    return [(header(path) + "".join(part), names(part)) for part in parts]


@cache
def _related_chunks(path: str) -> list[tuple[str, set[str]]]:
    """The chunks of all files related to a file."""
    files = held_out_files()
    return [chunk for other in related(path, "".join(files[path]), files) for chunk in _chunks(other)]


def _cross_file(target: Target, length: int) -> tuple[str, str] | None:
    """Context and input of a `cross_file` row; None if the target needs no name of the other files."""
    own = target.before(length // 2)
    wanted = names([target.gold]) - names(own)
    if not wanted or sum(map(len, own)) < 0.4 * length:
        return None
    recent = names(own[-RECENT:])
    ranked = sorted(_related_chunks(target.path), key=lambda chunk: len(recent & chunk[1]), reverse=True)
    room, chosen, named = length - sum(map(len, own)), [], set[str]()
    for text, there in ranked:
        room -= len(text)
        if room < 0:
            break
        chosen.append(text)
        named |= there
    if not wanted <= named:
        return None
    return "".join(reversed(chosen)), header(target.path) + "".join(own)


PROMPTS = {"next_line": _next_line, "cross_file": _cross_file}


def _rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of the targets that suit the current length; lengths take turns."""
    turns = cycle(LENGTHS)
    length = next(turns)
    for target in _targets():
        if (prompt := PROMPTS[name](target, length)) is None:
            continue
        context, asked = prompt
        yield {
            "input": asked,
            "context": context,
            "answers": [target.gold],
            "length": len(context) + len(asked),
            "dataset": name,
            "language": "python",
            "all_classes": None,
            "_id": f"{name}-{length}-{target.path}:{target.number + 1}",
        }
        length = next(turns)


def rows(name: str, count: int = ROWS) -> list[dict[str, Any]]:
    """The first `count` rows of a dataset, in LongBench's format; `length` is in characters."""
    return list(islice(_rows(name), count))


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """One dataset, with rows made from the files in the package."""
    data = b"\n".join(map(canonical, rows(dataset.name)))
    source = f"stdlib suite, {dataset.name}"
    return load_lines(dataset, data, source, TEMPLATES[dataset.name], MAX_NEW_TOKENS, settings.on_error)


SUITE = Suite(
    name="stdlib",
    version=1,
    datasets=tuple(
        Dataset(name, "code", "code_similarity", suite="stdlib", chat_wrap=False, newline_ends=True)
        for name in TEMPLATES
    ),
    load=load,
    score=score_example,
    whole="stdlib",
    models=("coder",),
    limit=24,  # enough for a first look
    reference_tokens=2048,  # about the middle one of `LENGTHS`
)
