"""lm-evaluation-harness: without pruning its own `hf`'s numbers, with pruning those of a slow,
obvious oracle.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lazyllm.errors import UserError

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from eval import cli
from eval.benchmarks.datasets import DATASETS, load
from eval.benchmarks.suite import DataSettings
from lazyllm.engine import generation
from lazyllm.engine.session import Session
from lazyllm.integrations import lm_eval
from lazyllm.integrations.lm_eval import PrunedLM
from lazyllm.methods import Lazy
from lazyllm.models.load import load_weights
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec
from tests.helpers import keep_gain
from tests.reference import lazy_reference

CPU = {"device": "cpu", "dtype": "float32"}
KEEPS_ALL = {"method": "lazy", "schedule": {3: 1.0, 5: 1.0}}
SCHEDULE = {2: 0.6, 5: 0.5}
CONTEXT = (
    "Ledger: entry sizin window wizard wagon. this late boat stood behind a. entry gurol "
    "olive.\nQuestion: entry sizin"
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three small tasks and their rows: nothing comes from the hub."""
    folder = tmp_path_factory.mktemp("tasks")
    docs = []
    examples = load(DATASETS["lookup"], DataSettings()).examples[:2]
    for number, row in enumerate(example.official for example in examples):
        choices = ["olive rosemary chalk", "jungle", "coral"]
        choices.insert(number, row["answers"][0])
        question = f"Ledger: {row['context']}\nQuestion: entry {row['input']}"
        doc = {
            "question": question,
            "choices": choices,
            "target": number,
            "answer": row["answers"][0],
        }
        docs.append(doc | {"page": row["context"][:300]})
    (folder / "rows.json").write_text("\n".join(map(json.dumps, docs)))
    data = {"data_files": {"test": str(folder / "rows.json")}, "cache_dir": str(folder / "cache")}
    common = {
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    until = {"until": ["\n", " wagon"], "max_gen_toks": 6, "do_sample": False}
    kinds: dict[str, tuple[dict[str, Any], list[str]]] = {
        "choice": (
            {
                "output_type": "multiple_choice",
                "doc_to_choice": "choices",
                "doc_to_target": "target",
            },
            ["acc", "acc_norm"],
        ),
        "answer": (
            {
                "output_type": "generate_until",
                "doc_to_target": "answer",
                "generation_kwargs": until,
            },
            ["exact_match"],
        ),
        "page": (
            {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "page"},
            ["word_perplexity", "byte_perplexity", "bits_per_byte"],
        ),
    }
    for name, (settings, metrics) in kinds.items():
        task = {"task": f"own_{name}", "metric_list": [{"metric": metric} for metric in metrics]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | settings | task))
    return folder


@pytest.fixture(scope="module")
def hf() -> HFLM:
    return HFLM(PRESETS["tiny"].source, batch_size=3, **CPU)


@pytest.fixture(scope="module")
def pruned() -> PrunedLM:
    return PrunedLM("tiny", "lazy", schedule=SCHEDULE, **CPU)


def evaluate(model: Any, tasks: Path) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = ["own_choice", "own_answer", "own_page"]
    found = simple_evaluate(
        model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    assert found is not None
    return found


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, argument, number) for number, argument in enumerate(arguments)]


def check(found: Any, expected: Any, tolerance: float) -> None:
    """Of (log-probability, whether greedy decoding gives it) of each request."""
    assert [log for log, _ in found] == pytest.approx([log for log, _ in expected], abs=tolerance)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.slow
def test_keeping_everything_gives_the_results_of_lm_evals_own_model(tasks: Path, hf: HFLM) -> None:
    ours = evaluate(PrunedLM("tiny", batch_size=8, **KEEPS_ALL, **CPU), tasks)
    theirs = evaluate(hf, tasks)
    assert set(ours["results"]) == {"own_choice", "own_answer", "own_page"}
    for task, metrics in theirs["results"].items():
        assert ours["results"][task] == {
            name: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            for name, value in metrics.items()
        }
        for sample, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            if task == "own_answer":
                assert sample["resps"] == other["resps"]
            elif task == "own_choice":
                check(sample["filtered_resps"], other["filtered_resps"], 2e-3)
            else:
                assert sample["filtered_resps"] == pytest.approx(other["filtered_resps"], rel=1e-4)
    # a wrong model would fail: the embedded task is solved, and its answers end at the stop string
    assert ours["results"]["own_choice"]["acc,none"] == 1
    assert all(sample["resps"][0][0].strip() for sample in ours["samples"]["own_answer"])


def test_too_long_requests_are_cut_as_lm_eval_cuts_them(hf: HFLM) -> None:
    ours = PrunedLM("tiny", max_length=24, **KEEPS_ALL, **CPU)
    theirs = HFLM(hf.model, tokenizer=hf.tokenizer, max_length=24)
    pairs = instances(
        "loglikelihood", (CONTEXT, " window wizard wagon"), (CONTEXT, " olive"), ("", "entry gurol")
    )
    check(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), 1e-3)
    # more than one window, and one
    texts = instances("loglikelihood_rolling", (CONTEXT,), (CONTEXT[:40],))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts), rel=1e-4
    )
    with pytest.raises(ValueError, match=r"a continuation has \d+ tokens, expected 1 to 24"):
        ours.loglikelihood(instances("loglikelihood", ("entry", CONTEXT)))


def forced_log(pruned: PrunedLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The oracle: numpy, token by token."""
    out = lazy_reference(pruned.model, context, SCHEDULE, len(continuation), forced=continuation)
    assert out.margin > 1e-6  # no selection hangs on rounding
    assert len(out.selected[0][2]) < len(context)
    logits = np.array(out.logits)
    logs = logits - logits.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
    greedy = logits.argmax(1).tolist() == continuation
    return float(logs[range(len(continuation)), continuation].sum()), greedy


def test_pruned_likelihoods_are_the_oracles(pruned: PrunedLM) -> None:
    continuations = [" window wizard wagon", " olive", " window", " coral cricket"]
    requests = instances(
        "loglikelihood", *((CONTEXT, continuation) for continuation in continuations)
    )
    found = pruned.loglikelihood(requests)
    context = pruned.tok_encode(CONTEXT)
    tokens = [pruned.tok_encode(CONTEXT + text)[len(context) :] for text in continuations]
    check(found, [forced_log(pruned, context, continuation) for continuation in tokens], 1e-3)
    other = PrunedLM("tiny", **KEEPS_ALL, **CPU).loglikelihood(requests)
    assert max(abs(ours[0] - theirs[0]) for ours, theirs in zip(found, other, strict=True)) > 1e-2


def test_pruned_answers_are_the_oracles_up_to_the_stop_string(pruned: PrunedLM) -> None:
    context = pruned.tok_encode(CONTEXT)
    out = lazy_reference(pruned.model, context, SCHEDULE, 6, eos_token_ids={2})
    assert out.margin > 1e-6
    whole = pruned.tok_decode(out.token_ids)
    stop = whole[3:5]
    requests = instances(
        "generate_until",
        (CONTEXT, {"until": ["never this"], "max_gen_toks": 6}),
        (CONTEXT, {"until": [stop], "max_gen_toks": 6, "temperature": 0.0, "top_p": 0.9}),
    )
    assert pruned.generate_until(requests) == [whole, whole.split(stop)[0]]


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of the prompts that were prefilled."""
    lengths: list[int] = []
    prefill = Session.prefill

    def counted(self: Session, token_ids: Any) -> Any:
        lengths.append(len(token_ids))
        return prefill(self, token_ids)

    monkeypatch.setattr(Session, "prefill", counted)
    return lengths


def test_continuations_share_a_prefill_as_far_as_they_can(
    pruned: PrunedLM, prefills: list[int]
) -> None:
    request = [(None, [5, 6, 7], continuation) for continuation in ([8], [9], [8, 9], [10])] + [
        (None, [5, 6], [7])
    ]
    found = pruned._loglikelihood_tokens(request)
    assert prefills == [3, 2]
    assert found[0] == pruned._loglikelihood_tokens([request[0]])[0]
    prefills.clear()
    pruned._loglikelihood_tokens(
        [(None, [5, 6, 7], continuation) for continuation in ([8, 9], [9, 8], [10])]
    )
    assert prefills == [3, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "nosuch"}, "'nosuch': the nearest names are"),
        ({"add_bos_token": True}, "'add_bos_token'; it has schedule"),
        ({"schedule": "9:0.7"}, "only 8 layers"),
        ({"schedule": "2:half"}, "schedule '2:half': expected .* 9:0.7"),
        ({"method": "prompt_compression", "keep": 0.5, "unit": "sentence"}, "the prompt's text"),
        ({"pretrained": "nosuch"}, "'nosuch'"),
        ({"dtype": "float8"}, "'float8'"),
        ({"device": "tpu9"}, "device 'tpu9'"),
    ],
)
def test_settings_are_refused_before_the_weights_load(
    monkeypatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(
        "lazyllm.models.load._checkpoint", lambda *_: pytest.fail("the weights were loaded")
    )
    with pytest.raises(UserError, match=message):
        PrunedLM(**({"pretrained": "tiny", "device": "cpu"} | settings))


@pytest.mark.parametrize(("gain", "dtype"), [(8.0, torch.bfloat16), (0.2, torch.float32)])
def test_dtype_of_a_checkpoint_on_a_cpu_is_the_faster_one(
    gain: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gain: how many times as fast a product is in bfloat16, as an earlier measurement would
    have left it.
    """
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    keep_gain(gain)
    folder = Path(shutil.copytree(PRESETS["tiny"].source, tmp_path / "half"))
    load_weights(ModelSpec("tiny", dtype="bfloat16", device="cpu")).save_pretrained(folder)
    model = PrunedLM(str(folder), "lazy", schedule=SCHEDULE, device="cpu")
    assert model.get_model_info()["model_dtype"] == model.model.dtype == dtype
    assert PrunedLM("tiny", "lazy", schedule=SCHEDULE, device="cpu").model.dtype == torch.float32


def test_requests_in_a_batch_give_what_each_gives_alone(
    pruned: PrunedLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched = PrunedLM("tiny", "lazy", schedule=SCHEDULE, batch_size="auto", **CPU)
    sizes, step_together = [], generation.step_together
    monkeypatch.setattr(
        generation,
        "step_together",
        lambda *arguments: sizes.append(len(arguments[1])) or step_together(*arguments),
    )
    contexts = [CONTEXT, CONTEXT[8:], CONTEXT[30:]]
    pairs = product(contexts, (" window wizard wagon", " olive", " coral cricket"))
    batches = [instances("loglikelihood", *pairs)]
    few = {"max_gen_toks": 6}
    for until in (["never this"], [" wagon"], ["a"]):
        batches.append(
            instances(
                "generate_until", *((context, {"until": until, **few}) for context in contexts)
            )
        )
    for requests in batches:
        kind = requests[0].request_type
        expected, found = getattr(pruned, kind)(requests), getattr(batched, kind)(requests)
        if kind == "generate_until":
            assert found == expected
        else:
            check(found, expected, 1e-4)
    assert max(sizes) == 6  # six longer continuations


def test_sampled_answers_are_those_of_hf_after_the_same_seed(hf: HFLM) -> None:
    keeps_all = PrunedLM("tiny", **KEEPS_ALL, **CPU)
    wanted = {"until": ["never this"], "max_gen_toks": 6, "do_sample": True, "temperature": 3.0}
    answers = []
    for lm in (keeps_all, hf):
        torch.manual_seed(7)
        answers.append(lm.generate_until(instances("generate_until", (CONTEXT, wanted))))
    assert answers[0] == answers[1]
    torch.manual_seed(8)
    assert keeps_all.generate_until(instances("generate_until", (CONTEXT, wanted))) != answers[0]


def test_command_writes_results(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --device, for which lm-eval's own default is a GPU; without its own tasks, which
    take 15 s to list.
    """
    monkeypatch.setattr(sys, "argv", ["lm-eval"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    arguments = [
        "--tasks",
        "own_choice",
        "--include_path",
        str(tasks),
        "--output_path",
        str(tmp_path),
        "--limit",
        "2",
    ]
    model = ["--model", "lazyllm", "--batch_size", "4"]
    lm_eval.main([*arguments, *model, "--model_args", "pretrained=tiny,method=lazy,schedule=2:0.6"])
    (file,) = tmp_path.rglob("results_*.json")
    assert file.parent.name == "tiny-lazy-schedule=2__0.6"
    written = json.loads(file.read_text())
    assert written["config"]["method"] == repr(Lazy("2:0.6"))
    assert 0 <= written["results"]["own_choice"]["acc,none"] <= 1
    with pytest.raises(UserError, match=r"^unknown method 'nosuch': the nearest names are"):
        lm_eval.main([*arguments, *model, "--model_args", "pretrained=tiny,method=nosuch"])


def test_command_is_refused_without_the_extra(
    monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lazyllm.integrations.lm_eval")
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert cli.main(["lm-eval", "--help"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: lm-evaluation-harness could not be imported")
    assert line.endswith("pip install 'lazyllm-bench[lm-eval]'")
