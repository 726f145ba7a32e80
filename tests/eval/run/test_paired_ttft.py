"""`timing.paired=ttft`: the tables of full pairs from one run of the baseline, in whichever order the runs end."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from eval.run.config import TimingConfig
from eval.run.loop import compare, run
from eval.run.prepare import prepare
from eval.store.collect import collect
from eval.store.folder import open_store
from eval.store.results import Results, as_frame, find_runs
from eval.store.runs import stored_runs
from lazyllm.errors import UserError
from tests.runs import run_of, small_run

TTFT = TimingConfig(paired="ttft", warmup=0)
ANSWERS = {"leading_tokens", "edit_similarity", "same_answer"}  # only full pairs compare whole answers
BASELINE = {"name": "baseline"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same examples in full pairs (`full`), and as `once`: the method before the baseline, in names and in time."""
    folder = tmp_path_factory.mktemp("runs")
    run(small_run(folder / "full" / "a"), show=False)
    run(small_run(folder / "once" / "a", timing=TTFT), show=False)
    run(small_run(folder / "once" / "b", timing=TTFT, method=BASELINE), show=False)
    return folder


def untimed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of methods, and the columns that no clock, no reading of memory and no folder is in."""
    left_out = ("_s", "_so_far", "_speedup", "_mfu", "peak_memory_bytes", "run", "folder", "paired", *ANSWERS)
    names = [name.removesuffix("_low").removesuffix("_high") for name in frame]
    shown = [name == "ideal_ttft_speedup" or not name.endswith(left_out) for name in names]
    return frame.loc[frame["method"] == "lazy", shown].reset_index(drop=True)


def test_scores_and_counts_are_those_of_full_pairs(runs: Path) -> None:
    full, once = (Results.read([runs / name]) for name in ("full", "once"))
    for left, right in ((full.frame, once.frame), (full.by_task, once.by_task)):
        pd.testing.assert_frame_equal(untimed(left), untimed(right), check_dtype=False)  # some integers became floats
    assert {*untimed(once.by_task)} >= {"score", "baseline_score", "relative_score", "kl", "ideal_ttft_speedup"}
    assert once.by_task["ttft_speedup"].notna().all()
    theirs = [[record.baseline and record.baseline.text for record in one.runs[0].records] for one in (full, once)]
    assert theirs[0] == theirs[1]
    assert None not in theirs[0]


def test_first_token_is_timed_beside_the_method_and_the_rest_in_the_baselines_run(runs: Path) -> None:
    method, whole = ({record.key: record for record in run.records} for run in stored_runs([runs / "once"]))
    rows = as_frame(find_runs([runs / "once"])).query("method == 'lazy'").to_dict("records")
    assert len(rows) == 6
    for row in rows:
        key = row["dataset"], row["id"]
        first, its_own = method[key].baseline_ttft_s, whole[key].method
        assert (method[key].baseline, row["baseline_ttft_s"]) == (None, first)
        assert row["baseline_total_s"] == pytest.approx(first + its_own.total_s - its_own.ttft_s, rel=1e-12)
        assert row["baseline_step_s"] == pytest.approx(sum(its_own.decode_step_s) / len(its_own.decode_step_s))


def test_campaign_reads_the_same(runs: Path, tmp_path: Path) -> None:
    collect([runs / "once"], tmp_path / "all")
    raw, collected = (as_frame(find_runs([folder])).drop(columns="folder") for folder in (runs / "once", tmp_path))
    pd.testing.assert_frame_equal(raw, collected)


def test_missing_baseline_is_named_with_its_command(runs: Path, tmp_path: Path, caplog) -> None:
    frame = as_frame(find_runs([runs / "once" / "a"]))
    assert frame["baseline_ttft_s"].notna().all()
    assert frame["baseline_score"].isna().all()
    baseline = stored_runs([runs / "once"])[1]
    with open_store(tmp_path / "part", baseline.identity, {"config": baseline.about["config"]}) as store:
        for number, record in enumerate(baseline.records):
            store.append(record if number else replace(record, prompt_sha256="another"))
    (sentence,) = {record.message for record in caplog.records}
    caplog.clear()
    frame = as_frame(find_runs([runs / "once" / "a", tmp_path / "part"])).query("method == 'lazy'")
    assert frame["baseline_score"].isna().tolist() == [True] + [False] * 5  # another prompt is no match
    assert caplog.messages == [sentence]
    command = sentence.rpartition(": ")[2]
    assert f"not finished: {command}" in (runs / "once" / "a" / "summary.md").read_text()
    named = prepare(run_of(*shlex.split(command)[2:]))
    assert (named.identity, [case.key for case in named.cases]) == (baseline.identity, baseline.keys)


@pytest.mark.slow
def test_comparison_joins_its_baseline_and_a_later_run_finds_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eval.analysis.style.save", lambda *_: [])
    lazy = small_run(None).method
    both = small_run(None, timing=TTFT, compare={"lazy": lazy, "baseline": BASELINE}, label="both", limit=1)
    compare(both)
    text = (tmp_path / "runs" / "both-tiny.md").read_text()
    assert text.count("| baseline |") == text.count("| lazy |") == 3  # two tasks and their mean
    assert "not finished" not in text
    (other,) = small_run(None, timing=TTFT, limit=1, method={"name": "random_drop", "keep": 0.5}).runs.values()
    found = run(other, show=False).results
    assert found is not None
    assert found.frame["baseline_score"].notna().all()
    assert prepare(other).baseline_fingerprint in {one.about["fingerprint"] for one in stored_runs([tmp_path])}


def test_later_turns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"timing\.paired=ttft: lookup has later turns.* give timing\.paired=true"):
        prepare(small_run(tmp_path / "run", timing=TTFT, turns=2, limit=1))
