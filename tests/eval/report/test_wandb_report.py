"""A W&B Report's specification is made offline from stored runs; wandb_workspaces takes it as it
is."""

import json
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.cli import main
from eval.report.wandb_report import made, report_id
from eval.store.results import read_results
from tests.eval.made import TABLE1, over, write_run

pytest.importorskip("wandb_workspaces", reason="the extra wandb-report is not installed")
PUBLISH = ["wandb-report", "runs", "--publish", "--entity", "me"]


def refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("no such project")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_ends: None) -> None:
    """No key, no access to other machines, and two runs in `runs`."""
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for method, names in (
        ("lazy", ("hotpotqa", "2wikimqa", "musique")),
        ("static_pruning", ("lcc",)),
    ):
        visits = over(names, score=0.25, ttft_s=0.1)
        write_run(
            Path("runs", method), visits, method, TABLE1[method], model="llama2", paper="llama2"
        )


def find_blocks(value: Any, kind: str) -> list[dict[str, Any]]:
    """Find all blocks of a kind within a specification."""
    found = [value] if isinstance(value, dict) and value["kind"] == kind else []
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return [*found, *(block for part in parts for block in find_blocks(part, kind))]


def written(*arguments: str) -> dict[str, Any]:
    assert main(["wandb-report", "runs", "--out", "report.json", *arguments]) == 0
    return json.loads(Path("report.json").read_text())


def test_report_has_the_papers_tables_the_figures_and_the_runs_panels() -> None:
    report = written("--title", "A title")
    assert (report["title"], report["project"]) == ("A title", "lazyllm-bench")
    text = "".join(block["text"] for block in find_blocks(report, "MarkdownBlock"))
    assert "| Multi-Document QA | LazyLLM | 6 | 25.00 (22.31) | 4.00 (2.34) |" in text
    assert "# Published claims, and ours" in text
    images = {key for block in find_blocks(report, "MediaBrowser") for key in block["media_keys"]}
    assert {"figures/figure5", "figures/figure7"} <= images
    bars = {metric for block in find_blocks(report, "BarPlot") for metric in block["metrics"]}
    columns = ("score", "ttft_speedup", "equal_length_speedup", "generation_speedup")
    columns += ("pct_prompt_tokens_computed", "kv_bytes", "aux_bytes")
    assert bars == {
        f"{task}/{column}" for task in ("multi_doc_qa", "code", "all") for column in columns
    }
    (results,) = read_results([Path("runs")])
    filters = {block["filters"] for block in find_blocks(report, "Runset")}
    assert filters == {
        f"Config('fingerprint') in {[run.about['fingerprint'] for run in results.runs]}",
        f"Config('report') = '{report_id(results)}'",
    }
    assert written("--title", "A title") == report


def test_every_device_is_named() -> None:
    elsewhere = {"machine": {"device": "another"}}
    write_run(Path("runs", "elsewhere"), over(("lcc",)), model="another", provenance=elsewhere)
    about = find_blocks(written(), "P")[0]["text"]
    assert "Runs: 3" in about
    assert "device: a device, another" in about


def test_runs_that_share_no_table_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs", "short"), over(("lcc",)), model="llama2", engine="2")
    assert main(["wandb-report", "runs", "--out", "report.json"]) == 2
    said = capsys.readouterr().err
    assert "differ in engine (1, 2)" in said
    assert "choose one with --where KEY=VALUE" in said
    assert not Path("report.json").exists()


def test_report_is_made_of_public_classes() -> None:
    report = made(written("--entity", "me", "--project", "mine"))
    assert (report.entity, report.project) == ("me", "mine")
    assert [type(block).__name__ for block in report.blocks[:4]] == [
        "P",
        "TableOfContents",
        "P",
        "MarkdownBlock",
    ]


@pytest.mark.slow
def test_publish_logs_the_images_saves_the_report_and_prints_its_address(
    monkeypatch, capsys
) -> None:
    from wandb_workspaces.reports.v2 import Report

    logged: dict[str, Any] = {}
    run = nullcontext(SimpleNamespace(log=logged.update))
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.init", lambda **place: logged.update(place) or run)
    monkeypatch.setattr(Report, "save", lambda self: logged.update(saved=self))
    monkeypatch.setattr(Report, "url", "https://example.org/report")
    assert main([*PUBLISH, "--project", "mine"]) == 0
    assert capsys.readouterr().out.strip() == "https://example.org/report"
    assert (logged["saved"].entity, logged["project"], logged["job_type"]) == (
        "me",
        "mine",
        "report",
    )
    assert type(logged["figures/figure5"]).__name__ == "Image"
    monkeypatch.setattr(Report, "save", refuse)
    assert main(PUBLISH) == 2
    assert "W&B refused the report (ValueError: no such project)" in capsys.readouterr().err


def test_publish_names_the_extra_that_is_missing(monkeypatch, capsys) -> None:
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert main(PUBLISH) == 2
    assert "pip install 'lazyllm-bench[wandb-report]'" in capsys.readouterr().err
