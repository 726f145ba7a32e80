"""The second turn of a session (`--turn`): its TTFT compared with its FLOPs and with transformers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.bench.case_table import markdown
from lazyllm.bench.clock import flops_of_rows, keep_ratios, read_clock
from lazyllm.engine.flops import prefill_flops
from lazyllm.engine.generation import Generation, start
from lazyllm.methods import Baseline, Method

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class TurnSample:
    """One session: seconds to the first token of its two turns, and their FLOPs.

    revived: tokens of the first turn that the second one revived, mean over layers.
    """

    prefill_s: float
    turn_s: float
    prefill_flops: int
    turn_flops: int
    revived: float

    def cost(self) -> float:
        """Seconds of the second turn, over the seconds of its FLOPs at the first turn's rate."""
        return self.turn_s / self.turn_flops * self.prefill_flops / self.prefill_s


@dataclass(frozen=True)
class TurnCase:
    """A method, or transformers itself, on a prompt of `tokens` and a second turn of `turn` tokens."""

    name: str
    tokens: int
    turn: int
    samples: list[TurnSample]
    baseline: list[TurnSample]  # in the same rounds

    def cost(self) -> float:
        """The median over the rounds."""
        return statistics.median(map(TurnSample.cost, self.samples))

    def beside(self, of: Callable[[TurnSample], float]) -> float:
        """The median over the rounds of the ratio `of(sample)` / `of(baseline's sample)`."""
        return statistics.median(of(own) / of(base) for own, base in zip(self.samples, self.baseline, strict=True))


@torch.inference_mode()
def measure_turns(
    model: PreTrainedModel, methods: Mapping[str, Method], prompt: Tensor, turn: Tensor, repeats: int, warmup: int
) -> list[TurnCase]:
    """Time the methods, the baseline and transformers' continuation of its KV cache, in rounds.

    prompt [n], turn [m]: tokens. Each round begins with another contender.
    """
    contenders = {"baseline": Baseline(), **methods, TRANSFORMERS: None}
    samples: dict[str, list[TurnSample]] = {name: [] for name in contenders}
    for number in range(warmup + repeats):
        names = list(contenders)
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            method = contenders[name]
            sample = _of_transformers(model, prompt, turn) if method is None else _of(model, method, prompt, turn)
            if number >= warmup:
                samples[name].append(sample)
    sizes = (len(prompt), len(turn))
    return [TurnCase(name, *sizes, of_name, samples["baseline"]) for name, of_name in samples.items()]


def _of(model: PreTrainedModel, method: Method, prompt: Tensor, turn: Tensor) -> TurnSample:
    with start(model, prompt, method) as session:
        began = read_clock(model.device)
        first = session.answer(None, 1, ())
        prefilled = read_clock(model.device)
        second = session.answer(turn, 1, ())
        turn_s = read_clock(model.device) - prefilled
    cuts = [cut for cut in keep_ratios(method, len(first.computed[0])) if cut < len(first.computed[0])]
    flops = prefill_flops(model.config, first.computed[0].tolist())
    of_turn = turn_flops(model, cuts, first, second, len(prompt), len(turn))
    return TurnSample(prefilled - began, turn_s, flops, of_turn, float(second.revived.mean()))


def _of_transformers(model: PreTrainedModel, prompt: Tensor, turn: Tensor) -> TurnSample:
    """A prefill, then the chosen token and the turn's after its KV cache; logits of the last token only."""
    began = read_clock(model.device)
    output = model(prompt[None].to(model.device), use_cache=True, logits_to_keep=1)
    token = output.logits[0, -1].argmax().cpu()
    prefilled = read_clock(model.device)
    rows = torch.cat([token[None], turn]).to(model.device)
    output = model(rows[None], past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
    output.logits[0, -1].argmax().cpu()
    turn_s = read_clock(model.device) - prefilled
    n, m, layers = len(prompt), len(turn), model.config.num_hidden_layers
    flops = prefill_flops(model.config, [n + m + 1] * layers) - prefill_flops(model.config, [n] * layers, logits=0)
    return TurnSample(prefilled - began, turn_s, prefill_flops(model.config, [n] * layers), flops, 0.0)


def turn_flops(
    model: PreTrainedModel, cuts: Sequence[int], first: Generation, second: Generation, n: int, m: int
) -> int:
    """FLOPs of a second turn of m tokens after n, from the selections; the first answer has one token.

    cuts: the layers after which a method selects. FLOPs are counted as in `prefill_flops`.
    """
    layers = model.config.num_hidden_layers
    flops = prefill_flops(model.config, [0] * layers)  # of the logits
    for begin, end in zip([0, *cuts], [*cuts, layers], strict=True):
        present = second.selected[0][begin] if begin else range(n + m + 1)
        stored = set(first.selected[0][begin]) if begin else set(range(n))
        rows = [position for position in present if position not in stored]
        flops += flops_of_rows(model.config, rows, present, end - begin)
    return flops


def turn_cases_of(report: Mapping[str, Any]) -> list[TurnCase]:
    """The cases of one JSON file of `--turn`."""
    samples = ("samples", "baseline")
    return [
        TurnCase(**{**case, **{key: [TurnSample(**sample) for sample in case[key]] for key in samples}})
        for case in report["cases"]
    ]


def table(cases: Sequence[TurnCase]) -> str:
    """Markdown: a row for each contender, prompt and turn."""
    return markdown(COLUMNS, cases)


COLUMNS: dict[str, Callable[[TurnCase], str]] = {
    "method": lambda case: case.name,
    "prompt": lambda case: f"{case.tokens:,}",
    "turn": lambda case: f"{case.turn:,}",
    "TTFT of the second turn, s": lambda case: f"{statistics.median(sample.turn_s for sample in case.samples):.3f}",
    "/ seconds of its FLOPs at the prefill's rate": lambda case: f"{case.cost():.3f}",
    "/ baseline's": lambda case: f"{case.beside(lambda sample: sample.turn_s):.3f}",
    "FLOPs / baseline's": lambda case: f"{case.beside(lambda sample: sample.turn_flops):.3f}",
    "tokens revived, mean over layers": lambda case: (
        f"{statistics.median(sample.revived for sample in case.samples):.0f}"
    ),
}
