"""A new user's installation: the wheel alone, and the README's example run outside the
repository.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from lazyllm.errors import UserError
from lazyllm.presets import PRESETS
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

PACKAGES = ("lazyllm", "eval")
COMMANDS = """
from eval.cli import main
assert main(["run", "model=tiny", "limit=2", "dataset=lookup", "max_new_tokens=4", "warmup=0"]) == 0
assert main(["paper", "runs", "--out", "paper"]) == 0
assert main(["status", "runs"]) == 0
"""


def pip(*arguments: str) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run(
        [sys.executable, "-m", "pip", arguments[0], *options, *arguments[1:]], check=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as a build leaves files that would get into the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in (*PACKAGES, "conf"):
        shutil.copytree(
            ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder))
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--target", str(target), str(wheel))
    return target


def run_as_a_new_user(installed: Path, folder: Path, script: str, typed: str = "") -> str:
    """The output of `script`, run in `folder` with the installed wheel and other packages, without
    the repository.

    typed: its standard input.

    -I -S: no environment variables, no folder of the script, no .pth files, so no editable install
    either.
    """
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    file = folder / "example.py"
    file.write_text(script)
    start = (
        f"import sys, runpy; sys.path[:0] = {paths!r}; runpy.run_path({str(file)!r}, "
        "run_name='__main__'); import lazyllm; assert "
        f"lazyllm.__file__.startswith({str(installed)!r}), lazyllm.__file__; assert not [path for "
        f"path in sys.path if path.startswith({str(ROOT)!r}) and 'site-packages' not in path]"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start],
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        env={
            "PATH": os.defpath,
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    file.unlink()
    return done.stdout


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    here = {
        file.relative_to(ROOT).as_posix()
        for folder in (*PACKAGES, "eval/conf")  # a link, which rglob does not follow
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert there == here
    assert "eval/conf/config.yaml" in there
    distribution = wheel.name.removesuffix("-py3-none-any.whl")
    entry_points = zipfile.ZipFile(wheel).read(f"{distribution}.dist-info/entry_points.txt")
    assert b"lazyllm-bench = eval.cli:main" in entry_points


def example_of_the_docs(part: str) -> str:
    """The first example in docs/library.md that holds this part."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), flags=re.DOTALL
    )
    return next(block for block in blocks if part in block)


def test_example_of_the_docs_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    printed = run_as_a_new_user(installed, tmp_path, example_of_the_docs("lazyllm.using("))
    assert "lantern copper" in printed  # the entry that the prompt asks for


def test_chat_of_the_docs_answers_about_its_file(installed: Path, tmp_path: Path) -> None:
    try:
        PRESETS["smollm2"].find()
    except UserError as error:
        pytest.skip(f"model=smollm2: {error}")
    facts = (
        "The committee met in Lisbon. It talked about the harbour, built in 1907. The next meeting "
        "is in Oslo. "
    )
    (tmp_path / "report.txt").write_text(
        facts + "The old house was quiet, and the garden was full of flowers. " * 20
    )
    typed = "In which city is the next meeting?\nWhen was the harbour built?\n\n"
    first, second = run_as_a_new_user(
        installed, tmp_path, example_of_the_docs("TextStreamer"), typed
    ).split("> ")[1:3]
    assert "Oslo" in first
    assert "1907" in second


def test_commands_of_the_wheel_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    printed = run_as_a_new_user(installed, tmp_path, COMMANDS)
    assert "1 run: 1 done" in printed
    assert len(list((tmp_path / "runs").glob("tiny-lazy-lookup-*/visits.jsonl"))) == 1
    assert (tmp_path / "paper" / "README.md").exists()
