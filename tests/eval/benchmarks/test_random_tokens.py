"""The random suite: token ids of the model's vocabulary, whole answers, no score, CPU time."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from eval.analysis.run_table import run_table
from eval.benchmarks.random_tokens import tokenizer
from eval.run.prepare import Run
from eval.store.results import Results
from lazyllm.engine.devices import cpu_time, read_clock
from lazyllm.presets import fields_of
from lazyllm.spec import ModelSpec
from tests.runs import measured, prepared

SIZES = "layers=4,width=64,vocab=90"
MODEL = (f'model="{SIZES}"', "model.load_format=dummy", "model.dtype=float32")
ROWS = ("dataset=random", "random.length=[40,24]", "random.new_tokens=5", "random.repeats=2")


def run_of(*settings: str, threads: int = 1) -> Run:
    return prepared(*MODEL, *ROWS, f"threads={threads}", "warmup=0", *settings)


def test_prompts_are_numbers_of_the_vocabulary() -> None:
    prompts = run_of().prompts
    assert [len(prompt.token_ids) for prompt in prompts] == [40, 24, 40, 24]
    assert len({prompt.sha256 for prompt in prompts}) == 4
    for prompt in prompts:
        assert prompt.token_ids == tuple(map(int, prompt.example.context.split()))
        assert {*prompt.token_ids} <= {*range(90)}
        assert (prompt.end_ids, prompt.max_new_tokens) == ((), 5)
    assert run_of("random.seed=1").prompts[0] != prompts[0]
    # rows do not depend on other lengths
    assert run_of("random.length=[40]").prompts[0].token_ids == prompts[0].token_ids


def test_tokenizer_reads_and_writes_every_id() -> None:
    numbers = tokenizer(ModelSpec(SIZES, "dummy"))
    ids = [*range(90)]
    assert numbers.decode(ids) == " ".join(map(str, ids))
    assert numbers(numbers.decode(ids))["input_ids"] == ids
    assert tokenizer(ModelSpec("tiny", "dummy")).vocab_size == fields_of("tiny")["vocab_size"]


def test_a_run_has_whole_answers_without_a_score_and_shares_of_the_ideal(tmp_path: Path) -> None:
    run = run_of("arms=[{name: lazy, speedup: [1.5x, 2x]}]", f"out={tmp_path}")
    stored = measured(run.config)
    for visit in stored.visits:
        assert [*visit.answers] == ["baseline", "lazy speedup=1.5x", "lazy speedup=2x"]
        answers = visit.answers.values()
        assert {(len(answer.token_ids), answer.score) for answer in answers} == {(5, None)}
    table = run_table(Results([stored]), "speed")
    task_rows = table.cells[table.cells["**task**, dataset"] == "**random**"]
    cells: Any = task_rows.set_index("method").loc
    numbers: Any = table.frame[table.frame["kind"] == "task"].set_index("method").loc
    label = "lazy speedup=2x"
    assert float(cells[label, "ideal"]) == pytest.approx(2, abs=0.2)
    share = numbers[label, "ttft_speedup"] / numbers[label, "ideal_ttft_speedup"]
    assert float(cells[label, "share of ideal"]) == pytest.approx(share, abs=0.006)
    ratio = numbers[label, "step_s"] / numbers["baseline", "step_s"]
    assert float(cells[label, "step / baseline's"]) == pytest.approx(ratio, abs=0.006)
    assert float(cells["baseline", "revived"]) == 0 < float(cells[label, "revived"])
    assert "score" not in table.cells
    assert re.search("no score.*Times: CPU time of the process", table.caption, re.DOTALL)


def test_only_prompts_that_measure_time_by_one_thread_count_cpu_time() -> None:
    assert run_of().counts_cpu_time
    assert not run_of(threads=2).counts_cpu_time
    assert not prepared("model=tiny", "dataset=lookup", "threads=1").counts_cpu_time


def test_clock_is_the_processs_own_within_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: -7.0)
    with cpu_time():
        assert read_clock() == -7
    with cpu_time(False):
        assert read_clock() > 0
    assert read_clock() > 0
