"""The page as a reader uses it: opened in headless Chromium from the disk."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from eval.report.content import content_of
from eval.report.page import render
from eval.store.results import read_results
from scripts.dev import records
from tests.eval.report.test_report import FIGURES, HOSTILE, TABLES, make_runs

pytestmark = pytest.mark.slow


def program(*names: str) -> str:
    """Find the first program that is installed. If there is none, skip; on a CI machine, fail."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"none of {', '.join(names)} is here: install chromium and its driver (see .ci/run)")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium-browser", "google-chrome")
    # as root, as in a container, its sandbox does not start; /dev/shm is small there
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1400,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # both paths are given, so that selenium looks for nothing to download
    driver = webdriver.Chrome(options=options, service=Service(program("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    results = make_runs(folder / "runs")
    (folder / "page.html").write_text(
        render(results, content_of(results, TABLES, FIGURES)), encoding="utf-8"
    )
    return folder / "page.html"


@pytest.fixture
def page(browser: webdriver.Chrome, file: Path) -> Iterator[webdriver.Chrome]:
    """The page, newly opened. After every test, the browser must have logged no error and run no
    injected script."""
    browser.get(file.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return window.hacked") is None


def one(page: webdriver.Chrome, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def texts(page: webdriver.Chrome, selector: str) -> list[str]:
    """What a reader sees: nothing of what is folded away."""
    return [element.text for element in page.find_elements(By.CSS_SELECTOR, selector)]


def read_everything(page: webdriver.Chrome) -> None:
    """Tables, pictures and answers are there, and what is hostile is text."""
    assert texts(page, "#hand h3") == [f"By hand {HOSTILE}"]
    assert texts(page, "#hand td:first-child") == ["b", "a", HOSTILE, "d", "e"]
    assert texts(page, "#hand > .caption") == [f"Caption {HOSTILE}"]
    one(page, "#hand summary").click()
    assert texts(page, "#hand details .caption") == [f"Notes {HOSTILE}"]
    assert [text.partition(":")[0] for text in texts(page, "#missing li")] == [
        "Nothing",
        "Not drawn",
    ]
    assert page.find_elements(By.CSS_SELECTOR, "#bare, #figure-bare") == []
    assert one(page, "#figure-hand img").accessible_name == f"Drawn {HOSTILE}"
    without_baseline = (
        "Measured without a baseline: no speedup, and no answer to compare with (static)."
    )
    assert texts(page, ".warnings li") == [without_baseline]
    assert texts(page, "#runs td:nth-child(2)") == ["baseline, lazy", "lazy"]
    assert texts(page, ".dataset > summary") == ["hotpotqa (3)", "trec (42)", "hotpotqa (2)"]
    assert set(texts(page, "article h4")) == {""}  # folded away
    one(page, ".dataset > summary").click()
    first, hostile, same = texts(page, ".dataset[open] article")
    assert first.splitlines() == [
        "row-0, 1,000 prompt tokens, cut from 1,200", "End of the prompt", "...", "why?", "Gold",
        "it is", "so",
        "baseline", "score 100.0, TTFT 400.0 ms, 7.5 % of the prompt computed, 2 tokens",
        "so it was then",
        "lazy", "score 50.0 (-50.0), TTFT 160.0 ms (2.50x), 7.5 % of the prompt computed, 2 tokens",
        "so it is",
    ]  # fmt: skip
    assert [line for line in hostile.splitlines() if line == HOSTILE] == [
        HOSTILE
    ] * 3  # prompt, gold and answer
    assert same.splitlines()[-1] == "(the baseline's answer)"


def test_page_shows_everything(page: webdriver.Chrome) -> None:
    read_everything(page)


def test_page_shows_everything_without_scripts(browser: webdriver.Chrome, file: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(file.as_uri())
        read_everything(browser)
        one(browser, "#hand th:nth-child(2) button").click()
        assert texts(browser, "#hand td:first-child")[0] == "b"  # nothing has sorted it
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_heading_sorts_by_number_with_empty_cells_last(page: webdriver.Chrome) -> None:
    name, score = page.find_elements(By.CSS_SELECTOR, "#hand th")
    score.find_element(By.TAG_NAME, "button").click()
    # 9, 9, 10.5, 100, missing: sorted as numbers, equal ones in their old order
    assert texts(page, "#hand td:first-child") == ["a", "e", "b", "d", HOSTILE]
    assert (score.get_attribute("aria-sort"), name.get_attribute("aria-sort")) == (
        "ascending",
        None,
    )
    score.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert texts(page, "#hand td:first-child") == ["d", "b", "a", "e", HOSTILE]
    assert score.get_attribute("aria-sort") == "descending"
    name.find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert texts(page, "#hand td:first-child") == [HOSTILE, "a", "b", "d", "e"]
    assert (score.get_attribute("aria-sort"), name.get_attribute("aria-sort")) == (
        None,
        "ascending",
    )


def test_answers_without_texts_are_not_shown_as_equal(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    records.write(tmp_path / "records", make_runs(tmp_path / "runs").runs)
    (results,) = read_results([tmp_path / "records"])
    (tmp_path / "page.html").write_text(
        render(results, content_of(results, {}, {})), encoding="utf-8"
    )
    browser.get((tmp_path / "page.html").as_uri())
    one(browser, ".dataset > summary").click()
    assert set(texts(browser, ".dataset[open] pre")) == {"(not stored)"}


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
        picture = one(page, "#figure-hand img").rect
        assert 0 <= picture["x"] < picture["x"] + picture["width"] <= width
        assert picture["height"] > 50
        assert {
            element.rect["width"] <= width for element in page.find_elements(By.TAG_NAME, "pre")
        } == {True}
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
