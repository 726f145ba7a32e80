"""A plan against the measurements of its runs, arithmetic by hand, and the paper's mean prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pandas import DataFrame

import lazyllm
from eval.benchmarks import SUITES
from eval.run.cost import GPUS, memory, parameters_of, turn_work, weight_bytes, work
from eval.run.lengths import lengths_of
from eval.run.loop import run
from eval.run.plan import Bill, bill
from eval.run.plan_command import as_text, bills
from eval.run.prepare import prepare
from eval.store.runs import stored_runs
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, FastKV, Method, StaticPruning
from lazyllm.models.load import load_config, load_weights
from lazyllm.spec import ModelSpec
from tests.lazyllm.methods.method_matrix import ROWS
from tests.runs import run_of

ARGUMENTS = ["model=tiny", "dataset=lookup", "limit=3", "timing.warmup=0", "method.schedule={2: 0.3}"]
OTHERS = [
    ["model=tiny", "dataset=needle", "needle.lengths=[256,512]", "needle.depths=[50]", "method=fastkv"],
    ["model=tiny", "dataset=complete", "limit=2", "method=static_pruning", "method.layer=2", "method.keep=0.3"],
    [
        "model=tiny",
        "dataset=lookup",
        "limit=2",
        "turns=3",
        "method=static_pruning",
        "method.layer=2",
        "method.keep=0.3",
    ],
]
LLAMA2 = ModelSpec("llama2", "dummy")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder with one stored run of `ARGUMENTS`."""
    return _run(ARGUMENTS, tmp_path_factory.mktemp("runs"))


def _run(arguments: list[str], folder: Path) -> Path:
    run(run_of(*arguments, f"out={folder / 'run'}"), show=False)
    return folder


@pytest.mark.parametrize("arguments", OTHERS)
def test_other_data_and_methods_are_planned_as_they_are_measured(arguments: list[str], tmp_path: Path) -> None:
    _compare(bills(arguments, None, _run([*arguments, "timing.warmup=0"], tmp_path))[0], tmp_path)


def _compare(planned: Bill, folder: Path) -> DataFrame:
    """Assert that a plan's counts and bytes equal those of the single run in the folder. Returns its examples."""
    (stored,) = stored_runs([folder])
    examples = stored.examples
    conversations = examples.groupby("id")["prompt_tokens"].sum()
    assert planned.examples == len(conversations)
    assert planned.prompt_tokens == conversations.sum()
    assert planned.longest == conversations.max()
    assert planned.answer_tokens == examples["generated_tokens"].sum()
    assert planned.gigabytes["kv"] * 1e9 == pytest.approx(examples["baseline_kv_bytes"].max(), rel=0.1)
    # all resident memory of a process, this one's included
    assert sum(planned.gigabytes.values()) * 1e9 == pytest.approx(examples["baseline_peak_memory_bytes"].max(), rel=0.1)
    return examples


def test_a_plan_is_what_the_run_then_measures(measured: Path) -> None:
    (planned,) = bills(ARGUMENTS, None, measured)
    examples = _compare(planned, measured)
    # measured seconds count for finished examples; 20 more are assumed for the start of a job
    seconds = (examples["total_s"] + examples["baseline_total_s"]).sum()
    assert planned.hours is not None
    assert planned.hours * 3600 - 20 == pytest.approx(seconds, rel=0.05)
    longer = bills([*ARGUMENTS, "limit=6"], None, measured)[0].hours
    assert longer is not None
    assert longer > planned.hours


@pytest.mark.parametrize("data", [["dataset=lookup"], ["dataset=needle", "needle.lengths=[512]"]], ids=str)
def test_a_target_is_solved_for_the_length_that_the_run_solves_it_for(data: list[str], tmp_path: Path) -> None:
    run = run_of("model=tiny", "limit=1", "method=random_drop", "method.keep=2x", *data)
    assert parameters_of(run, load_config(run.spec)) == prepare(run).parameters


def test_a_plan_refuses_what_the_run_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prunes after layer 99, but the model has only 8 layers"):
        bills(
            ["model=tiny", "dataset=lookup", "method=static_pruning", "method.layer=99", "method.keep=0.5"],
            None,
            tmp_path,
        )


def test_without_a_run_the_hours_on_this_machine_are_unknown(tmp_path: Path) -> None:
    planned = bills(ARGUMENTS, None, tmp_path)
    assert planned[0].hours is None
    assert "hours are unknown: run the model on this machine first" in as_text(planned, None)
    assert planned[0].answer_tokens == 3 * 8  # the most that there may be


TINY = ModelSpec("tiny", dtype="float32", device="cpu")


@pytest.mark.parametrize("name", ROWS)
def test_memory_is_what_a_generation_holds(name: str) -> None:
    model, method, n = load_weights(TINY), ROWS[name].pruning, 600
    prompt = torch.randint(3, 900, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    out = lazyllm.generate(model, prompt, method, 1, ())
    planned = memory(model.config, TINY, method, n, 1, 0)
    numbers = 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert out.kv_bytes == sum(method.stored_per_layer(8, n)) * numbers
    assert planned.aux == pytest.approx(out.aux_bytes, rel=0.1)
    assert planned.kv >= out.kv_bytes  # a prefill holds tokens that static pruning later discards


def test_weights_are_those_of_the_model() -> None:
    model = load_weights(TINY)
    assert weight_bytes(TINY, parameters_of(model.config)) == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize(
    "method",
    [Baseline(), StaticPruning(2, 0.3), StaticPruning(2, 0.3, turns="again"), FastKV(3, 0.4, 0.2)],
    ids=str,
)
def test_the_work_of_a_later_turn_is_that_of_the_tokens_it_runs(method: Method) -> None:
    spec = ModelSpec("tiny", dtype="float32", device="cpu")
    model, _ = lazyllm.load_model("tiny", dtype="float32", device="cpu")
    prompt, more = torch.randint(3, 900, (300,)).tolist(), torch.randint(3, 900, (40,)).tolist()
    with lazyllm.start(model, prompt, method) as session:
        session.answer(None, 5, ())
        held = session.kv_bytes
        session.answer(more, 1, ())
        number = 2 * model.config.num_key_value_heads * model.config.head_dim * model.dtype.itemsize
        layers = model.config.num_hidden_layers
        now = session.kv_bytes // number
    planned = turn_work(model.config, spec, method, 300, 4, 41, 1, 0)
    assert planned.step_bytes == now * number
    if method.turns == "again":
        assert planned == work(model.config, spec, method, 345, 1, 0)
    else:
        assert now == held // number + 41 * layers
        shape = LayerShape.of(model.config)
        # each new token attends to all stored ones, and to those before it
        pairs = 41 * (held // number) + layers * 41 * 42 // 2
        logits = 2 * shape.width * model.config.vocab_size
        assert planned.prefill_flops == layers * 41 * shape.linear_flops + pairs * shape.pair_flops + logits


def test_llama_2_by_hand() -> None:
    config = load_config(LLAMA2)
    weights = weight_bytes(LLAMA2, parameters_of(config))
    assert weights == 2 * 6_738_415_616
    n, layer = 3000, 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    one = work(config, LLAMA2, Baseline(), n, 1, weights)
    logits = 2 * 4096 * 32000
    assert one.prefill_flops == 32 * (n * layer + n * (n + 1) // 2 * 4 * 4096) + logits
    assert one.step_flops == 32 * (layer + n * 4 * 4096) + logits
    assert one.step_bytes == weights + n * 32 * 2 * 4096 * 2  # 0.5 MB a token
    int8 = replace(LLAMA2, load_format="auto", quantise="int8")
    assert weight_bytes(int8, parameters_of(config)) == pytest.approx(weights / 2, rel=0.05)
    eager = replace(LLAMA2, attn_implementation="eager")
    parts = [memory(config, spec, Baseline(), n, 1, weights) for spec in (LLAMA2, eager)]
    assert parts[1].working == 2 * 32 * n * n * 2 > parts[0].working
    h100, l4 = GPUS["h100"], GPUS["l4"]
    assert one.ttft_s(l4) > 5 * one.ttft_s(h100)
    assert one.step_s(l4) == pytest.approx(one.step_bytes / (0.3e12 * 0.6))


def offline(monkeypatch) -> None:
    """As on a machine without the checkpoint's tokenizer."""

    def refuse(config: object) -> None:
        raise UserError("it is not in the hub's cache (and more)")

    monkeypatch.setattr("eval.run.prepare.prepare", refuse)
    monkeypatch.setattr("eval.run.lengths._KNOWN", {})


def test_longbench_is_guessed_where_it_is_not(monkeypatch) -> None:
    offline(monkeypatch)
    lengths = lengths_of(run_of("model=llama2"))
    assert {each.dataset for each in lengths} == set(SUITES["longbench"].datasets)
    prompts = [n for each in lengths for (n,) in each.rows]
    assert len(prompts) == 3750
    assert sum(prompts) / 3750 == pytest.approx(3376, rel=0.02)  # the paper's mean for Llama 2
    assert max(prompts) == 3500
    few = lengths_of(run_of("model=llama2", "limit=4", "max_new_tokens=9", "half=tuning"))
    assert [(len(each.rows), each.max_new_tokens) for each in few] == [(2, 9)] * 16
    with pytest.raises(UserError, match="not in the hub's cache"):
        lengths_of(run_of("model=tiny"))


def test_a_sweeps_jobs_and_what_was_assumed(monkeypatch, tmp_path: Path) -> None:
    offline(monkeypatch)
    sweep = ["experiment=table1", "model=llama2,llama3.1-8b", "dataset=narrativeqa", "limit=2"]
    planned = bills(sweep, "l4", tmp_path)
    assert len(planned) == 16
    assert len({plan.run for plan in planned}) == 16
    text = as_text(planned, "l4")
    assert "16 runs" in text
    assert "estimates from LongBench's published means: it is not in the hub's cache\n" in text
    assert "assumed rates of L4: 50% of 121 TFLOP/s in prefill" in text
    assert "not corrected by stored runs" in text
    assert "does not fit into 24 GB: try model.quantise=int8" in text  # Llama 3.1 8B at 39,000 tokens
    assert len(bills([*sweep, "shard=1/2,2/2"], "l4", tmp_path)) == 16


def test_a_draft_is_in_the_memory_and_needs_no_checkpoint(monkeypatch, tmp_path: Path) -> None:
    offline(monkeypatch)
    run = ["model=llama3.1-8b", "method=specprefill", "dataset=hotpotqa", "limit=2"]
    (own,), (drafted,) = (bills([*run, *more], "h100", tmp_path) for more in ((), ("method.draft=llama3.2-1b",)))
    assert "beside" not in own.gigabytes
    # its 1,235,814,400 weights, and K and V: 2 vectors of 8 heads of 64 in each of 16 layers for each prompt token
    bytes_held = 2 * 1_235_814_400 + 2 * 2 * 8 * 64 * 16 * drafted.longest
    assert drafted.gigabytes["beside"] == pytest.approx(bytes_held / 1e9)
    assert drafted.gigabytes["weights"] == own.gigabytes["weights"]
    # 1.2 of 8.0 billion weights read the prompt instead of all
    assert drafted.petaflops < 0.6 * own.petaflops
    assert "GB (weights 16.1, beside " in as_text([drafted], "h100")


def test_a_draft_on_the_host_stays_there_while_the_baseline_runs(tmp_path: Path) -> None:
    arguments = ["model=tiny", "dataset=lookup", "limit=1", "method=specprefill", "method.draft=tiny"]
    (planned,) = bills(arguments, None, tmp_path)
    assert planned.gigabytes["beside"] > planned.gigabytes["weights"] > 0.005


def test_methods_out_of_reach_are_left_out_with_a_line(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    field = ["experiment=field", "model=tiny", "dataset=lookup", "limit=1", "speedup=2x"]
    planned = [plan.run.split(", ")[1] for plan in bills(field, "h100", tmp_path)]
    assert planned == ["random_drop", "static_pruning", "lazy", "gemfilter", "asl", "oracle"]
    left_out = [record.message for record in caplog.records]
    assert len(left_out) == 4
    assert left_out[0].startswith("left out: tiny, fastkv, keep=2x")
    assert "method 'fastkv' cannot reach an ideal TTFT speedup of 2.0 on 8 layers" in left_out[0]
    with pytest.raises(UserError, match="no run reaches its speedup on this model: give a lower one"):
        bills([*field, "only=fastkv"], "h100", tmp_path)


def test_a_pruned_runs_bill_is_below_its_baselines() -> None:
    one = bill(run_of(*ARGUMENTS), "h100")
    assert one.petaflops < one.baseline_petaflops
    alone = bill(run_of(*ARGUMENTS, "timing.paired=false"), "h100")
    assert (alone.petaflops, alone.baseline_petaflops) == (one.petaflops, 0)
