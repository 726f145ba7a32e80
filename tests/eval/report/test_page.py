"""The page of `paper`: its content, and the whole in headless Chromium."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from eval.analysis.style import new_figure
from eval.analysis.table import Cell, Figure, Table
from eval.report.content import content_of
from eval.report.page import answers_of, render, runs_table, warnings
from eval.store.record import Visit
from eval.store.results import Results, read_results
from scripts.dev import records
from tests.eval.made import stored, write_run
from tests.eval.store.visits import FAILED, answer, visit

HOSTILE = (
    "</script><script>window.hacked=1</script>"
    '<img src=x onerror="window.hacked=1"><!--<script>{{ 1234 * 5678 }}&amp;'
)


def entries_of(visits: list[Visit], most: int | None = None) -> list[dict[str, Any]]:
    return [entry for entries in answers_of(stored(visits), most).values() for entry in entries]


def test_an_answer_has_its_numbers_beside_the_baselines() -> None:
    baseline = {"score": 0.5, "computed": [[100, 100]]}
    example = visit(1, "hotpotqa", baseline, score=0.25, ttft_s=0.16, kl=0.0123, answer_kl=0.5)
    (entry,) = entries_of([example])
    assert entry["visit"] == example
    unpruned, lazy = entry["answers"].values()
    assert (
        unpruned["numbers"] == "score 50.0, TTFT 400.0 ms, 100.0 % of the prompt computed, 2 tokens"
    )
    assert lazy["numbers"] == (
        "score 25.0 (-25.0), TTFT 160.0 ms (2.50x), 75.0 % of the prompt computed, KL 0.0123, "
        "answer's KL 0.5, 2 tokens"
    )
    (random,) = entries_of([visit(1, "random", {"score": None}, score=None)])
    assert "score" not in random["answers"]["lazy"]["numbers"]


def test_examples_are_limited_in_each_dataset() -> None:
    datasets = ("hotpotqa", "trec")
    entries = entries_of([visit(row, name) for name in datasets for row in range(3)], 2)
    found = [(entry["visit"].dataset, entry["visit"].id) for entry in entries]
    assert found == [(name, f"row-{row}") for name in datasets for row in (0, 1)]


def test_an_arm_that_came_back_stands_beside_the_baseline_of_its_own_visit() -> None:
    failed = visit(0, arms={"baseline": answer(text="first", ttft_s=9.0), "lazy": FAILED})
    (entry,) = entries_of([failed, visit(0, ttft_s=0.1)])  # whose baseline takes 0.4 s
    baseline, lazy = entry["answers"].values()
    assert baseline["text"] == "first"
    assert "TTFT 100.0 ms (4.00x)" in lazy["numbers"]


def test_warnings_name_their_runs() -> None:
    visits = [visit(row) for row in range(3)]
    fine = [stored(visits, method, folder=Path(method)) for method in ("lazy", "baseline")]
    assert warnings(fine, None) == []
    alone = stored([visit(baseline=None)], folder=Path("alone"), baseline=None, warmup=0)
    dirty = stored(visits, folder=Path("dirty"), provenance={"git_commit": "c0ffee+changes"})
    expected = (
        r"without a baseline.*\(alone\)", r"without warm-up.*\(alone\)",
        r"uncommitted code.*\(dirty\)",
        "the first 2 of each dataset's examples",
    )  # fmt: skip
    for text, pattern in zip(warnings([*fine, alone, dirty], 2), expected, strict=True):
        assert re.search(pattern, text)


def test_runs_say_where_they_were_measured() -> None:
    run = stored([visit(0), visit(1)], folder=Path("a/run"), provenance={"started": "2026-01-02"})
    columns = ["model", "arms", "examples", "datasets", "device", "started", "commit", "folder"]
    assert runs_table([run]).cells[columns].to_numpy().tolist() == [
        ["tiny", "baseline, lazy", "2", "1", "a device", "2026-01-02", "abc", "run"]
    ]


def hand_table(results: Results) -> Table:
    """A table as `eval.analysis` makes them; its cells and words are hostile."""
    names = ["b", "a", HOSTILE, "d", "e"]
    scores = [Cell("10.5 ±1", 10.5), Cell("9", 9), Cell("no run"), Cell("100", 100), Cell("9", 9)]
    cells = pd.DataFrame({f"name {HOSTILE}": names, "score": scores}, dtype=object)
    words = (f"By hand {HOSTILE}", f"Caption {HOSTILE}")
    return Table("hand", *words, cells, cells, notes=f"Notes {HOSTILE}")


def hand_figure(name: str, **data: list[float]) -> Figure:
    def draw(frame: pd.DataFrame) -> Any:
        figure = new_figure(14, 3)
        figure.subplots().plot(frame["x"], frame["x"], label=HOSTILE)
        figure.legend(title=HOSTILE)
        return figure

    return Figure(name, f"Caption {HOSTILE}", lambda results: pd.DataFrame(data), draw)


BARE = Table("bare", "Nothing", "", pd.DataFrame(), pd.DataFrame({"task": [], "score": []}))
TABLES = {"hand": hand_table, "bare": lambda results: BARE}
FIGURES = {"hand": hand_figure(f"Drawn {HOSTILE}", x=[1.0, 2.0]), "bare": hand_figure("Not drawn")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A run of LazyLLM with 45 visits, one of them hostile; and one of 2 without a baseline."""
    folder = tmp_path_factory.mktemp("runs")
    about: dict[str, Any] = {"prompt_tokens": 1000, "uncut_tokens": 1200}
    hostile: dict[str, Any] = {"text": HOSTILE, "prompt_end": HOSTILE, "gold": [HOSTILE]}
    visits = [
        visit(0, "hotpotqa", {"text": "so it was"}, text="so it is", ttft_s=0.16, **about),
        visit(1, "hotpotqa", {"text": f"{HOSTILE} too"}, **hostile),
        visit(2, "hotpotqa", {"text": "the same"}, text="the same"),
        *(visit(row, "trec") for row in range(3, 45)),
    ]
    write_run(folder / "lazy", visits)
    unpaired = [visit(row, baseline=None) for row in (0, 1)]
    write_run(folder / "static", unpaired, "static_pruning", baseline=None)
    return read_results([folder])[0]


def test_page_refers_to_nothing_outside_itself_and_escapes_hostile_text(results: Results) -> None:
    page = render(results, content_of(results, TABLES, FIGURES))
    style_and_script = re.findall(r"(?s)<style>.*?</style>|<script>.*</script>", page)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", "".join(style_and_script))
    names = r"\b(?:src|href|action|data|poster|srcset)=[\"']?([^\"'\s>]*)"
    references = {
        reference
        for reference in re.findall(names, page)
        if not reference.startswith(("#", "data:"))
    }
    assert references <= {"x"}  # of the hostile text, which is text
    assert "default-src 'none'" in page
    assert page.count("</script>") == page.count("<script") == 1
    assert page.count("<img") == 1  # the figure
    assert "<!--<script" not in page
    assert str(1234 * 5678) not in page  # it is not computed


def test_answers_without_texts_are_not_shown_as_equal(results: Results, tmp_path: Path) -> None:
    records.write(tmp_path, results.runs)
    (bare,) = read_results([tmp_path])
    page = render(bare, content_of(bare, {}, {}))
    assert set(re.findall(r"<pre>(.*?)</pre>", page)) == {"(not stored)"}


def program(*names: str) -> str:
    """Find the first program that is installed. If there is none, skip; on a CI machine, fail."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"none of {', '.join(names)} is here: install chromium and chromium-driver (.ci/run)")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium-browser", "google-chrome")
    # as root, as in a container, its sandbox does not start; /dev/shm is small there
    for name in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # both paths are given, so that selenium looks for nothing to download
    driver = webdriver.Chrome(options=options, service=Service(program("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, results: Results, tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """The page, newly opened; it may log no error and run no injected script."""
    file = tmp_path / "page.html"
    file.write_text(render(results, content_of(results, TABLES, FIGURES)), encoding="utf-8")
    browser.get(file.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return window.hacked") is None


def texts(page: webdriver.Chrome, selector: str) -> list[str]:
    """What a reader sees: nothing of what is folded away."""
    return [element.text for element in page.find_elements(By.CSS_SELECTOR, selector)]


def unfold(page: webdriver.Chrome, selector: str) -> None:
    page.find_element(By.CSS_SELECTOR, f"{selector} summary").click()


@pytest.mark.slow
@pytest.mark.parametrize("without_scripts", [False, True])
def test_page_shows_everything(page: webdriver.Chrome, without_scripts: bool) -> None:
    page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": without_scripts})
    try:
        page.refresh()
        assert texts(page, "#hand h3") == [f"By hand {HOSTILE}"]
        assert texts(page, "#hand td:first-child") == ["b", "a", HOSTILE, "d", "e"]
        assert texts(page, "#hand > .caption") == [f"Caption {HOSTILE}"]
        unfold(page, "#hand")
        assert texts(page, "#hand details .caption") == [f"Notes {HOSTILE}"]
        missing = [text.partition(":")[0] for text in texts(page, "#missing li")]
        assert missing == ["Nothing", "Not drawn"]
        assert texts(page, "#bare, #figure-bare") == []
        picture = page.find_element(By.CSS_SELECTOR, "#figure-hand img")
        assert picture.accessible_name == f"Drawn {HOSTILE}"
        (warning,) = texts(page, ".warnings li")
        assert warning.startswith("Measured without a baseline")
        assert texts(page, "#runs td:nth-child(2)") == ["baseline, lazy", "lazy"]
        assert texts(page, ".dataset > summary") == ["hotpotqa (3)", "trec (42)", "hotpotqa (2)"]
        assert set(texts(page, "article h4")) == {""}  # folded away
        unfold(page, ".dataset")
        first, hostile, same = texts(page, ".dataset[open] article")
        assert first.splitlines() == [
            "row-0, 1,000 prompt tokens, cut from 1,200",
            "End of the prompt", "...", "why?", "Gold", "because", "so", "baseline",
            "score 100.0, TTFT 400.0 ms, 7.5 % of the prompt computed, 2 tokens", "so it was",
            "lazy",
            "score 50.0 (-50.0), TTFT 160.0 ms (2.50x), 7.5 % of the prompt computed, 2 tokens",
            "so it is",
        ]  # fmt: skip
        assert hostile.splitlines().count(HOSTILE) == 3  # prompt, gold and answer
        assert same.splitlines()[-1] == "(the baseline's answer)"
    finally:
        page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.slow
def test_a_heading_sorts_by_number_with_empty_cells_last(page: webdriver.Chrome) -> None:
    headings = page.find_elements(By.CSS_SELECTOR, "#hand th")
    # 9, 9, 10.5, 100, missing: sorted as numbers, equal ones in their old order
    for place, key, names, order in (
        (1, Keys.ENTER, ["a", "e", "b", "d", HOSTILE], "ascending"),
        (1, Keys.ENTER, ["d", "b", "a", "e", HOSTILE], "descending"),
        (0, Keys.SPACE, [HOSTILE, "a", "b", "d", "e"], "ascending"),
    ):
        headings[place].find_element(By.TAG_NAME, "button").send_keys(key)
        assert texts(page, "#hand td:first-child") == names
        orders = [heading.get_attribute("aria-sort") for heading in headings]
        assert (orders[place], orders[1 - place]) == (order, None)


@pytest.mark.slow
@pytest.mark.parametrize(("media", "width"), [("screen", 1400), ("screen", 400), ("print", 720)])
def test_wide_and_narrow_screens_and_paper_show_whole_pictures(
    page: webdriver.Chrome, media: str, width: int
) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    try:
        for folded in page.find_elements(By.CSS_SELECTOR, "summary"):
            folded.click()
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        picture = page.find_element(By.CSS_SELECTOR, "#figure-hand img").rect
        assert 0 <= picture["x"] < picture["x"] + picture["width"] <= width
        assert picture["height"] > 50
        boxes = page.find_elements(By.TAG_NAME, "pre")
        assert {element.rect["width"] <= width for element in boxes} == {True}
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
