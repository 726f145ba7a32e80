"""The random suite: token ids of the model's vocabulary, whole answers without a score, and a table of times."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from eval.run.case import Case
from eval.run.run import prepare

from eval.analysis.run_table import run_table
from eval.benchmarks.random_tokens import tokenizer
from eval.store.results import Results
from lazyllm.engine.devices import cpu_time, read_clock
from lazyllm.presets import fields_of
from lazyllm.spec import ModelSpec
from tests.runs import measure, run_of

SIZES = "layers=4,width=64,vocab=90"
MODEL = ("model=custom", f'model.name="{SIZES}"', "model.load_format=dummy", "model.dtype=float32", "model.chat=null")
ROWS = ("random.length=[40,24]", "random.new_tokens=5", "random.repeats=2", "threads=1", "warmup=0")


def cases_of(*settings: str) -> tuple[Case, ...]:
    return prepare(run_of(*MODEL, "dataset=random", *ROWS, *settings)).cases


def test_prompts_are_numbers_of_the_vocabulary() -> None:
    cases = cases_of()
    assert [len(case.prompt.token_ids) for case in cases] == [40, 24, 40, 24]
    assert len({case.prompt.sha256 for case in cases}) == 4
    for case in cases:
        assert case.prompt.token_ids == tuple(map(int, case.example.context.split()))
        assert set(case.prompt.token_ids) <= set(range(90))
        assert (case.end_ids, case.max_new_tokens) == ((), 5)
    assert cases_of("random.seed=1")[0].prompt != cases[0].prompt
    assert cases_of("random.length=[40]")[0].prompt == cases[0].prompt  # rows do not depend on other lengths


def test_tokenizer_reads_and_writes_every_id() -> None:
    numbers = tokenizer(ModelSpec(SIZES, "dummy"))
    ids = [*range(90)]
    assert numbers.decode(ids) == " ".join(map(str, ids))
    assert numbers(numbers.decode(ids))["input_ids"] == ids
    assert tokenizer(ModelSpec("tiny", "dummy")).vocab_size == fields_of("tiny")["vocab_size"]


def test_speed_is_a_run_whose_table_has_shares_of_the_ideal(tmp_path: Path) -> None:
    arms = "compare={lazy: {name: lazy, schedule: [1.5x, 2x]}}"
    run = run_of(*MODEL, "dataset=random", *ROWS, arms, f"out={tmp_path / 'run'}")
    stored = measure(run, show=False)
    assert stored.identity["clock"] == "CPU time of the process"
    for visit in stored.visits:
        assert [*visit.answers] == ["baseline", "lazy schedule=1.5x", "lazy schedule=2x"]
        answers = visit.answers.values()
        assert {(len(answer.token_ids), answer.score) for answer in answers} == {(5, None)}
    table = run_table(Results([stored]), "speed")
    shown: Any = table.cells[table.cells["**task**, dataset"] == "**random**"].set_index("method")
    numbers: Any = table.frame[table.frame["kind"] == "task"].set_index("method")
    of_lazy = numbers.loc["lazy schedule=2x"]
    assert float(shown.loc["lazy schedule=2x", "ideal"]) == pytest.approx(2, abs=0.2)
    share = of_lazy["ttft_speedup"] / of_lazy["ideal_ttft_speedup"]
    assert float(shown.loc["lazy schedule=2x", "share of ideal"]) == pytest.approx(share, abs=0.006)
    ratio = of_lazy["step_s"] / numbers.loc["baseline", "step_s"]
    assert float(shown.loc["lazy schedule=2x", "step / baseline's"]) == pytest.approx(ratio, abs=0.006)
    assert float(shown.loc["baseline", "revived"]) == 0 < float(shown.loc["lazy schedule=2x", "revived"])
    assert "score" not in table.cells
    assert re.search("no score.*Times: CPU time of the process", table.caption, re.DOTALL)


def test_only_prompts_that_measure_time_count_cpu_time() -> None:
    assert not run_of("dataset=lookup", "threads=1").subject.counts_cpu_time
    assert not run_of(*MODEL, "dataset=random", *ROWS, "threads=2").subject.counts_cpu_time
    assert run_of(*MODEL, "dataset=random", *ROWS).subject.counts_cpu_time


def test_clock_is_the_processs_own_within_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: -7.0)
    with cpu_time():
        assert read_clock() == -7
    with cpu_time(False):
        assert read_clock() > 0
    assert read_clock() > 0
