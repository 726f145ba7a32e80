"""The stdlib suite: rows have the promised properties, and come from files that are not trained on."""

from __future__ import annotations

import platform
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import stdlib
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.metrics import score_example

NAMES = tuple(stdlib.TEMPLATES)
EVERY = pytest.mark.parametrize("name", NAMES)
# Hashes of the rows as JSON lines, which must be equal on every version of Python
SHA256 = {
    "next_line": "54ca3d75acab042c4aa4f0677c5fceef6b525818acf295548d0eeb51a7126ca8",
    "cross_file": "c766fcb745e819b758dda415341465545cdf2608efb5737db2d79efd8bc5681e",
}


loaded = cache(lambda name: load_rows(DATASETS[name]))


@cache
def rows_of(name: str) -> list[dict[str, Any]]:
    return [example.official for example in loaded(name).examples]


@EVERY
def test_rows_are_the_same_on_every_python(name: str) -> None:
    assert loaded(name).data_sha256 == SHA256[name]


@EVERY
def test_row_asks_for_the_line_after_its_prompt(name: str) -> None:
    rows = rows_of(name)
    assert Counter(int(row["_id"].split("-")[1]) for row in rows) == dict.fromkeys(stdlib.LENGTHS, stdlib.ROWS // 3)
    assert len({row["_id"].split("-", 2)[2] for row in rows}) == stdlib.ROWS
    for row in rows:
        path, number = row["_id"].split("-", 2)[2].split(":")
        lines = "".join(stdlib.held_out_files()[path]).split("\n")
        before = "\n".join(lines[: int(number) - 1]) + "\n"
        prompt = stdlib.TEMPLATES[name].format(**row)
        own = row["input"] or row["context"]
        assert row["answers"] == [lines[int(number) - 1]]
        assert own.startswith(f"# {path}\n")
        assert before.endswith(own.removeprefix(f"# {path}\n"))
        assert prompt.endswith(own)
        length = int(row["_id"].split("-")[1])
        assert 0.4 * length < row["length"] == len(prompt) <= length + len(f"# {path}\n")


def test_files_are_held_out_by_module() -> None:
    files = stdlib.held_out_files()
    assert all(map(stdlib.is_held_out, files))
    assert {"http/client.py", "_pyio.py", "typing.py"} <= {*files}
    assert stdlib.module_of("http/client.py") == "http"
    assert stdlib.module_of("_pyio.py") == stdlib.module_of("io.py") == "io"
    assert not stdlib.is_held_out("json/decoder.py")


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the files are those of CPython 3.11.7")
def test_files_equal_the_library() -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path, lines in stdlib.held_out_files().items():
        assert "".join(lines) == (library / path).read_text(encoding="utf-8")


@EVERY
def test_gold_line_scores_1_and_another_less(name: str) -> None:
    row, other = rows_of(name)[:2]
    assert score_example(DATASETS[name], row["answers"][0] + "\n", row["answers"]) == 1
    assert score_example(DATASETS[name], other["answers"][0], row["answers"]) < 1
