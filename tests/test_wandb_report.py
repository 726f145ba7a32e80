"""A W&B Report's spec is built offline, from stored runs or for a whole project."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks.datasets import TASKS
from eval.store.folder import read_run
from scripts import wandb_report
from tests.eval.store.made import measurement, record, write_run

pytest.importorskip("wandb_workspaces", reason="the extra wandb-report is not installed")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No key, and no access to other machines."""
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.chdir(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("wandb_workspaces.reports.v2.interface._get_api", refuse)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def store(folder: Path, method: dict[str, Any], score: float, ttft_s: float, dataset: str = "hotpotqa") -> str:
    """A stored run of one example; its fingerprint."""
    example = record(1, dataset, score=score, ttft_s=ttft_s)
    example = replace(example, baseline=measurement(score=1.0, ttft_s=0.6))
    write_run(folder, [example], method, seed=method.get("seed", 0), device="a device", data={dataset: "d"})
    return read_run(folder)[0]["fingerprint"]


def blocks_of(file: Path, kind: str) -> list[dict[str, Any]]:
    return [block for block in json.loads(file.read_text())["spec"]["blocks"] if block["type"] == kind]


def panels_of(file: Path) -> list[dict[str, Any]]:
    grids = blocks_of(file, "panel-grid")
    return [panel for grid in grids for panel in grid["metadata"]["panelBankSectionConfig"]["panels"]]


def test_report_of_stored_runs_holds_their_table_and_panels(tmp_path: Path, capsys) -> None:
    lazy = store(tmp_path / "runs" / "a", {"name": "lazy", "schedule": {"2": 0.3}}, 1.0, 0.2)
    more = store(tmp_path / "runs" / "b", {"name": "lazy", "schedule": {"2": 0.3}}, 0.5, 0.3, dataset="lcc")
    seeds = [
        store(tmp_path / f"runs/{seed}", {"name": "random_drop", "keep": 0.5, "seed": seed}, score, 0.1)
        for seed, score in ((0, 0.5), (1, 0.25))
    ]
    out = tmp_path / "spec.json"
    wandb_report.main([str(tmp_path / "runs"), "--out", str(out), "--title", "A title"])
    assert capsys.readouterr().out.strip() == str(out)
    assert json.loads(out.read_text())["displayName"] == "A title"

    # one line a setting and task; the runs of one setting on several datasets are one method: scores 100 and 50,
    # speedups 0.6 / 0.2 and 0.6 / 0.3; seeds are told apart
    (table,) = [block["content"] for block in blocks_of(out, "markdown-block")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    rows = {(row[0], row[1]): [row[cells[0].index(name)] for name in ("n", "score", "TTFT speedup")] for row in cells}
    assert rows["multi_doc_qa", "lazy, schedule={2: 0.3}"] == ["1", "100.00", "3.00"]
    assert rows["code", "lazy, schedule={2: 0.3}"] == ["1", "50.00", "2.00"]
    assert rows["mean over tasks", "lazy, schedule={2: 0.3}"] == ["2", "75.00", "2.50"]
    assert rows["multi_doc_qa", "random_drop, keep=0.5, seed 0"] == ["1", "50.00", "6.00"]
    assert rows["multi_doc_qa", "random_drop, keep=0.5, seed 1"] == ["1", "25.00", "6.00"]
    assert ("code", "random_drop, keep=0.5, seed 0") not in rows

    for grid in blocks_of(out, "panel-grid"):
        entries = grid["metadata"]["runSets"][0]["filters"]["filters"]
        shown = {entry["key"]["name"]: entry["value"] for entry in entries}
        assert {*shown["fingerprint"]} == {lazy, more, *seeds}
    panels = panels_of(out)
    bars = {metric for panel in panels if panel["viewType"] == "Bar Chart" for metric in panel["config"]["metrics"]}
    columns = ("score", "ttft_speedup", "generation_speedup", "pct_prompt_tokens_computed", "kv_bytes", "aux_bytes")
    assert bars == {f"{task}/{column}" for task in ("multi_doc_qa", "code", "all") for column in columns}
    assert "per_example" in json.dumps(panels)
    text = json.dumps(blocks_of(out, "paragraph"))
    assert "4 runs of tiny on 2 examples; device: a device; commit: abc" in text


def test_report_of_a_project_has_every_task(tmp_path: Path) -> None:
    wandb_report.main(["--out", "spec.json", "--group", "table1", "--project", "mine"])
    spec = json.loads(Path("spec.json").read_text())
    assert spec["project"] == {"name": "mine", "entityName": ""}
    assert blocks_of(Path("spec.json"), "markdown-block") == []
    assert all('"table1"' in json.dumps(grid["metadata"]) for grid in blocks_of(Path("spec.json"), "panel-grid"))
    text = json.dumps(panels_of(Path("spec.json")))
    assert all(f'"{task}/score"' in text for task in (*TASKS, "all"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--publish"], "--publish needs --entity NAME"),
        (["--publish", "--entity", "me"], "--publish needs a key"),
        (["nosuch", "--out", "x.json"], "no such folder"),
        ([], "give --out FILE for the spec, or --publish"),
    ],
)
def test_report_refuses_with_what_to_do(arguments: list[str], message: str, capsys: Any) -> None:
    assert wandb_report.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not Path("x.json").exists()


def test_report_names_the_extra_that_is_missing(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert wandb_report.main(["--out", "x.json"]) == 2
    assert "pip install 'lazyllm-bench[wandb-report]'" in capsys.readouterr().err


def test_publish_saves_the_report_and_prints_its_address(monkeypatch, capsys) -> None:
    from wandb_workspaces.reports.v2.interface import Report

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr(
        "wandb_workspaces.reports.v2.interface.execute_graphql", lambda *_: {"project": {"internalId": "1"}}
    )
    monkeypatch.setattr("wandb_workspaces.reports.v2.interface._get_api", lambda: None)
    saved: list[Report] = []
    monkeypatch.setattr(Report, "save", lambda self: saved.append(self))
    monkeypatch.setattr(Report, "url", "https://example.org/report")
    wandb_report.main(["--publish", "--entity", "me", "--project", "mine"])
    assert capsys.readouterr().out.strip() == "https://example.org/report"
    assert (saved[0].entity, saved[0].project) == ("me", "mine")

    def refuse(_: Report) -> None:
        raise ValueError("no such project")

    monkeypatch.setattr(Report, "save", refuse)
    assert wandb_report.main(["--publish", "--entity", "me"]) == 2
    assert "W&B refused the report (ValueError: no such project)" in capsys.readouterr().err
