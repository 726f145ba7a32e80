"""A plan against the measurements of its runs, and arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lazyllm
from eval.run.loop import measure
from eval.run.plan import RATE, as_text, costs, costs_of, rows_of, seconds_on
from eval.run.work import Model, Work
from eval.store.runs import stored_runs
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import UserError
from lazyllm.machine import ACCELERATORS
from lazyllm.methods import Baseline, FastKV, Method, StaticPruning
from lazyllm.models.load import load_weights
from lazyllm.spec import ModelSpec
from tests.lazyllm.methods.method_matrix import ROWS
from tests.runs import run_of

TINY = ModelSpec("tiny", dtype="float32", device="cpu")
LLAMA2 = ModelSpec("llama2", "dummy")
PRUNING = ["model=tiny", "method=static_pruning", "method.layer=2", "method.keep=0.3", "warmup=0"]
PRUNING += ["batch_size=1"]  # as on a CPU


def added(works: list[Work]) -> Work:
    return sum(works[1:], works[0])


@pytest.mark.parametrize("more", [["dataset=complete", "limit=2"], ["dataset=lookup", "limit=2", "turns=3"]], ids=str)
def test_plan_counts_what_the_run_measures(more: list[str], tmp_path: Path) -> None:
    arguments = [*PRUNING, *more]
    measure(run_of(*arguments, f"out={tmp_path / 'run'}"), show=False)
    (stored,) = stored_runs([tmp_path])
    examples, (baseline, planned) = (
        stored.rows[stored.rows["arm"] == "static_pruning"],
        costs(arguments, ACCELERATORS["l4"]),
    )
    conversations = examples.groupby("id")["prompt_tokens"].sum()
    assert planned.examples == len(conversations)
    assert planned.prompt_tokens == conversations.sum()
    assert planned.longest == conversations.max()
    assert planned.answer_tokens >= examples["generated_tokens"].sum()  # the maximum
    model, first = Model.of(TINY), examples[examples["turn"] == 1]
    prefills = [model.prefill(StaticPruning(2, 0.3), n).flops for n in first["prompt_tokens"]]
    assert prefills == first["prefill_flops"].tolist()
    assert baseline.memory["K and V"] == pytest.approx(
        stored.rows.query("arm == 'baseline'")["kv_bytes"].max(), rel=0.1
    )


def test_llama_2_by_hand() -> None:
    model, n = Model.of(LLAMA2), 3000
    assert model.weights == 2 * 6_738_415_616
    layer, logits, token = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008), 2 * 4096 * 32000, 2 * 32 * 2 * 4096  # 0.5 MB
    prefill = 32 * (n * layer + n * (n + 1) // 2 * 4 * 4096) + logits
    # two steps, over the prompt and the tokens so far
    steps = 32 * (2 * layer + (n + 1 + n + 2) * 4 * 4096) + 2 * logits
    read = 2 * model.weights + (n + 1 + n + 2) * token
    assert model.conversation(Baseline(), [n], 3) == [Work(prefill, model.weights), Work(steps, read)]
    assert Model.of(replace(LLAMA2, load_format="auto", quantise="int8")).weights == pytest.approx(
        model.weights / 2, rel=0.05
    )
    eager = Model.of(replace(LLAMA2, attn_implementation="eager")).memory(Baseline(), n, 1)
    assert eager["working"] == 2 * 32 * n * n * 2 > model.memory(Baseline(), n, 1)["working"]
    assert seconds_on(ACCELERATORS["l4"], Work(steps, read)) == pytest.approx(read / 0.3e12 / RATE)
    assert seconds_on(ACCELERATORS["l4"], Work(prefill, model.weights)) == pytest.approx(prefill / 121e12 / RATE)


@pytest.fixture(scope="module")
def tiny():
    return load_weights(TINY)


@pytest.mark.parametrize("name", ROWS)
def test_memory_is_what_a_generation_holds(name: str, tiny) -> None:
    method, n = ROWS[name].pruning, 300
    prompt = torch.randint(3, 900, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    out = lazyllm.generate(tiny, prompt, method, 1, ())
    model = Model.of(TINY)
    planned = model.memory(method, n, 1)
    assert model.weights == sum(weight.nbytes for weight in tiny.parameters())
    declared = sum(method.stored_per_layer(8, n)) * model.kv_bytes
    assert out.kv_bytes == declared or (method.adaptive and out.kv_bytes < declared)
    assert planned["Aux Cache"] == pytest.approx(out.aux_bytes, rel=0.1)
    assert planned["K and V"] >= out.kv_bytes  # a prefill holds tokens that static pruning later discards


@pytest.mark.parametrize("method", [Baseline(), StaticPruning(2, 0.3), FastKV(3, 0.4, 0.2)], ids=str)
def test_work_of_a_later_turn_is_that_of_the_tokens_it_runs(method: Method, tiny) -> None:
    model, layers, shape = Model.of(TINY), 8, LayerShape.of(tiny.config)
    with lazyllm.start(tiny, list(range(5, 305)), method) as session:
        session.answer(None, 5, ())
        held = session.kv_bytes // model.kv_bytes
        session.answer(list(range(400, 440)), 1, ())
        now = session.kv_bytes // model.kv_bytes
    first, turn = model.conversation(method, [300], 5), model.conversation(method, [300, 40], 5)
    assert turn[:2] == first
    assert model.conversation(method, [300, 40], 5, "again")[2:] == model.conversation(method, [345], 5)
    assert now == held + 41 * layers
    # each of the 40 tokens, and the answer's last one, attends to all stored ones, and to those before it
    pairs = 41 * held + layers * 41 * 42 // 2
    logits = 2 * shape.width * tiny.config.vocab_size
    assert turn[2] == Work(
        layers * 41 * shape.linear_flops + pairs * shape.pair_flops + logits, model.weights + now * model.kv_bytes
    )


def test_plan_counts_each_arm_once_and_the_warm_ups() -> None:
    run = run_of(*PRUNING, "dataset=lookup", "limit=1")
    rows = rows_of(run)
    baseline, pruned = costs_of(run, rows, ACCELERATORS["l4"])
    assert (baseline.arm, pruned.arm) == ("baseline", "static_pruning")
    (alone,) = costs_of(run.changed(baseline=False), rows, ACCELERATORS["l4"])
    assert alone == pruned
    assert baseline.work.flops > pruned.work.flops
    _, warmed = costs_of(run.changed(warmup=2), rows, ACCELERATORS["l4"])
    (row,) = rows
    assert warmed.work == pruned.work + added(
        2 * Model.of(run.spec).conversation(StaticPruning(2, 0.3), row.messages, 4)
    )
    again = costs_of(run.changed(aa_test=True), rows, None)
    assert [one.arm for one in again] == ["baseline", "static_pruning", "baseline again"]
    assert again[0].work == again[2].work


def test_table_1_prefills_the_baseline_once(caplog: pytest.LogCaptureFixture) -> None:
    planned = costs(["experiment=table1", "model=tiny", "dataset=lookup", "limit=1"], None)
    assert len(planned) == 9
    assert [one.arm for one in planned].count("baseline") == 1


def test_sweep_lists_each_arm_without_shards_and_logs_those_out_of_reach(caplog: pytest.LogCaptureFixture) -> None:
    two = "compare={lazy: {name: lazy, schedule: 2x}, fastkv: {name: fastkv, keep: 2x}}"
    sweep = ["model=tiny", "dataset=lookup", "limit=1", two, "seed=0,1"]
    planned = costs([*sweep, "shard=1/2,2/2"], ACCELERATORS["h100"])
    assert [one.arm for one in planned] == ["baseline", "lazy"] * 2
    assert "left out: fastkv: method 'fastkv' cannot reach an ideal TTFT speedup of 2.0" in caplog.text
    assert min(one.seconds for one in planned) > 0
    assert "4 arms of 1 model: " in as_text(planned, ACCELERATORS["h100"])
    assert "give --gpu" in as_text(planned, None)


def test_other_models_are_in_the_memory() -> None:
    model, draft = Model.of(ModelSpec("llama3.1-8b", "dummy")), "llama3.2-1b"
    method = lazyllm.methods.make("specprefill", {"draft": draft})
    # its 1,235,814,400 weights, and K and V: 2 vectors of 8 heads of 64 in each of 16 layers for each prompt token
    assert model.memory(method, 1000, 1)["other models"] == 2 * 1_235_814_400 + 2 * 2 * 8 * 64 * 16 * 1000
    assert model.prefill(method, 1000).flops < 0.6 * model.prefill(Baseline(), 1000).flops


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*PRUNING, "dataset=lookup", "method.layer=99"], "only 8 layers"),
        (["model=tiny", "dataset=lookup", "method=fastkv", "method.keep=2x"], "give a lower one"),
        (["model=llama2", "dataset=lookup"], "lazyllm-bench fetch"),
    ],
    ids=["as the run", "out of reach", "not fetched"],
)
def test_plan_refuses(arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=named):
        costs(arguments, None)
