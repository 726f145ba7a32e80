"""A plan against the measurements of its runs, and arithmetic by hand."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lazyllm
from eval.benchmarks.longbench import PUBLISHED
from eval.run.plan import RATE, amount, as_text, costs, costs_of, duration, groups_of, main, seconds_on
from eval.run.work import Model, Work
from eval.store.runs import stored_runs
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape
from lazyllm.engine.inputs import Prompt
from lazyllm.machine import ACCELERATORS
from lazyllm.methods import Baseline, FastKV, Lazy, Method, StaticPruning
from lazyllm.models.load import load_weights
from lazyllm.models.tokenizers import load_tokenizer
from lazyllm.spec import ModelSpec
from tests.lazyllm.methods.method_matrix import ROWS
from tests.runs import measure, run_of

TINY = ModelSpec("tiny", dtype="float32", device="cpu")
LLAMA2 = ModelSpec("llama2", "dummy", "bfloat16")
PRUNING = ["model=tiny", "method=static_pruning", "method.layer=2", "method.keep=0.3", "warmup=0"]
PRUNING += ["batch_size=1"]  # as on a CPU
# Llama 2, by hand: its weights; FLOPs of a token in a layer's linear maps, of a row of logits, of a query with a key
WEIGHTS, LINEAR, LOGITS, PAIR = 6_738_415_616, 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008), 2 * 4096 * 32000, 4 * 4096
KV_BYTES = 2 * 2 * 4096  # of a token in a layer


@pytest.mark.parametrize("more", [["dataset=complete", "limit=2"], ["dataset=lookup", "limit=2", "turns=3"]], ids=str)
def test_plan_counts_what_the_run_measures(more: list[str], tmp_path: Path) -> None:
    arguments = [*PRUNING, *more]
    measure(run_of(*arguments, f"out={tmp_path / 'run'}"), show=False)
    (stored,) = stored_runs([tmp_path])
    examples = stored.rows[stored.rows["arm"] == "static_pruning"]
    baseline, planned = costs(arguments, ACCELERATORS["l4"])
    conversations = examples.groupby("id")["prompt_tokens"].sum()
    assert planned.examples == len(conversations)
    assert planned.prompt_tokens == conversations.sum()
    assert planned.longest == conversations.max()
    assert planned.answer_tokens >= examples["generated_tokens"].sum()  # the maximum
    model, first = Model.of(TINY), examples[examples["turn"] == 1]
    prefills = [model.conversation(StaticPruning(2, 0.3), [n], 1)[0].flops for n in first["prompt_tokens"]]
    assert prefills == first["prefill_flops"].tolist()
    held = stored.rows[stored.rows["arm"] == "baseline"]["kv_bytes"].max()
    assert baseline.memory["K and V"] == pytest.approx(held, rel=0.1)


def test_llama_2_by_hand() -> None:
    model, n = Model.of(LLAMA2), 3000
    assert model.weights == 2 * WEIGHTS
    prefill = 32 * (n * LINEAR + n * (n + 1) // 2 * PAIR) + LOGITS
    # two steps, over the prompt and the tokens so far
    steps = 32 * (2 * LINEAR + (n + 1 + n + 2) * PAIR) + 2 * LOGITS
    read = 2 * model.weights + 32 * (n + 1 + n + 2) * KV_BYTES
    assert model.conversation(Baseline(), [n], 3) == [Work(prefill, model.weights, 32), Work(steps, read, 2 * 32)]
    eager = Model.of(replace(LLAMA2, attn_implementation="eager")).memory(Baseline(), n, 1)
    assert eager["working"] == 2 * 32 * n * n * 2 > model.memory(Baseline(), n, 1)["working"]
    assert seconds_on(ACCELERATORS["l4"], Work(steps, read, 64)) == pytest.approx(read / 0.3e12 / RATE)
    # a fast card waits for its host, 0.6 ms a layer
    assert seconds_on(ACCELERATORS["h200"], Work(steps, read, 64)) == pytest.approx(64 * 0.6e-3)
    assert seconds_on(ACCELERATORS["l4"], Work(prefill, model.weights, 32)) == pytest.approx(prefill / 121e12 / RATE)


# {method: (layers, tokens that each of them holds)} of 3000 prompt tokens on Llama 2, by hand from the docstrings
HELD = {
    "baseline": [(32, 3000)],
    "lazy": [(9, 3000), (10, 2100), (9, 1470), (4, 1029)],  # 0.7 after layers 9, 19 and 28
    "lazy revive=False": [(9, 3000), (10, 2100), (9, 1470), (4, 1029)],
    "static_pruning": [(32, 900)],  # 0.3, and the early layers forget the rest
    "random_drop keep=0.5": [(32, 1500)],
    "prompt_compression keep=0.5 unit=token": [(32, 1501)],  # half of 2999, and the last one
    "gemfilter": [(32, 1024)],
    "specprefill": [(32, 29 * 32)],  # 0.3 of 94 chunks of 32 tokens
    "fastkv": [(32, 300)],  # 0.1 of 3000 in early layers; in late ones half of the 600 tokens that enter
    "claa": [(4, 3000), (28, 600)],  # the first 4 layers store all, then 0.2
    "asl": [(32, 2048)],
    "uniprefill p=0.5": [(8, 3000), (4, 1792), (4, 1216), (4, 896), (4, 768), (4, 704), (4, 640)],  # blocks of 64
}
older, HELD["pyramidinfer"] = 2400, []
for cosine in (math.cos(math.pi * layer / 32) for layer in range(32)):
    HELD["pyramidinfer"].append((1, older + 600))  # the recent fifth always stays
    older = math.floor((0.1 * (cosine + 1) / 2 + 0.9) * older)


def named(text: str) -> Method:
    name, *settings = text.split()
    pairs = [one.split("=") for one in settings]
    return lazyllm.methods.make(name, {key: yaml.safe_load(value) for key, value in pairs})


@pytest.mark.parametrize("batch_size", [1, 4, 8])
@pytest.mark.parametrize("name", HELD)
def test_decoding_by_hand(name: str, batch_size: int) -> None:
    model = Model.of(LLAMA2)
    # the tokens of the two steps, each of which attends to itself too
    attended = sum(layers * (held + generated) for layers, held in HELD[name] for generated in (1, 2))
    flops = 2 * (32 * LINEAR + LOGITS) + attended * PAIR
    read = attended * KV_BYTES + 2 * (2 * WEIGHTS) // batch_size
    starts = 64 * (1 + (batch_size - 1) / 8) / batch_size
    assert model.conversation(named(name), [3000], 3, batch_size=batch_size)[-1] == Work(flops, read, starts)


def test_prefill_that_skips_attention_by_hand() -> None:
    """Of 3,000 tokens, those before the last 128 see 8 sinks and 512 tokens, in layers 17 to 32."""
    model = Model.of(LLAMA2)
    dense = 3000 * 3001 // 2
    sparse = 520 * 521 // 2 + (2872 - 520) * 520 + sum(range(2873, 3001))
    triangle = model.conversation(named("trianglemix"), [3000], 1)[0]
    assert triangle.flops == 32 * 3000 * LINEAR + LOGITS + 16 * (dense + sparse) * PAIR
    whole = model.conversation(Baseline(), [3000], 1)[0]
    assert whole.flops == 32 * 3000 * LINEAR + LOGITS + 32 * dense * PAIR


@pytest.mark.parametrize(("name", "is_whole"), [("gemfilter keep=300", True), ("random_drop keep=0.1", False)])
def test_memory_holds_a_prompt_that_the_model_itself_scores(name: str, is_whole: bool) -> None:
    model = Model.of(LLAMA2)
    whole, own = (sum(model.memory(method, 3000, 5).values()) for method in (Baseline(), named(name)))
    assert (own == whole) == is_whole


def test_later_turn_of_lazyllm_by_hand() -> None:
    """Generated tokens stay in every layer; the prompts of both turns are pruned as one."""
    model = Model.of(LLAMA2)

    def run(layers: int, old: int, new: int) -> int:
        return layers * sum(LINEAR + at * PAIR for at in range(old + 1, new + 1))

    before = [(9, 3000 + 4), (10, 2100 + 4), (9, 1470 + 4), (4, 1029 + 4)]  # four of five generated tokens have run
    after = [(9, 3100 + 5), (10, 2170 + 5), (9, 1519 + 5), (4, 1064 + 5)]  # 0.7 of 3100, of 2170, of 1519
    flops = LOGITS + sum(run(layers, old, new) for (layers, old), (_, new) in zip(before, after, strict=True))
    held = sum(layers * tokens for layers, tokens in after)
    turn, step = model.conversation(Lazy(), [3000, 100], 5)[2:]
    assert turn == Work(flops, 2 * WEIGHTS + held * KV_BYTES, 32)
    attended = sum(layers * (tokens + generated) for layers, tokens in after for generated in (1, 2, 3, 4))
    assert step.read == 4 * 2 * WEIGHTS + attended * KV_BYTES
    kept = model.conversation(Lazy(revive=False), [3000, 100], 5)[2]
    assert kept.flops == LOGITS + sum(run(layers, old, old + 101) for layers, old in before)  # nothing more is pruned


@pytest.fixture(scope="module")
def tiny():
    return load_weights(TINY)


@pytest.mark.parametrize("name", ROWS)
def test_memory_is_what_a_generation_holds(name: str, tiny) -> None:
    method, n = ROWS[name].pruning, 300
    prompt = torch.randint(3, 900, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    out = lazyllm.generate(tiny, prompt, method, 1, ())
    decoded = lazyllm.generate(tiny, prompt, method, 5, ())
    model = Model.of(TINY)
    planned = model.memory(method, n, 1)
    assert model.weights == sum(weight.nbytes for weight in tiny.parameters())
    declared = sum(method.stored_per_layer(Depth(8), n)) * model.kv_bytes
    assert out.kv_bytes == declared or (method.adaptive and out.kv_bytes < declared)
    more = sum(decoded.revived) + 4 * 8  # four generated tokens ran, each in all layers
    assert decoded.kv_bytes == out.kv_bytes + more * model.kv_bytes
    held = decoded.kv_bytes // model.kv_bytes - sum(decoded.revived)
    assert method.adaptive or sum(model.held(method, n, 0, 4)) == held
    rows = n + 1 if out.aux_bytes else 0  # the Aux Cache has one for each token, also for those that are not pruned
    assert planned["Aux Cache"] == rows * tiny.config.hidden_size * 4 >= out.aux_bytes
    assert planned["K and V"] >= out.kv_bytes  # a prefill holds tokens that static pruning later discards


@pytest.mark.parametrize("n", [9, 300, 900])
@pytest.mark.parametrize(
    "method", [Baseline(), Lazy(), Lazy({1: 0.2, 6: 0.5}), Lazy({8: 0.5}), Lazy(revive=False)], ids=str
)
def test_memory_is_what_a_prefill_allocates(method: Method, n: int, tiny) -> None:
    with torch.inference_mode(), open_decoder(tiny) as decoder:
        session: Any = method.start(decoder, Prompt(torch.arange(n)), 20)
        session.prefill(torch.arange(n))
    planned = Model.of(TINY).memory(method, n, 20)
    assert planned["K and V"] == sum(stored.nbytes for cache in session.caches for stored in cache._stored.values())
    assert planned["Aux Cache"] == (session._aux.nbytes if hasattr(session, "_aux") else 0)


def test_room_for_revived_tokens_by_hand() -> None:
    """An eighth of each later group's slots, at least 64, and no more than the text has tokens."""
    model = Model.of(LLAMA2)

    def beyond_the_prefill(n: int) -> int:
        return (model.memory(Lazy(), n, 64)["K and V"] - model.memory(Lazy(revive=False), n, 64)["K and V"]) // KV_BYTES

    # of 3000 tokens, 2100, 1470 and 1029 enter 10, 9 and 4 layers; of 100 tokens, 70, 49 and 35
    assert beyond_the_prefill(3000) == 10 * (2164 // 8) + 9 * (1534 // 8) + 4 * (1093 // 8)
    assert beyond_the_prefill(100) == 10 * 30 + 9 * 51 + 4 * 64


@pytest.mark.parametrize("method", [Baseline(), StaticPruning(2, 0.3), FastKV(3, 0.4, 0.2)], ids=str)
def test_work_of_a_later_turn_is_that_of_the_tokens_it_runs(method: Method, tiny) -> None:
    model, layers, shape = Model.of(TINY), 8, LayerShape.of(tiny.config)
    with lazyllm.start(tiny, list(range(5, 305)), method) as session:
        held = session.answer(None, 5, ()).kv_bytes // model.kv_bytes
        now = session.answer(list(range(400, 440)), 1, ()).kv_bytes // model.kv_bytes
    first, turn = model.conversation(method, [300], 5), model.conversation(method, [300, 40], 5)
    assert turn[:2] == first
    assert model.conversation(method, [300, 40], 5, "recompute")[2:] == model.conversation(method, [345], 5)
    assert now == held + 41 * layers
    # each of the 40 tokens, and the answer's last one, attends to all stored ones, and to those before it
    pairs = 41 * held + layers * 41 * 42 // 2
    logits = 2 * shape.width * tiny.config.vocab_size
    assert turn[2] == Work(
        layers * 41 * shape.linear_flops + pairs * shape.pair_flops + logits,
        model.weights + now * model.kv_bytes,
        layers,
    )


def test_plan_counts_each_arm_once_and_the_warm_ups() -> None:
    run = run_of(*PRUNING, "dataset=lookup", "limit=1")
    rows = groups_of(run)
    baseline, pruned = costs_of(run, rows, ACCELERATORS["l4"])
    assert (baseline.arm, pruned.arm) == ("baseline", "static_pruning")
    (alone,) = costs_of(run.changed(baseline=False), rows, ACCELERATORS["l4"])
    assert alone == pruned
    assert baseline.work.flops > pruned.work.flops
    _, warmed = costs_of(run.changed(warmup=2), rows, ACCELERATORS["l4"])
    (row,) = rows
    warm_up = Model.of(run.subject.spec).conversation(StaticPruning(2, 0.3), row.messages, 4)
    assert warmed.work == sum(2 * warm_up, pruned.work)


def test_sweep_lists_each_arm_and_logs_those_out_of_reach(caplog: pytest.LogCaptureFixture) -> None:
    two = "compare={lazy: {name: lazy, schedule: 2x}, fastkv: {name: fastkv, keep: 2x}}"
    sweep = ["model=tiny", "dataset=lookup", "limit=1", two, "seed=0,1"]
    planned = costs(sweep, ACCELERATORS["h100"])
    assert [one.arm for one in planned] == ["baseline", "lazy"] * 2
    assert "left out: fastkv: method 'fastkv' cannot reach an ideal TTFT speedup of 2.0" in caplog.text
    assert min(one.seconds for one in planned) > 0
    shown = as_text(planned)
    assert "4 arms of 1 model: " in shown
    assert "one after the other at 50% of 989 TFLOP/s and 3.35 TB/s (H100)" in shown
    share, longest = re.search(r"attention takes (\d+)% .* prefill of ([\d,]+) tokens", shown).groups()
    assert longest == f"{planned[0].longest:,}"
    n, shape = planned[0].longest, LayerShape.of(Model.of(TINY).config)
    attention = 8 * n * (n + 1) // 2 * shape.pair_flops
    rest = 8 * n * shape.linear_flops + 2 * shape.width * Model.of(TINY).config.vocab_size
    assert int(share) == round(100 * attention / (attention + rest))


def test_without_a_gpu_times_are_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a product of the model's shape, on as many threads as the run asks for, and one of a large matrix."""
    asked = []

    def rate(device: torch.device, dtype: torch.dtype, tokens: int, *sizes: int) -> float:
        asked.append((device.type, dtype, tokens, *sizes))
        return 8e9 if tokens > 1 else 2e9

    monkeypatch.setattr("lazyllm.measuring._rate", rate)
    before = torch.get_num_threads()
    planned = costs([*PRUNING, "dataset=lookup", "limit=1", "model.device=cpu"])
    assert torch.get_num_threads() == before
    mlp_width = LayerShape.of(Model.of(TINY).config).mlp_width
    assert asked == [("cpu", torch.float32, 1000, 128, mlp_width, 1), ("cpu", torch.float32, 1, 8192, 8192, 1)]
    here = planned[0].device
    assert (here.flops_per_s, here.bytes_per_s, here.gigabytes) == (8e9, 4e9, 0)  # each weight: 2 FLOPs, 4 bytes
    assert planned == costs([*PRUNING, "dataset=lookup", "limit=1", "model.device=cpu"], here)
    assert f"50% of 0.008 TFLOP/s and 0.004 TB/s ({here.name})" in as_text(planned)


def test_other_models_are_in_the_memory() -> None:
    model, draft = Model.of(ModelSpec("llama3.1-8b", "dummy", "bfloat16")), "llama3.2-1b"
    method = lazyllm.methods.make("specprefill", {"draft": draft})
    # its 1,235,814,400 weights, and K and V: 2 vectors of 8 heads of 64 in each of 16 layers for each prompt token
    assert model.memory(method, 1000, 1)["other models"] == 2 * 1_235_814_400 + 2 * 2 * 8 * 64 * 16 * 1000
    first, whole = (model.conversation(one, [1000], 1)[0].flops for one in (method, Baseline()))
    assert first < 0.6 * whole


@pytest.fixture
def nothing_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["model=llama2", "dataset=multi_news"], {"multi_news": (3381, 512, 200)}),  # 2,113 words at 1.6 tokens
        (["model=xgen", "dataset=lcc", "limit=7"], {"lcc": (4322, 64, 7)}),  # 1,235 at 3.5
        (["model=llama2", "dataset=code", "limit=50"], {"lcc": (3500, 64, 50), "repobench-p": (3500, 64, 50)}),
        (["model=llama2", "dataset=qmsum", "max_new_tokens=9"], {"qmsum": (3500, 9, 200)}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nothing_fetched")
def test_plan_before_anything_was_fetched(arguments: list[str], rows: dict[str, tuple[int, int, int]]) -> None:
    run = run_of("method=lazy", *arguments)
    estimated = groups_of(run)
    assert {row.dataset: (*row.messages, row.new_tokens, row.count) for row in estimated} == rows
    planned = costs(["method=lazy", *arguments], ACCELERATORS["a100"])
    assert [one.arm for one in planned] == ["baseline", "lazy"]
    assert planned == costs_of(run, estimated, ACCELERATORS["a100"])
    assert "an estimate: " in as_text(planned)
    assert "estimate" not in as_text([replace(one, is_estimate=False) for one in planned])


@pytest.mark.usefixtures("nothing_fetched")
def test_readme_s_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama2", "method=lazy", "--gpu", "a100"]) == 0
    shown = capsys.readouterr().out
    # both arms; 19 of 20 examples are cut at 3,500 tokens, 200 have 3,381 and 150 more
    assert shown.count("| 3750 | 13,101,200 |") == 2


def test_published_sizes(shared: Path) -> None:
    answers = json.loads((shared / "longbench" / "config" / "dataset2maxlen.json").read_text())
    assert answers.items() >= {name: size.max_new_tokens for name, size in PUBLISHED.items()}.items()
    tokenizer = load_tokenizer(str(shared / "tokenizers" / "llama2" / "tokenizer.model"))
    ratios: dict[float, list[float]] = {}
    for name, size in PUBLISHED.items():
        rows = [json.loads(line) for line in (shared / "longbench" / f"{name}.jsonl").open(encoding="utf-8")]
        texts = [f"{row['context']}\n{row['input']}" for row in rows]
        tokens = [len(tokenizer(text)["input_ids"]) for text in texts]
        ratios.setdefault(size.tokens_per_word, []).append(sum(tokens) / sum(row["length"] for row in rows))
    for stated, measured in ratios.items():
        assert sum(measured) / len(measured) == pytest.approx(stated, rel=0.05)


def test_times_and_amounts_have_no_power_of_ten() -> None:
    times = {0.1: "< 1 s", 8.2: "8 s", 720: "12 min", 12_240: "3.4 h", 5e6: "1,388.9 h"}
    assert {seconds: duration(seconds) for seconds in times} == times
    amounts = {33_094.2: "33,094", 129.23: "129.2", 0.00264: "0.00264"}
    assert {value: amount(value) for value in amounts} == amounts
