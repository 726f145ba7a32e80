"""The report as a reader uses it: opened in headless Chromium from the disk."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from eval.report.content import content_of
from eval.report.page import render
from eval.store.results import Results
from scripts.dev import records
from tests.eval.report.test_report import FIGURES, HOSTILE, TABLES, make_runs

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def _found(names: tuple[str, ...]) -> str:
    """The path of the first program that is installed. If there is none, skip; on a CI machine, fail."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is not None:
        return path
    missing = f"none of {', '.join(names)} is here: install chromium and chromium-driver (see .ci/run)"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = _found(BROWSERS)
    # as root, as in a container, its sandbox does not start; /dev/shm is small there
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # both paths are given, so that selenium looks for nothing to download
    driver = webdriver.Chrome(options=options, service=Service(_found(("chromedriver",))))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    results = Results(make_runs(folder / "runs"))
    page = render(results, content_of(results, TABLES, FIGURES))
    (folder / "page.html").write_text(page, encoding="utf-8")
    return folder / "page.html"


@pytest.fixture
def page(browser: webdriver.Chrome, file: Path) -> Iterator[webdriver.Chrome]:
    """The page, newly opened. After every test, the browser must have logged no error and run no injected script."""
    browser.get(file.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return window.hacked") is None


def texts(page: webdriver.Chrome, selector: str) -> list[str]:
    """In a single call to the browser, so that elements cannot be replaced in between."""
    script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.innerText.trim())"
    return [re.sub(r"\n+", "\n", text) for text in page.execute_script(script, selector)]


def one(page: webdriver.Chrome, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def choose(page: webdriver.Chrome, name: str, text: str) -> None:
    Select(one(page, f"#{name}")).select_by_visible_text(text)


def shown_ids(page: webdriver.Chrome) -> list[str]:
    return texts(page, ".record .id")


def test_overview_tables_and_figures_show_what_was_measured(page: webdriver.Chrome) -> None:
    facts = dict(zip(texts(page, ".summary dt"), texts(page, ".summary dd"), strict=True))
    assert facts == {
        "Models": "mini", "Methods": "baseline, lazy, static_pruning", "Runs": "2, with 3 arms",
        "Datasets": "hotpotqa, trec", "Examples": "45, in 47 visits", "Measured": "2026-01-02 03:04:05 UTC",
        "On": "one core", "Attention kernel": "unknown",
    }  # fmt: skip
    warnings = texts(page, ".warnings li")
    assert len(warnings) == 2
    assert "without a baseline" in warnings[0]
    assert "43 of the 45" in warnings[1]
    provenance = dict(zip(texts(page, ".provenance dt"), texts(page, ".provenance dd"), strict=True))
    assert (provenance["git_commit"], provenance["versions.torch"]) == ("c0ffee", "9")
    assert texts(page, "#runs tbody td:nth-child(2)") == ["baseline, lazy", "lazy"]

    assert [text.partition(":")[0] for text in texts(page, "#missing li")] == ["Nothing", "Not drawn"]
    assert page.find_elements(By.CSS_SELECTOR, "#table-bare, #figure-bare") == []
    drawing = one(page, "#figure-hand svg")
    assert drawing.size["height"] > 100
    assert drawing.accessible_name == f"Drawn {HOSTILE}"
    assert texts(page, "#table-hand h3") == [f"By hand {HOSTILE}"]
    assert page.find_elements(By.CSS_SELECTOR, "img, script[src]") == []

    sort_by_headings(page)
    filter_results(page)


def sort_by_headings(page: webdriver.Chrome) -> None:
    """A heading sorts by number, with empty cells last."""

    def names() -> list[str]:
        return texts(page, "#table-hand td:first-child")

    name, score = page.find_elements(By.CSS_SELECTOR, "#table-hand th")
    assert names() == ["b", "a", HOSTILE, "d", "e"]
    score.find_element(By.TAG_NAME, "button").click()
    # 9, 9, 10.5, 100, missing: sorted as numbers, equal ones in their old order
    assert names() == ["a", "e", "b", "d", HOSTILE]
    assert (score.get_attribute("aria-sort"), name.get_attribute("aria-sort")) == ("ascending", None)
    score.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert names() == ["d", "b", "a", "e", HOSTILE]
    assert score.get_attribute("aria-sort") == "descending"
    name.find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert names() == [HOSTILE, "a", "b", "d", "e"]
    assert (score.get_attribute("aria-sort"), name.get_attribute("aria-sort")) == (None, "ascending")


def filter_results(page: webdriver.Chrome) -> None:
    def rows() -> list[str]:
        found = page.find_elements(By.CSS_SELECTOR, "#results tbody tr")
        shown = [row.find_element(By.TAG_NAME, "td") for row in found if row.is_displayed()]
        return [cell.get_attribute("textContent") or "" for cell in shown]

    assert set(rows()) == {"mean over tasks"}
    choice = Select(one(page, "#results select"))
    choice.select_by_visible_text("trec")
    assert rows() == ["trec", "trec"]  # the lazy run and its paired baseline
    choice.select_by_visible_text("all rows")
    assert {"mean over tasks", "trec", "hotpotqa"} == set(rows())


def test_answers_of_all_arms_are_shown_filtered_ordered_and_searched(page: webdriver.Chrome) -> None:
    first = one(page, ".record")
    assert first.find_element(By.CSS_SELECTOR, ".head").text.split("\n") == [
        "hotpotqa", "row-0", "1,000 prompt tokens, cut from 1,200",
    ]  # fmt: skip
    names, numbers = (texts(page, f".record:first-child .method .numbers {part}") for part in ("dt", "dd"))
    assert dict(zip(names, numbers, strict=True)) == {  # 0.4 s over 0.16 s
        "score": "25.0 ▼", "TTFT": "160.0 ms, 2.50×", "% computed": "75.0", "tokens": "2",
    }  # fmt: skip
    assert [column.split("\n")[0] for column in texts(page, ".record:first-child .columns > section")] == [
        "Prompt end", "Gold", "baseline", "lazy, schedule={2: 0.5}",
    ]  # fmt: skip
    found = {part: texts(page, f".record:first-child .{part} pre") for part in ("prompt", "gold", "baseline", "method")}
    assert found == {
        "prompt": ["Question: why?"], "gold": ["it is", "so"], "baseline": ["so it was then"], "method": ["so it is"],
    }  # fmt: skip
    assert texts(page, ".record:first-child mark") == ["is"]  # what the baseline's answer lacks

    def count() -> str:
        return one(page, "#record-count").text

    assert count() == "47 of 47 examples, page 1 of 3"
    assert len(shown_ids(page)) == 20
    one(page, "#record-on").click()
    one(page, "#record-on").click()
    assert count() == "47 of 47 examples, page 3 of 3"
    assert shown_ids(page) == [*(f"row-{number}" for number in range(40, 45)), "row-0", "row-1"]
    assert not one(page, "#record-on").is_enabled()

    choose(page, "record-dataset", "hotpotqa")
    assert count() == "5 of 47 examples, page 1 of 1"
    assert shown_ids(page) == ["row-0", "row-1", "row-2", "row-0", "row-1"]
    choose(page, "record-method", "lazy, schedule={2: 0.5}")
    assert shown_ids(page) == ["row-0", "row-1", "row-2"]
    choose(page, "record-order", "lowest TTFT speedup first")
    assert shown_ids(page) == ["row-2", "row-0", "row-1"]  # 0.4 s over 2, 0.16 and 0.05
    one(page, "#record-differs").click()
    assert shown_ids(page) == ["row-0", "row-1"]
    one(page, "#record-differs").click()
    one(page, "#record-search").send_keys("AN ODD")
    WebDriverWait(page, 10).until(lambda _: shown_ids(page) == ["row-2"])
    assert not one(page, "#record-model").is_displayed()  # there is but one
    assert "the baseline's answer" in one(page, ".record .method").text

    one(page, "#record-search").clear()
    one(page, "#record-search").send_keys(" ")
    choose(page, "record-method", "all")
    choose(page, "record-order", "largest loss against the baseline first")
    expected = ["row-0", "row-2", "row-1", "row-0", "row-1"]  # -25, 0, +50, then missing
    WebDriverWait(page, 10).until(lambda _: shown_ids(page) == expected)
    one(page, "#record-search").send_keys("window.hacked")
    WebDriverWait(page, 10).until(lambda _: shown_ids(page) == ["row-1"])
    assert texts(page, ".record .columns pre") == [HOSTILE, HOSTILE, f"{HOSTILE} too", HOSTILE]


def test_answers_without_texts_are_not_shown_as_equal(browser: webdriver.Chrome, tmp_path: Path) -> None:
    records.write(tmp_path / "records", make_runs(tmp_path / "runs"))
    results = Results.read([tmp_path / "records"])
    (tmp_path / "page.html").write_text(render(results, content_of(results, {}, {})), encoding="utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    assert set(texts(browser, ".record:first-child .columns .empty")) == {"not stored"}
    assert texts(browser, ".record .method pre") == []
    one(browser, "#record-search").send_keys("row-44")
    WebDriverWait(browser, 10).until(lambda _: shown_ids(browser) == ["row-44"])
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize(("media", "width"), [("screen", 380), ("screen", 420), ("print", 720)])
def test_narrow_screen_and_paper_show_whole_figures_and_tables(page: webdriver.Chrome, media: str, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        figure = one(page, "#figure-hand svg").rect
        assert 0 <= figure["x"] < figure["x"] + figure["width"] <= width
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
