"""README.md and docs/ name what exists: commands, keys, columns, links; their numbers are those
of results/.
"""

import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from eval.arms import Arm, expand
from eval.cli import COMMANDS
from eval.compose import read
from eval.run.work import Model
from eval.store.frame import COLUMNS
from eval.store.record import Answer
from lazyllm.engine.flops import attention_ceiling
from lazyllm.errors import UserError
from lazyllm.methods import Baseline
from lazyllm.models.config import shape_of
from lazyllm.spec import ModelSpec
from scripts.dev import docs
from tests.eval.made import write_run
from tests.eval.store.visits import visit

ROOT = docs.ROOT
PAGES = docs.pages()
RESULTS = sorted((ROOT / "results").rglob("README.md"))
WRITTEN = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *RESULTS]
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
# ](path#anchor), not ](https://...) and not ](#anchor)
_LINK = re.compile(r"\]\(([^)\s#:]+)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
# stands for what a reader fills in, or needs what only a GPU's owner has
_PLACEHOLDER = re.compile(r"\.\.\.|\$|\b(FOLDER|NAME|FILE|my_|mine\b)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def arms_of(arguments: list[str]) -> tuple[Arm, ...]:
    """The arms of a run with these arguments. Raises UserError for settings and hyperparameters
    that cannot be.
    """
    return expand(read([word for word in arguments if not word.startswith("hydra/")]))


def commands(text: str) -> list[str]:
    """The command lines of a page's code blocks and of its code in running text, each on one
    line.
    """
    blocks = [
        block
        for language, block in _FENCE.findall(text)
        if language in ("bash", "console", "sh", "")
    ]
    inline = re.findall(r"`([^`]+)`", _FENCE.sub("", text))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines() + [
        " ".join(code.split()) for code in inline
    ]
    return [re.sub(r"\s#.*", "", line).strip() for line in lines]


def run_arguments(line: str) -> list[str] | None:
    """The overrides of a line that runs, plans or fetches; None for another one or one with
    placeholders.
    """
    # -sc is the shell's
    match = re.search(r"(?:python run\.py|lazyllm-bench (run|plan|fetch)) (?!-sc )(.+)", line)
    if match is None or _PLACEHOLDER.search(match[2]):
        return None
    words = shlex.split(re.split(r" && | \| ", match[2])[0])
    # the first of a sweep's values is composed
    swept = "-m" in words or match[1] in ("plan", "fetch")
    return [
        re.sub(r"^([\w./+]+=[^\[{,]+),.*", r"\1", word) if swept else word
        for word in words
        if "=" in word
    ]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_ceilings_of_sparse_attention_are_those_of_the_flops() -> None:
    page = text_of(ROOT / "docs/methods.md")
    head = next(line for line in page.splitlines() if line.startswith("| tokens |"))
    lengths = [int(cell.replace(",", "")) for cell in re.findall(r"[\d,]+", head)]
    rows = [line for line in page.splitlines() if re.search(r"\d % \([\d.]+x\)", line)]
    assert len(rows) == 4
    for row in rows:
        printed = [
            (float(share), float(ceiling))
            for share, ceiling in re.findall(r"([\d.]+) % \(([\d.]+)x\)", row)
        ]
        for name in re.findall(r"`([\w.-]+)`", row):
            ceilings = [attention_ceiling(shape_of(ModelSpec(name, "dummy")), n) for n in lengths]
            assert printed == [
                (round(100 - 100 / ceiling, 1), round(ceiling, 2)) for ceiling in ceilings
            ]


@pytest.mark.parametrize("page", docs.filled(), ids=name_of)
def test_make_docs_changes_nothing(page: Path) -> None:
    text = text_of(page)
    assert docs.inserted(text) == text, "python -m scripts.dev.docs"


def table_of(source: str) -> list[str]:
    """The lines of a table that is inserted into a page in the place of an old one."""
    begin, end = f"<!-- insert: {source} -->\n", "<!-- end -->\n"
    text = docs.inserted(f"{begin}\n| old |\n\n{end}")
    assert text.startswith(begin)
    assert text.endswith(end)
    return text.splitlines()[2:-2]


def test_tables_rows_and_columns_are_inserted() -> None:
    """The heading, the rule and a row of each arm of the demo; columns from 1."""
    page = text_of(ROOT / "results/demo/demo.md")
    assert table_of("results/demo/demo.md") == [
        line for line in page.splitlines() if line.startswith("|")
    ]
    head, rule, *rows = table_of("results/demo/demo.md needle columns 2-4")
    assert (head, rule) == ("| method | n | score |", "|---|---:|---:|")
    assert [row.split("|")[1].strip() for row in rows][:2] == ["baseline", "lazy 1.5x"]
    _, _, *rows = table_of(r"results/demo/demo.md needle.. \| (lazy|static) columns 2")
    assert [row.strip("| ") for row in rows] == ["lazy 1.5x", "static_pruning 1.5x"]
    head, rule, *_ = table_of("results/demo/demo.md needle columns 1-2,4")
    assert (head, rule) == ("| **task**, dataset | method | score |", "|---|---|---:|")
    with pytest.raises(FileNotFoundError):
        table_of("results/no_such.md")


def test_pages_are_few_and_short_and_say_whom_they_are_for() -> None:
    lines = {name_of(page): text_of(page).splitlines() for page in PAGES}
    assert {
        name: len(page)
        for name, page in lines.items()
        if len(page) > (90 if name == "README.md" else 150)
    } == {}
    assert [
        name
        for name, page in lines.items()
        if name != "README.md" and not page[2].startswith("For ")
    ] == []
    del lines["README.md"]
    assert len(lines) <= 16
    assert sum(len(line.split()) for page in lines.values() for line in page) <= 14_000


def test_memory_of_models_is_that_of_a_plan() -> None:
    page = text_of(ROOT / "docs/models.md")
    rows = re.findall(
        r"^\| `(\S+)` \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert rows
    for name, prompt_tokens, weights, mean, most in rows:
        cut = {"llama2": 3500, "xgen": 7500}.get(name, 84_221)
        for tokens, everything in ((int(prompt_tokens.replace(",", "")), mean), (cut, most)):
            parts = Model.of(ModelSpec(name, "dummy", "bfloat16")).memory(Baseline(), tokens, 512)
            assert parts["weights"] / 1e9 == pytest.approx(float(weights), abs=0.05)
            assert sum(parts.values()) / 1e9 == pytest.approx(float(everything), rel=0.01)


def test_every_folder_of_results_says_how_it_was_made() -> None:
    folders = [folder for folder in (ROOT / "results").iterdir() if folder.is_dir()]
    assert folders
    assert all(folder / "README.md" in RESULTS for folder in folders)


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_relative_links_and_anchors_exist(page: Path) -> None:
    text = text_of(page)
    for link, anchor in _LINK.findall(_CODE.sub("", text)):
        target = (page.parent / link).resolve()
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(text_of(target)), f"{link}#{anchor}"
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert set(links) <= anchors(text)


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for line in commands(text_of(page)):
        for command in re.findall(r"\blazyllm-bench ([a-z][\w-]*)", line):
            assert command in COMMANDS, line
        for target in re.findall(r"^make ([a-z-]+)", line):
            assert re.search(rf"^{target}:", text_of(ROOT / "Makefile"), re.MULTILINE), line


@pytest.mark.parametrize(("ttft_s", "code"), [(0.1, 0), (0.39, 1)])
def test_gate_passes_what_is_fast_enough(
    ttft_s: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline takes 0.4 s: four times as long, or hardly longer."""
    blocks = _FENCE.findall(text_of(ROOT / "docs" / "results.md"))
    (gate,) = [block for language, block in blocks if language == "python"]
    write_run(
        tmp_path / "runs" / "one", [visit(number, score=1.0, ttft_s=ttft_s) for number in range(6)]
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        exec(gate, {})
    assert ended.value.code == code


def test_columns_exist() -> None:
    page = text_of(ROOT / "docs/results.md")
    (table,) = re.findall(r"^\| column \|.*\n((?:\|.*\n)+)", page, re.M)
    names = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()]
    assert set() < set(chain(*names)) <= {*COLUMNS, *Answer.model_fields}


def run_lines() -> list[tuple[str, str]]:
    found = [(page, line) for page in WRITTEN for line in commands(text_of(page))]
    return [(name_of(page), line) for page, line in found if run_arguments(line)]


@pytest.mark.parametrize(("page", "line"), run_lines(), ids=lambda value: value[:60])
def test_settings_of_commands_exist(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(
        r"`(\w+\.py)`:\n\n```python\n(.*?)```", text_of(ROOT / page), re.S
    ):
        Path(name).write_text(text)  # a file that the page asks the reader to write
    try:
        arms_of(run_arguments(line) or [])
    except UserError as error:
        pytest.fail(f"{page}: {line}\n{error}")


def test_an_unknown_setting_is_seen() -> None:
    words = run_arguments("python run.py -m model=tiny,llama2 method=lazy answers.rows=8") or []
    assert words == ["model=tiny", "method=lazy", "answers.rows=8"]
    with pytest.raises(UserError, match="answers"):
        arms_of(words)


@pytest.mark.slow
def test_site_builds_with_search_and_reference() -> None:
    subprocess.run(["make", "pages"], cwd=ROOT, check=True, timeout=60)
    build = "-m zensical build --strict --clean --config-file mkdocs.yml"
    subprocess.run([sys.executable, *build.split()], cwd=ROOT, check=True, timeout=300)
    built = ROOT / "build" / "site"
    assert "first token" in text_of(built / "index.html")
    reference = text_of(built / "docs" / "library" / "index.html")
    for name in (
        "lazyllm.generate",
        "lazyllm.methods.Method",
        "lazyllm.methods.Prune",
        "eval.benchmarks.suite.Suite",
    ):
        assert f'id="{name}"' in reference
    assert "docs/methods" in text_of(built / "search.json")
