"""A plan against the measurements of its run, and arithmetic by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyllm
from eval.benchmarks.longbench import PUBLISHED
from eval.compose import read
from eval.run.plan import (
    RATE,
    amount,
    as_text,
    costs,
    costs_of,
    duration,
    groups_of,
    main,
    seconds_on,
)
from eval.run.work import Model, Work
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.flops import LayerShape
from lazyllm.engine.inputs import Prompt
from lazyllm.machine import ACCELERATORS
from lazyllm.methods import Baseline, Lazy, Method, StaticPruning
from lazyllm.models.load import load_weights
from lazyllm.models.tokenizers import load_tokenizer
from lazyllm.spec import ModelSpec
from tests.lazyllm.methods.method_matrix import ROWS
from tests.runs import checked, measured

TINY = ModelSpec("tiny", dtype="float32", device="cpu")
LLAMA2 = ModelSpec("llama2", "dummy", "bfloat16")
L4 = ACCELERATORS["l4"]
PRUNING = ["model=tiny", "method=static_pruning", "method.layer=2", "warmup=0", "batch_size=1"]
# Llama 2, by hand: its weights; FLOPs of a token in a layer's linear maps, of a row of logits, of
# a query with a key; bytes of a token's K and V in a layer
WEIGHTS, LINEAR = 6_738_415_616, 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
LOGITS, PAIR, KV_BYTES = 2 * 4096 * 32000, 4 * 4096, 2 * 2 * 4096


def test_plan_counts_what_the_run_measures(tmp_path: Path) -> None:
    """Of every arm: the FLOPs of prefills are those that the run records."""
    arms = "arms=[{name: static_pruning, layer: 2, keep: 0.3},{name: lazy, speedup: 1.5},gemfilter]"
    given = [*PRUNING[-2:], arms, "dataset=complete", "limit=2"]
    stored = measured(checked(*given, f"out={tmp_path / 'run'}"))
    planned = {cost.arm: cost for cost in costs(given, L4)}
    single = {cost.arm: cost for cost in costs([*given, "max_new_tokens=1"], L4)}
    assert [*planned] == ["baseline", "static_pruning", "lazy", "gemfilter"]
    for arm, cost in planned.items():
        rows = stored.rows[stored.rows["arm"] == arm]
        assert cost.examples == len(rows) == 2
        assert cost.prompt_tokens == rows["prompt_tokens"].sum()
        assert cost.longest == rows["prompt_tokens"].max()
        assert cost.answer_tokens >= rows["generated_tokens"].sum()  # the maximum
        assert single[arm].work.flops == rows["prefill_flops"].sum()
    held = stored.rows[stored.rows["arm"] == "baseline"]["kv_bytes"].max()
    assert planned["baseline"].memory["K and V"] == pytest.approx(held, rel=0.1)


def test_llama_2_by_hand() -> None:
    model, n = Model.of(LLAMA2), 3000
    assert model.weights == 2 * WEIGHTS
    prefill = 32 * (n * LINEAR + n * (n + 1) // 2 * PAIR) + LOGITS
    # two steps, over the prompt and the tokens so far; a batch shares weights and starts
    steps = 32 * (2 * LINEAR + (n + 1 + n + 2) * PAIR) + 2 * LOGITS
    cached = 32 * (n + 1 + n + 2) * KV_BYTES
    for rows, starts in ((8, 2 * 32 * (1 + 7 / 8) / 8), (1, 2 * 32)):
        reads = 2 * model.weights // rows + cached
        expected = [Work(prefill, model.weights, 32), Work(steps, reads, starts)]
        assert model.work(Baseline(), n, 3, rows) == expected
    eager = Model.of(replace(LLAMA2, attn_implementation="eager")).memory(Baseline(), n, 1)
    assert eager["working"] == 2 * 32 * n * n * 2 > model.memory(Baseline(), n, 1)["working"]
    first, decoding = expected
    assert seconds_on(L4, decoding) == pytest.approx(reads / 0.3e12 / RATE)
    # a fast card waits for its host, 0.6 ms a layer
    assert seconds_on(ACCELERATORS["h200"], decoding) == pytest.approx(64 * 0.6e-3)
    assert seconds_on(L4, first) == pytest.approx(prefill / 121e12 / RATE)


@pytest.fixture(scope="module")
def tiny():
    return load_weights(TINY)


@pytest.mark.parametrize("name", ROWS)
def test_memory_and_steps_are_of_what_a_generation_holds(name: str, tiny) -> None:
    method, n, model = ROWS[name].pruning, 300, Model.of(TINY)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 900, (n,), generator=generator).tolist()
    first, whole = (lazyllm.generate(tiny, prompt, method, tokens, ()) for tokens in (1, 3))
    planned = model.memory(method, n, 1)
    assert model.weights == sum(weight.nbytes for weight in tiny.parameters())
    # the Aux Cache has a row for each token, also for those that are not pruned
    rows = n + 1 if first.aux_bytes else 0
    assert planned["Aux Cache"] == rows * tiny.config.hidden_size * 4 >= first.aux_bytes
    # a prefill holds tokens that static pruning later discards
    assert planned["K and V"] >= first.kv_bytes
    # two tokens ran, each in all layers
    more = sum(whole.revived) + 2 * 8
    assert whole.kv_bytes == first.kv_bytes + more * model.kv_bytes
    _, steps = model.work(method, n, 3)
    shape = LayerShape.of(tiny.config)
    rest = 2 * (8 * shape.linear_flops + 2 * shape.width * tiny.config.vocab_size)
    attended = 2 * first.kv_bytes // model.kv_bytes + 8 * (1 + 2)
    if method.adaptive:  # counts are estimates
        assert steps.flops >= rest + attended * shape.pair_flops
    else:
        assert steps.flops == rest + attended * shape.pair_flops
        assert steps.read == 2 * model.weights + attended * model.kv_bytes


PRUNERS = [Baseline(), Lazy(), Lazy({1: 0.2, 6: 0.5}), Lazy({8: 0.5}), Lazy(revive=False)]


@pytest.mark.parametrize("n", [9, 300, 900])
@pytest.mark.parametrize("method", PRUNERS, ids=str)
def test_memory_is_what_a_prefill_allocates(method: Method, n: int, tiny) -> None:
    with torch.inference_mode(), open_decoder(tiny) as decoder:
        session: Any = method.start(decoder, Prompt(torch.arange(n)), 20)
        session.prefill(torch.arange(n))
    planned = Model.of(TINY).memory(method, n, 20)
    held = [stored.nbytes for cache in session.caches for stored in cache._stored.values()]
    assert planned["K and V"] == sum(held)
    assert planned["Aux Cache"] == (session._aux.nbytes if hasattr(session, "_aux") else 0)


def test_plan_counts_each_arm_once_and_the_warm_ups() -> None:
    given = [*PRUNING, "method.keep=0.3", "dataset=lookup", "limit=1"]
    rows = groups_of(read(given))
    baseline, pruned = costs_of(read(given), rows, L4)
    assert (baseline.arm, pruned.arm) == ("baseline", "static_pruning")
    assert costs_of(read([*given, "baseline=false"]), rows, L4) == [pruned]
    assert baseline.work.flops > pruned.work.flops
    _, warmed = costs_of(read([*given, "warmup=2"]), rows, L4)
    (row,) = rows
    warm_up = Model.of(TINY).work(StaticPruning(2, 0.3), row.prompt_tokens, 4)
    assert warmed.work == sum(2 * warm_up, pruned.work)


def test_sweep_lists_each_arm_and_logs_those_out_of_reach(caplog) -> None:
    sweep = ["model=tiny", "dataset=lookup", "limit=1", "seed=0,1", "speedup=2x"]
    planned = costs([*sweep, "arms=[lazy,fastkv]"], ACCELERATORS["h100"])
    assert [cost.arm for cost in planned] == ["baseline", "lazy"] * 2
    assert "left out: fastkv cannot reach an ideal TTFT speedup of 2" in caplog.text
    assert min(cost.seconds for cost in planned) > 0
    text = as_text(planned)
    assert "4 arms of 1 model: " in text
    assert "one after the other at 50% of 989 TFLOP/s and 3.35 TB/s (H100)" in text
    match = re.search(r"attention takes (\d+)% .* prefill of ([\d,]+) tokens", text)
    assert match is not None
    assert match[2] == f"{planned[0].longest:,}"
    n, config = planned[0].longest, Model.of(TINY).config
    shape = LayerShape.of(config)
    attention = 8 * n * (n + 1) // 2 * shape.pair_flops
    rest = 8 * n * shape.linear_flops + 2 * shape.width * config.vocab_size
    assert int(match[1]) == round(100 * attention / (attention + rest))


def test_without_a_gpu_times_are_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a product of the model's shape, on as many threads as the run has, and a large matrix."""
    calls = []

    def rate(device: torch.device, dtype: torch.dtype, tokens: int, *sizes: int) -> float:
        calls.append((device.type, dtype, tokens, *sizes))
        return 8e9 if tokens > 1 else 2e9

    monkeypatch.setattr("lazyllm.measuring._rate", rate)
    before = torch.get_num_threads()
    given = [*PRUNING, "dataset=lookup", "limit=1", "model.device=cpu"]
    planned = costs(given)
    assert torch.get_num_threads() == before
    shapes = (1000, 128, LayerShape.of(Model.of(TINY).config).mlp_width, 1), (1, 8192, 8192, 1)
    assert calls == [("cpu", torch.float32, *shape) for shape in shapes]
    here = planned[0].device
    # each weight: 2 FLOPs, 4 bytes
    assert (here.flops_per_s, here.bytes_per_s, here.gigabytes) == (8e9, 4e9, 0)
    assert planned == costs(given, here)
    assert f"50% of 0.008 TFLOP/s and 0.004 TB/s ({here.name})" in as_text(planned)


def test_other_models_are_in_the_memory() -> None:
    model = Model.of(ModelSpec("llama3.1-8b", "dummy", "bfloat16"))
    method = lazyllm.methods.make("specprefill", {"draft": "llama3.2-1b"})
    # its 1,235,814,400 weights, and K and V: 2 vectors of 8 heads of 64 in each of 16 layers for
    # each prompt token
    expected = 2 * 1_235_814_400 + 2 * 2 * 8 * 64 * 16 * 1000
    assert model.memory(method, 1000, 1)["other models"] == expected
    drafted, whole = (model.work(choice, 1000, 1)[0].flops for choice in (method, Baseline()))
    assert drafted < 0.6 * whole


@pytest.fixture
def nothing_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        # 2,113 words at 1.6 tokens, 1,235 at 3.5
        ("model=llama2 dataset=multi_news", {"multi_news": (3381, 512, 200)}),
        ("model=xgen dataset=lcc limit=7", {"lcc": (4322, 64, 7)}),
        (
            "model=llama2 dataset=code limit=50",
            {"lcc": (3500, 64, 50), "repobench-p": (3500, 64, 50)},
        ),
        ("model=llama2 dataset=qmsum max_new_tokens=9", {"qmsum": (3500, 9, 200)}),
    ],
)
@pytest.mark.usefixtures("nothing_fetched")
def test_plan_before_anything_was_fetched(
    given: str, rows: dict[str, tuple[int, int, int]]
) -> None:
    config, a100 = read(given.split()), ACCELERATORS["a100"]
    estimated = groups_of(config)
    found = {row.dataset: (row.prompt_tokens, row.new_tokens, row.count) for row in estimated}
    assert found == rows
    planned = costs(given.split(), a100)
    assert [cost.arm for cost in planned] == ["baseline", "lazy"]
    assert planned == costs_of(config, estimated, a100)
    assert "an estimate: " in as_text(planned)
    assert "estimate" not in as_text([replace(cost, is_estimate=False) for cost in planned])


@pytest.mark.usefixtures("nothing_fetched")
def test_readme_s_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama2", "method=lazy", "--gpu", "a100"]) == 0
    output = capsys.readouterr().out
    # both arms; 19 of 20 examples are cut at 3,500 tokens, 200 have 3,381 and 150 more
    assert output.count("| 3750 | 13,101,200 |") == 2


def test_published_sizes(shared: Path) -> None:
    folder = shared / "longbench"
    answers = json.loads((folder / "config" / "dataset2maxlen.json").read_text())
    sizes = {name: size.max_new_tokens for name, size in PUBLISHED.items()}
    assert answers.items() >= sizes.items()
    tokenizer = load_tokenizer(str(shared / "tokenizers" / "llama2" / "tokenizer.model"))
    ratios: dict[float, list[float]] = {}
    for name, size in PUBLISHED.items():
        with (folder / f"{name}.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        texts = [f"{row['context']}\n{row['input']}" for row in rows]
        tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts)
        ratio = tokens / sum(row["length"] for row in rows)
        ratios.setdefault(size.tokens_per_word, []).append(ratio)
    for stated, found in ratios.items():
        assert sum(found) / len(found) == pytest.approx(stated, rel=0.05)


def test_times_and_amounts_have_no_power_of_ten() -> None:
    times = {0.1: "< 1 s", 8.2: "8 s", 720: "12 min", 12_240: "3.4 h", 5e6: "1,388.9 h"}
    assert {seconds: duration(seconds) for seconds in times} == times
    amounts = {33_094.2: "33,094", 129.23: "129.2", 0.00264: "0.00264"}
    assert {value: amount(value) for value in amounts} == amounts
