"""Runs for tests: made as `python run.py ...` makes them, and a small one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from eval.arms import Arm
from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.datasets import DATASETS, load
from eval.benchmarks.prompts import Prompt, build_prompt
from eval.benchmarks.suite import DataSettings
from eval.compose import read
from eval.config import RunConfig, validated
from eval.run import loop
from eval.run.bench import Bench
from eval.run.check import check
from eval.run.prepare import Run, prepare
from eval.store.runs import StoredRun
from lazyllm.methods import StaticPruning

TINY = {"name": "tiny", "dtype": "float32", "device": "cpu", "max_prompt_tokens": 96}


def checked(*overrides: str) -> RunConfig:
    """The settings of `python run.py OVERRIDES`, once what can be refused without torch is."""
    config = read(overrides)
    check(config, Path("runs"))
    return config


def prepared(*overrides: str) -> Run:
    """The run that `python run.py OVERRIDES` would measure."""
    return prepare(checked(*overrides))


def small_config(out: Path | str | None, **changes: Any) -> RunConfig:
    """Three examples of each of two datasets, short prompts and answers, and a method."""
    settings: dict[str, Any] = dict(
        model=TINY,
        arms=[{"name": "lazy", "schedule": {2: 0.5}}],
        dataset=["lookup", "shots"],
        warmup=0,
        limit=3,
        max_new_tokens=2,
        threads=1,
        out=None if out is None else str(out),
    )
    return validated(settings | changes, RunConfig)


def measured(config: RunConfig, show: bool = False) -> StoredRun:
    """What `eval.run.loop.measure` returns of a run."""
    return loop.measure(prepare(config), show)


@contextmanager
def failing_sometimes() -> Iterator[None]:
    """Until the block ends, static pruning to a half fails at about every third prompt."""
    start = StaticPruning.start

    def fails_here(method: StaticPruning, decoder: Any, prompt: Any, max_new_tokens: int) -> Any:
        if method.keep == 0.5 and sum(prompt.token_ids.tolist()) % 3 == 0:
            raise RuntimeError("it fails here")
        return start(method, decoder, prompt, max_new_tokens)

    with patch.object(StaticPruning, "start", fails_here):
        yield


def compared(baseline: Any, method: Any, token_ids: Sequence[int]) -> tuple[float, float]:
    """Of logits [t, v]: KL(baseline || method) per token, and the log-likelihoods' difference."""
    import torch.nn.functional as F

    p, q = (logits.double().log_softmax(-1) for logits in (baseline, method))
    kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean()
    return kl.item(), (q - p)[range(len(token_ids)), token_ids].mean().item()


def prompt_of(dataset: str, tokenizer: Any, max_new_tokens: int) -> Prompt:
    """A dataset's first example, ready to be answered."""
    from dataclasses import replace

    loaded = load(DATASETS[dataset], DataSettings())
    prompt = build_prompt(loaded.examples[0], loaded.dataset, tokenizer)
    return replace(prompt, max_new_tokens=max_new_tokens, end_ids=(2,))


def bench_of(
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    baseline: str | None = "baseline",
    chat: ChatFormat | None = None,
    **settings: Any,
) -> Bench:
    """A bench of arms made by hand. settings: `batch_size`, `forces_answers`."""
    methods = {(arm.label, name): arm.sample() for arm in arms for name in DATASETS}
    return Bench(model, tokenizer, chat or ChatFormat(), arms, methods, baseline, **settings)


def arm(label: str, name: str, speedup: float | str | None = None, **hyperparameters: Any) -> Arm:
    """An arm."""
    return Arm(label, name, hyperparameters, speedup)
