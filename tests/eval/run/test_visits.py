"""What visits hold of real generations: alone and in batches, of arms that fail, and in order."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lazyllm
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import Prompt, gold_token_ids
from eval.benchmarks.suite import Example
from eval.run import answer as answer_module
from eval.run import bench as bench_module
from eval.run.answer import score_of
from eval.run.bench import Bench
from eval.run.loop import rotate
from eval.run.prepare import Run, prepare
from eval.run.work import WARMUP_TOKENS, Model, fitting_batch
from eval.store.folder import read_about, read_visits
from eval.store.record import Visit
from lazyllm.engine import decoder, session
from lazyllm.engine.flops import attention_ceiling
from lazyllm.engine.generation import force
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy, PromptCompression
from lazyllm.methods.support import other_models
from lazyllm.spec import ModelSpec
from tests.helpers import tiny
from tests.lazyllm.engine.test_batch import Unbatchable
from tests.runs import (
    arm,
    bench_of,
    compared,
    failing_sometimes,
    measured,
    prompt_of,
    small_config,
)

ARMS = [
    {"name": "lazy", "schedule": {2: 0.5}},
    {"name": "static_pruning", "label": "fails", "layer": 2, "keep": 0.5},
    {"name": "random_drop", "label": "drop", "keep": 0.5, "seeds": 2},
    {"name": "trianglemix", "dense": 1, "sinks": 1, "window": 8, "last": 8},
    {"name": "static_pruning", "label": "whole", "layer": 2, "keep": 1.0},
]
LABELS = ["baseline", "lazy", "fails", "drop seed 0", "drop seed 1", "trianglemix", "whole"]
DEFAULTS: dict[str, Any] = {"arms": ARMS, "max_new_tokens": 6, "fidelity": "answer", "warmup": 1}
# Of answers that do not decode alone, these are not known or differ
CLOCKS = ("ttft_s", "scoring_s", "decode_step_s", "peak_memory_bytes", "prefill_mfu")
# Float32 products of several tokens round otherwise
ROUNDED = ("kl", "answer_kl", "answer_log_likelihood", "gold_kl", "gold_log_likelihood")


def small(folder: Path, size: int, **changes: Any) -> Run:
    return prepare(small_config(folder / str(size), batch_size=size, **DEFAULTS | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a run of six examples whose answers decode alone, `1`, and two in batches, `2` and `8`.

    In the batches of two there are fewer answers than arms.
    """
    folder = tmp_path_factory.mktemp("runs")
    with failing_sometimes():
        for size in (1, 2, 8):
            measured(small(folder, size).config)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return small(folder, 1)


@pytest.fixture(scope="module")
def visits(folder: Path) -> dict[tuple[str, str], Visit]:
    return {visit.key: visit for visit in read_visits(folder / "1")}


def plain(visit: Visit) -> dict[str, Any]:
    """A visit without its clocks and its order, and with rounded divergences."""
    found = json.loads(visit.to_json())
    for answer in found["arms"].values():
        answer.pop("traceback", None)
        for name in CLOCKS:
            answer.pop(name, None)
        for name in ROUNDED:
            if answer.get(name) is not None:
                answer[name] = pytest.approx(answer[name], abs=1e-5)
    return found | {"order": sorted(found["order"])}


# ------------------------------------------------------------------------------------------ alone


def test_visit_tells_its_prompt_and_the_order_of_its_arms(run: Run, visits) -> None:
    assert [*visits] == [prompt.key for prompt in run.prompts]
    for number, (prompt, visit) in enumerate(zip(run.prompts, visits.values(), strict=True)):
        ids = ",".join(map(str, prompt.token_ids))
        assert visit.prompt_sha256 == hashlib.sha256(ids.encode()).hexdigest()
        assert (visit.prompt_tokens, visit.gold) == (
            len(prompt.token_ids),
            [*prompt.example.answers],
        )
        assert visit.prompt_end == prompt.text[-600:]
        assert list(visit.arms) == LABELS  # as in tables
        assert visit.order == [entry.label for entry in rotate(run.arms, number)]
        assert visit.kernel == "SDPA's flash for CPUs"
        ceiling = attention_ceiling(tiny()[0].config, visit.prompt_tokens)
        assert visit.attention_ceiling == ceiling


def test_answer_is_the_generation_of_its_arm(run: Run, visits) -> None:
    model, tokenizer = tiny()
    for prompt in run.prompts:
        for label, answer in visits[prompt.key].answers.items():
            method = run.methods[label, prompt.dataset.name]
            out = lazyllm.generate(model, prompt.as_input(), method, **prompt.options)
            assert answer.token_ids == out.token_ids
            assert answer.text == tokenizer.decode(out.token_ids, skip_special_tokens=True)
            assert (answer.kv_bytes, answer.aux_bytes) == (out.kv_bytes, out.aux_bytes)
            assert (
                np.repeat(answer.computed, answer.group_layers, 1).tolist() == out.computed.tolist()
            )
            assert answer.revived_tokens == out.revived.mean()
            n, first = len(prompt.token_ids), out.computed[0].tolist()
            assert answer.prefill_flops == method.first_token_flops(model.config, n, first)
            assert answer.ttft_s > 0
            assert len(answer.decode_step_s or ()) == len(out.token_ids) - 1
            assert (answer.kl is None) == (answer.same_answer is None) == (label == "baseline")


def test_failure_of_an_arm_is_its_own(run: Run, visits) -> None:
    failed = {key for key, visit in visits.items() if "fails" in visit.failures}
    expected = {prompt.key for prompt in run.prompts if sum(prompt.token_ids) % 3 == 0}
    assert failed == expected != {*visits}
    assert expected
    for key, visit in visits.items():
        assert visit.failures.keys() == ({"fails"} if key in failed else set())
        for failure in visit.failures.values():
            assert failure.error.startswith("RuntimeError: it fails here (runs.py:")
            assert "in fails_here" in failure.traceback


def test_keeping_everything_is_the_baseline(visits) -> None:
    for visit in visits.values():
        whole, baseline = visit.answers["whole"], visit.answers["baseline"]
        assert (whole.kl, whole.top1_agrees, whole.edit_similarity, whole.same_answer) == (
            0,
            1,
            1,
            1,
        )
        assert whole.leading_tokens == len(baseline.token_ids)
        # forced together: products of several tokens round by their place among them
        forced = (
            whole.answer_kl, whole.answer_log_likelihood, whole.gold_kl, whole.gold_log_likelihood,
        )  # fmt: skip
        assert forced == pytest.approx((0, 0, 0, 0), abs=1e-6)
        assert whole.prefill_flops == baseline.prefill_flops


@torch.inference_mode()
def logits_of(kept: list[int], ids: tuple[int, ...], answer: Any) -> Tensor:
    """[t, v] the model's logits before each token of an answer to the kept prompt tokens."""
    text = [*(ids[position] for position in kept), *answer[:-1]]
    return tiny()[0](torch.tensor([text])).logits[0, len(kept) - 1 :]


def test_forced_answers_are_those_of_whole_runs_of_the_model(run: Run, visits) -> None:
    """The baseline's own answer and the gold one, after the prompt and after its kept tokens."""
    model, tokenizer = tiny()
    for prompt in run.prompts:
        visit = visits[prompt.key]
        answer, baseline_ids = visit.answers["drop seed 1"], visit.answers["baseline"].token_ids
        method = run.methods["drop seed 1", prompt.dataset.name]
        selected = lazyllm.generate(model, prompt.as_input(), method, 1, ()).selected
        everything, kept = [*range(len(prompt.token_ids))], selected[0][0]
        assert len(kept) == -(-len(everything) // 2)
        gold = gold_token_ids(tokenizer, prompt.text, prompt.example.answers[0])
        gold = gold[: prompt.max_new_tokens]
        for token_ids, kl, log_likelihood in (
            (baseline_ids, answer.answer_kl, answer.answer_log_likelihood),
            (gold, answer.gold_kl, answer.gold_log_likelihood),
        ):
            theirs, ours = (
                logits_of(part, prompt.token_ids, token_ids) for part in (everything, kept)
            )
            expected = compared(theirs, ours, token_ids)
            assert expected[0] > 1e-5
            assert (kl, log_likelihood) == pytest.approx(expected, abs=2e-5)
        theirs, ours = (logits_of(part, prompt.token_ids, [0]) for part in (everything, kept))
        assert answer.kl == pytest.approx(compared(theirs, ours, [0])[0], abs=1e-5)
        assert answer.top1_agrees == int(theirs.argmax() == ours.argmax())


# -------------------------------------------------------------------------------------- in batches


@pytest.mark.parametrize("size", [2, 8])
def test_visits_in_batches_are_those_of_answers_alone_but_for_times(
    folder, visits, size: int
) -> None:
    batched = {visit.key: visit for visit in read_visits(folder / str(size))}
    assert batched.keys() == visits.keys()
    about = [read_about(folder / str(n) / "run.json")["identity"] for n in (1, size)]
    assert about[1] == about[0] | {"batch_size": size}
    for key, visit in batched.items():
        assert plain(visit) == plain(visits[key])
        for label, answer in visit.answers.items():  # all of one kind in a run
            assert answer.ttft_s > 0
            assert (answer.decode_step_s, answer.peak_memory_bytes) == (None, None)
            assert visits[key].answers[label].decode_step_s is not None


def test_first_tokens_of_a_visit_come_in_its_order_with_nothing_between(
    tmp_path, monkeypatch
) -> None:
    events: list[Any] = []
    batch = bench_module.Batch
    add, step = batch.add, batch.run
    monkeypatch.setattr(
        batch, "add", lambda self, row: [events.append(row.method), add(self, row)][1]
    )
    monkeypatch.setattr(batch, "run", lambda self: [events.append(None), step(self)][1])
    config = small_config(tmp_path, arms=ARMS[:2], batch_size=6, max_new_tokens=6)
    found = measured(config).visits
    methods = {
        label: method
        for (label, name), method in prepare(config).methods.items()
        if name == "lookup"
    }
    orders = [[methods[label] for label in visit.order] for visit in found]
    begun = [events[at : at + 3] for at, event in enumerate(events) if event is not None]
    for order in orders:  # one right after the other
        assert begun.count(order) >= orders.count(order)
    assert len([event for event in events if event is not None]) == 3 * len(found) == 18


def test_batch_that_lacks_memory_is_answered_one_arm_at_a_time(
    tmp_path: Path, visits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, generate = bench_module.Batch.run, bench_module.generate
    alone = dict[tuple[int, ...], list[Any]]()

    def run_out(batch: Any) -> Any:
        if len(batch.running) > 3:
            raise torch.OutOfMemoryError("no memory for 4 rows")
        return step(batch)

    def noted(model: Any, prompt: Any, method: Any, *given: Any, **settings: Any) -> Any:
        alone.setdefault(tuple(prompt.token_ids.tolist()), []).append(method)
        return generate(model, prompt, method, *given, **settings)

    monkeypatch.setattr(bench_module.Batch, "run", run_out)
    monkeypatch.setattr(bench_module, "generate", noted)
    few = small(tmp_path, 8, arms=[ARMS[0]], warmup=0)
    found = measured(few.config).visits
    # batches of eight rows, and of the four that are left
    reason = "start again, one arm at a time: OutOfMemoryError: no memory for 4 rows"
    assert caplog.text.count(reason) == 2
    assert len(found) == len(visits)
    ids = {prompt.key: prompt.token_ids for prompt in few.prompts}
    for visit in found:
        assert not visit.failures
        methods = [few.methods[label, visit.dataset] for label in visit.order]
        assert alone[ids[visit.key]] == methods
        for label, answer in plain(visit)["arms"].items():
            assert answer == plain(visits[visit.key])["arms"][label]
        for answer in visit.answers.values():
            assert answer.ttft_s > 0
            assert (answer.decode_step_s, answer.peak_memory_bytes) == (None, None)


def test_answer_that_cannot_begin_is_the_only_failure_of_its_batch(tmp_path, monkeypatch) -> None:
    """Its request is refused before it joins; `fails` above fails as it joins."""
    few = small(tmp_path, 8, arms=[ARMS[0]], warmup=0)
    lengths = {prompt.key: len(prompt.token_ids) for prompt in few.prompts}
    longest = max(lengths.values())

    def refusing(original: Any) -> Any:
        def refuse(model: Any, prompt: Any, method: Any, *given: Any, **settings: Any) -> Any:
            if method == Lazy({2: 0.5}) and len(prompt.token_ids) == longest:
                raise RuntimeError("this prompt fails")
            return original(model, prompt, method, *given, **settings)

        return refuse

    monkeypatch.setattr(bench_module, "generate", refusing(bench_module.generate))
    monkeypatch.setattr(bench_module.Bench, "_start", refusing(bench_module.Bench._start))
    found = measured(few.config).visits
    assert len(found) == len(lengths)
    for visit in found:
        failing = {"lazy"} if lengths[visit.key] == longest else set()
        assert visit.failures.keys() == failing
        assert visit.answers.keys() == {"baseline", "lazy"} - failing


def test_error_for_the_user_ends_a_run_of_batches(tmp_path: Path, monkeypatch) -> None:
    error = UserError("give another setting")
    monkeypatch.setattr(bench_module.Batch, "run", Mock(side_effect=error))
    with pytest.raises(UserError, match="give another setting"):
        measured(small_config(tmp_path, batch_size=4))


def test_rows_are_as_many_as_fit_into_memory() -> None:
    spec, methods = ModelSpec("llama2", dtype="bfloat16"), [Baseline(), Lazy()]
    model = Model.of(spec)
    row = sum(model.memory(Baseline(), 3500, 500).values()) - model.weights
    for gigabytes in (16, 24, 40, 80):
        rows, memory = (
            fitting_batch(None, spec, methods, 3500, 500, gigabytes * 1e9),
            gigabytes * 1e9,
        )
        assert 1 <= rows <= 8
        assert rows == 1 or model.weights + rows * 3500 * 32 * model.kv_bytes < memory
        assert rows == 8 or model.weights + (rows + 1) * row > 0.8 * memory
    assert fitting_batch(None, spec, methods, 3500, 500, None) == 1
    assert fitting_batch(16, spec, methods, 3500, 500, None) == 16
    assert fitting_batch(None, spec, [Unbatchable()], 3500, 500, 80e9) == 1
    with pytest.raises(UserError, match="batch_size=1"):
        fitting_batch(2, spec, [Unbatchable()], 3500, 500, 80e9)


def test_memory_is_for_the_longest_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = Mock(return_value=3)
    monkeypatch.setattr("eval.run.prepare.fitting_batch", fitting)
    model = {"name": "tiny", "dtype": "float32", "device": "cpu", "thinking_tokens": 700}
    run = prepare(small_config(None, dataset="needle", needle={"lengths": [300]}, model=model))
    assert run.batch_size == 3
    (*_, new_tokens, _) = fitting.call_args.args
    assert new_tokens == 2 + 700 == max(prompt.max_new_tokens for prompt in run.prompts)


# ---------------------------------------------------------------------------- order, scores, memory


@pytest.mark.parametrize("count", range(1, 8))
def test_each_arm_is_before_and_after_each_other_and_has_each_place_equally_often(
    count: int,
) -> None:
    arms = [arm(str(number), "baseline") for number in range(count)]
    orders = [[entry.label for entry in rotate(arms, number)] for number in range(2 * count)]
    assert all(sorted(order) == [entry.label for entry in arms] for order in orders)
    for first, second in (orders[n : n + 2] for n in range(0, 2 * count, 2)):  # in each two visits
        for label, other in combinations("".join(first), 2):
            before = second.index(label) < second.index(other)
            assert (first.index(label) < first.index(other)) != before
    places = Counter((label, place) for order in orders for place, label in enumerate(order))
    assert set(places.values()) == {2}
    assert len(places) == count**2


def test_warm_up_runs_each_arm_as_often_as_asked_and_briefly() -> None:
    model, tokenizer = tiny()
    arms = arm("baseline", "baseline"), arm("lazy", "lazy", schedule={2: 0.5})
    bench, prompt = bench_of(model, tokenizer, arms), prompt_of("lookup", tokenizer, 40)
    list(bench.visits([(prompt, arms)]))  # the model is checked once
    ran = Counter[bool]()
    hook = model.lm_head.register_forward_hook(lambda *_: ran.update([True]))
    bench.warm_up([prompt], 3)
    hook.remove()
    assert ran[True] == 1 + 2 * 3 * WARMUP_TOKENS  # the first prefill tells the kernel


def example(name: str) -> Prompt:
    """A prompt whose answers are scored, not generated."""
    row = Example(name, "row", "", "context", ("Emilia is angry.",), (), 5)
    return Prompt(row, DATASETS[name], "text", (1, 2), 9, True, max_new_tokens=40, end_ids=(2,))


def test_score_and_rouge_l_are_of_the_cleaned_text() -> None:
    text = "Assistant: Emilia is angry.\nWilliam is not."
    result = score_of(example("qasper"), text, CHAT_FORMATS["xgen"])
    assert result["text"] == " Emilia is angry.\nWilliam is not."
    assert result["score"] == pytest.approx(2 * 3 / (3 + 6))  # F1 by hand
    assert result["rouge_l"] is None
    assert score_of(example("qasper"), text, CHAT_FORMATS["none"])["text"] == text
    other = "\nEmilia is angry.\nand much else besides"
    summary = score_of(example("samsum"), other, CHAT_FORMATS["none"])
    # the first line only
    assert (summary["rouge_l"], summary["score"]) == (1, pytest.approx(1, abs=1e-4))
    for name, least in (("samsum", 1), ("qasper", 0), ("triviaqa", 0)):
        assert example(name).options["min_new_tokens"] == least


GPU = torch.device("cuda", 0)


class Draft:
    """Another model of 1,000 float32 numbers on the GPU."""

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(numel=lambda: 1000, element_size=lambda: 4, device=GPU)]

    def buffers(self) -> list[Any]:
        return []


def test_other_models_and_kept_prefills_count_in_no_others_peak(monkeypatch) -> None:
    peak = Mock(return_value=10_000)
    monkeypatch.setattr(other_models.HELPERS, "loaded", {(ModelSpec("tiny"), True): Draft()})
    monkeypatch.setattr(bench_module, "read_peak", peak)
    monkeypatch.setattr(bench_module, "reset_peak", Mock())
    drafted, plain = PromptCompression(0.5, scorer="tiny"), Lazy({2: 0.5})
    bench = bench_of(SimpleNamespace(device=GPU), None, [], forces_answers=True)
    assert (bench._peak(plain), bench._peak(drafted)) == (10_000 - 4000, 10_000)
    kept: list[Any] = []
    copy = SimpleNamespace(nbytes=500)
    bench._keep(drafted, kept, SimpleNamespace(fork=lambda: copy))
    peak.return_value = 10_300  # with the copy, after the prefill
    assert bench._peak(drafted) == 10_000  # of the prefill
    bench._peak_so_far = None  # another arm's answer begins
    assert (bench._peak(plain), bench._peak(drafted)) == (10_300 - 4000 - 500, 10_300 - 500)
    bench._forget([None, *kept])
    assert bench._peak(drafted) == 10_300


# -------------------------------------------------------------------- backends that build plans


@pytest.mark.parametrize("batch_size", [1, 6])
def test_no_timed_prefill_is_the_first_of_its_shapes(monkeypatch, batch_size: int) -> None:
    """Where a backend builds a plan for each new shape; of a draft's prefills too."""
    model, tokenizer = tiny()
    arms = [
        arm("baseline", "baseline"),
        arm("lazy", "lazy", schedule={2: 0.5}),
        arm("pyramid", "pyramidinfer"),
        arm("draft", "specprefill", keep=0.5, draft="tiny"),
    ]
    lazyllm.generate(model, [5, 6], Baseline(), 1, ())  # the model is checked once
    attend, backends, rehearse = F.scaled_dot_product_attention, decoder.backends, Bench._rehearse
    untimed, timed, early = Counter[Any](), Counter[Any](), list[Any]()
    state = {"decodes": False, "rehearses": False}

    def noted(*tensors: Any, **settings: Any) -> Any:
        shapes = tuple((tuple(tensor.shape), tensor.stride()) for tensor in tensors[:3])
        if not state["decodes"]:
            (untimed if state["rehearses"] else timed)[shapes] += 1
            early.extend({shapes} - untimed.keys())
        return attend(*tensors, **settings)

    @contextmanager
    def chosen(of: Any, devices: Any, decodes: bool) -> Iterator[None]:
        state["decodes"] = decodes
        with backends(of, devices, decodes):
            yield

    def rehearsing(bench: Bench, *given: Any) -> None:
        state["rehearses"] = True
        rehearse(bench, *given)
        state["rehearses"] = False

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for module in (decoder, session):
        monkeypatch.setattr(module, "backends", chosen)
    monkeypatch.setattr(Bench, "_rehearse", rehearsing)
    monkeypatch.setattr(bench_module, "builds_plans", lambda model, device: True)
    monkeypatch.setattr(other_models.HELPERS, "loaded", {})
    prompts = prepare(small_config(None, limit=2, dataset="lookup")).prompts
    planned = [(prompt, rotate(arms, number)) for number, prompt in enumerate(prompts)]
    made = [*bench_of(model, tokenizer, arms, batch_size=batch_size).visits(planned)]
    assert [list(visit.answers) for visit in made] == [[entry.label for entry in arms]] * 2
    assert len(timed) > len(arms)
    assert not early
    assert untimed >= timed  # so is the draft's check


@pytest.mark.parametrize("size", [1, 8])
def test_answers_are_forced_together(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_single(prefilled: Any, answers: Any) -> Any:
        assert len(prefilled) > 1
        return force(prefilled, answers)

    released = list[Any]()
    monkeypatch.setattr(answer_module, "force", refuse_single)
    monkeypatch.setattr(bench_module, "release_memory", released.append)
    arms = [ARMS[0], ARMS[2]]
    together = measured(small(tmp_path, size, arms=arms).config)
    assert (together.failed, len(together.visits), len(released)) == ({}, 6, 6)
    for visit in together.visits:
        others = [answer for label, answer in visit.answers.items() if label != "baseline"]
        assert len(others) == 3
        assert all(answer.answer_kl and answer.gold_kl for answer in others)
