"""A complete run given again: answered from its folder, without torch, unless anything that it reads has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from eval.cli import main
from eval.run import loop
from lazyllm.presets import PRESETS
from tests.conftest import ROOT

QUICK = ["dataset=lookup", "limit=1", "max_new_tokens=2", "warmup=0", "method=random_drop"]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Mock]:
    """The command of a complete run of a model of one's own, and what counts the jobs that prepare and measure."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PRESETS["tiny"].source, "mine")
    command = ["run", "model=custom", "model.name=mine", "model.dtype=float32", *QUICK]
    assert main(command) == 0
    counted = Mock(side_effect=loop.measure)
    monkeypatch.setattr(loop, "measure", counted)
    return command, counted


def test_complete_run_given_again_shows_its_table_at_once(measured: tuple[list[str], Mock], capsys) -> None:
    command, counted = measured
    (folder,) = Path("runs").iterdir()
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert main(command) == 0
    assert (folder / "summary.md").read_text() in capsys.readouterr().out
    assert counted.call_count == 0
    assert {file: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


def _more_rows(command: list[str], folder: Path) -> None:
    command.append("limit=2")


def _another_setting(command: list[str], folder: Path) -> None:
    command.append("seed=3")


def _another_model(command: list[str], folder: Path) -> None:
    file = Path("mine/config.json")
    file.write_text(file.read_text().rstrip() + "\n\n")


def _less_visits(command: list[str], folder: Path) -> None:
    (folder / "visits.jsonl").write_text("")


@pytest.mark.parametrize("change", [_more_rows, _another_setting, _another_model, _less_visits])
def test_whatever_has_changed_the_run_is_prepared_as_usual(measured: tuple[list[str], Mock], change) -> None:
    command, counted = measured
    (folder,) = Path("runs").iterdir()
    change(command, folder)
    assert main(command) == 0
    assert counted.call_count == 1
    assert main(command) == 0  # and is complete then
    assert counted.call_count == 1


def test_neither_torch_nor_pandas_is_imported(measured: tuple[list[str], Mock]) -> None:
    command, _ = measured
    code = f"import sys\nfrom eval.cli import main\nassert main({command!r}) == 0\n"
    code += "print({'torch', 'transformers', 'pandas', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
