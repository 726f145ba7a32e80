"""The stdlib suite: rows have the promised properties, and come from files that are not trained on."""

import platform
import sysconfig
from pathlib import Path

import pytest

from eval.benchmarks import stdlib
from eval.benchmarks.datasets import DATASETS, load_rows
from scripts.dev.train import is_held_out, module_of

# Hashes of the rows as JSON lines, which must be equal on every version of Python
SHA256 = {
    "next_line": "54ca3d75acab042c4aa4f0677c5fceef6b525818acf295548d0eeb51a7126ca8",
    "cross_file": "c766fcb745e819b758dda415341465545cdf2608efb5737db2d79efd8bc5681e",
}


@pytest.mark.parametrize("name", stdlib.TEMPLATES)
def test_rows_are_ends_of_held_out_files_before_the_gold_line(name: str) -> None:
    library, loaded = Path(sysconfig.get_paths()["stdlib"]), load_rows(DATASETS[name])
    assert loaded.data_sha256 == SHA256[name]
    for row in (example.official for example in loaded.examples):
        path, number = row["_id"].split("-", 2)[2].split(":")
        own = row["input"] or row["context"]
        assert is_held_out(path)
        assert stdlib.TEMPLATES[name].format(**row).endswith(own)
        if platform.python_version() == "3.11.7":  # whose files they are
            lines = (library / path).read_text(encoding="utf-8").split("\n")
            assert row["answers"] == [lines[int(number) - 1]]
            assert ("\n".join(lines[: int(number) - 1]) + "\n").endswith(own.removeprefix(f"# {path}\n"))


def test_modules_are_held_out_by_name() -> None:
    assert module_of("http/client.py") == "http"
    assert module_of("_pyio.py") == module_of("io.py") == "io"
    assert is_held_out("_pyio.py")
    assert not is_held_out("json/decoder.py")
