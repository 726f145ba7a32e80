"""The second turn of a session (`--turn`): its TTFT compared with its FLOPs and with transformers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lazyllm.bench.case_table import markdown
from lazyllm.bench.clock import flops_of_rows, keep_ratios, read_clock
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.engine.generation import Generation, start
from lazyllm.methods import Baseline, Method

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class TurnSample:
    """One session: seconds to the first token of its two turns, and their FLOPs; those of attention apart.

    revived: tokens of the first turn that the second one revived, mean over layers.
    """

    prefill_s: float
    prefill_attention_s: float
    turn_s: float
    prefill_flops: int
    prefill_attention_flops: int
    turn_flops: int
    turn_attention_flops: int
    revived: float

    def cost(self) -> float:
        """Seconds of the second turn, over the seconds of its FLOPs at the first turn's rate."""
        return self.turn_s / self.turn_flops * self.prefill_flops / self.prefill_s

    def cost_by_kind(self) -> float:
        """`cost`, with attention and all else each at its own rate in the first turn."""
        attention = self.turn_attention_flops / self.prefill_attention_flops * self.prefill_attention_s
        others = (self.turn_flops - self.turn_attention_flops) / (self.prefill_flops - self.prefill_attention_flops)
        return self.turn_s / (attention + others * (self.prefill_s - self.prefill_attention_s))


@dataclass(frozen=True)
class TurnCase:
    """A method, or transformers itself, on a prompt of `tokens` and a second turn of `turn` tokens."""

    name: str
    tokens: int
    turn: int
    samples: list[TurnSample]
    baseline: list[TurnSample]  # in the same rounds

    def median(self, of: Callable[[TurnSample], float]) -> float:
        """The median over the rounds."""
        return statistics.median(map(of, self.samples))

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
        with AttentionClock(model.device) as attention:
            first = session.answer(None, 1, ())
        prefilled = read_clock(model.device)
        second = session.answer(turn, 1, ())
        turn_s = read_clock(model.device) - prefilled
    cuts = [cut for cut in keep_ratios(method, len(first.computed[0])) if cut < len(first.computed[0])]
    computed = first.computed[0].tolist()
    of_turn, attention_of_turn = turn_flops(model, cuts, first, second, len(prompt), len(turn))
    return TurnSample(
        prefilled - began,
        attention.seconds,
        turn_s,
        prefill_flops(model.config, computed),
        attention_flops(model.config, computed),
        of_turn,
        attention_of_turn,
        float(second.revived.mean()),
    )


def _of_transformers(model: PreTrainedModel, prompt: Tensor, turn: Tensor) -> TurnSample:
    """A prefill, then the chosen token and the turn's after its KV cache; logits of the last token only."""
    began = read_clock(model.device)
    with AttentionClock(model.device) as attention:
        output = model(prompt[None].to(model.device), use_cache=True, logits_to_keep=1)
    token = output.logits[0, -1].argmax().cpu()
    prefilled = read_clock(model.device)
    rows = torch.cat([token[None], turn]).to(model.device)
    output = model(rows[None], past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
    output.logits[0, -1].argmax().cpu()
    turn_s = read_clock(model.device) - prefilled
    config = model.config
    before, after = ([len(prompt) + later] * config.num_hidden_layers for later in (0, len(turn) + 1))
    return TurnSample(
        prefilled - began,
        attention.seconds,
        turn_s,
        prefill_flops(config, before),
        attention_flops(config, before),
        prefill_flops(config, after) - prefill_flops(config, before, logits=0),
        attention_flops(config, after) - attention_flops(config, before),
        0.0,
    )


class AttentionClock(TorchFunctionMode):
    """Context manager; `seconds` spent in SDPA, after which an accelerator is waited for; 0 for other attention."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.seconds = 0.0
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        began = read_clock(self._device)
        out = func(*args, **(kwargs or {}))
        self.seconds += read_clock(self._device) - began
        return out


def attention_flops(config: Any, tokens_per_layer: Sequence[int]) -> int:
    """The part of attention in `prefill_flops`."""
    products = sum(tokens_per_layer) * LayerShape.of(config).linear_flops
    return prefill_flops(config, tokens_per_layer, logits=0) - products


def turn_flops(
    model: PreTrainedModel, cuts: Sequence[int], first: Generation, second: Generation, n: int, m: int
) -> tuple[int, int]:
    """FLOPs of a second turn of m tokens after n, and the part of attention; the first answer has one token.

    cuts: the layers after which a method selects. FLOPs are counted as in `prefill_flops`, from the selections.
    """
    config, layers = model.config, model.config.num_hidden_layers
    flops = rows_run = 0
    for begin, end in zip([0, *cuts], [*cuts, layers], strict=True):
        present = second.selected[0][begin] if begin else range(n + m + 1)
        stored = set(first.selected[0][begin]) if begin else set(range(n))
        rows = [position for position in present if position not in stored]
        flops += flops_of_rows(config, rows, present, end - begin)
        rows_run += len(rows) * (end - begin)
    logits = prefill_flops(config, [0] * layers)
    return flops + logits, flops - rows_run * LayerShape.of(config).linear_flops


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
    "TTFT of the second turn, s": lambda case: f"{case.median(lambda sample: sample.turn_s):.3f}",
    "/ seconds of its FLOPs at the prefill's rate": lambda case: f"{case.median(TurnSample.cost):.3f}",
    "the same, attention at its own rate": lambda case: (
        f"{case.median(TurnSample.cost_by_kind):.3f}" if case.samples[0].prefill_attention_s else "-"
    ),
    "/ baseline's": lambda case: f"{case.beside(lambda sample: sample.turn_s):.3f}",
    "FLOPs / baseline's": lambda case: f"{case.beside(lambda sample: sample.turn_flops):.3f}",
    "tokens revived, mean over layers": lambda case: f"{case.median(lambda sample: sample.revived):.0f}",
}
