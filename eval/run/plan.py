"""The cost of a run or a sweep before it starts: jobs, tokens, FLOPs, bytes, memory, hours.

    lazyllm-bench plan model=llama2 method=lazy dataset=hotpotqa --gpu a100
    lazyllm-bench plan experiment=table1 model=llama2,xgen --gpu h100
    lazyllm-bench plan experiment=demo             # without hours

The arguments are those of a run or a sweep. Nothing is downloaded and no model runs: data and tokenizers are in the
caches (lazyllm-bench fetch). Prompts, FLOPs and bytes are counted, with the paired baseline, warm-ups, later turns and
other models; answers have their maximum length, and decoding has no revivals. Hours follow from one rate: half of the
FLOP/s and of the bytes per second in the GPU's data sheet.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from eval.run.config import compose_config, jobs_of, to_run_config
from eval.run.resolved import Resolved, build_method, later_turns, resolve
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Method
from lazyllm.spec import ModelSpec

RATE = 0.5  # the assumed share of a data sheet's FLOP/s and bytes per second
_BYTES = {"float64": 8, "float32": 4}  # of a number; 2 in all other dtypes
_QUANTISED_BYTES = {"int8": 1, "bnb_int8": 1, "int4": 0.5, "bnb_nf4": 0.5}


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes of weights, K and V that are read."""

    flops: int
    read: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.read + other.read)


@dataclass(frozen=True)
class Device:
    """A kind of GPU. flops_per_s, bytes_per_s: of its data sheet, dense bfloat16. gigabytes: its memory."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    gigabytes: float

    def seconds(self, work: Work) -> float:
        """Seconds at the assumed rate: of the computation or of the reading, whichever takes longer."""
        return max(work.flops / self.flops_per_s, work.read / self.bytes_per_s) / RATE


GPUS = {
    "h100": Device("H100", 989e12, 3.35e12, 80),
    "a100": Device("A100", 312e12, 2.04e12, 80),
    "rtx4090": Device("RTX 4090", 165e12, 1.01e12, 24),
    "l4": Device("L4", 121e12, 0.3e12, 24),
}


# --------------------------------------------------------------------------------------------------- cost of one prompt


@dataclass(frozen=True)
class Model:
    """A model's shapes (a transformers config), and the bytes of its weights."""

    spec: ModelSpec
    config: Any
    weights: int

    @classmethod
    @cache
    def of(cls, spec: ModelSpec) -> Model:
        """The shapes of a preset need no files. Raises UserError."""
        import torch  # this and others not at the top: planning refuses arguments before it imports torch
        from transformers import AutoModelForCausalLM

        from lazyllm.models.load import shape_of

        # the machine that plans may lack the run's devices
        config = shape_of(replace(spec, device="cpu", device_map=None, quantise=None))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        size, linear = _BYTES.get(spec.dtype, 2), LayerShape.of(config).linear_flops // 2 * config.num_hidden_layers
        others = sum(parameter.numel() for parameter in model.parameters()) - linear
        return cls(spec, config, int(others * size + linear * _QUANTISED_BYTES.get(spec.quantise or "", size)))

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        shape = LayerShape.of(self.config)
        return 2 * shape.kv_heads * shape.head_dim * _BYTES.get(self.spec.dtype, 2)

    def prefill(self, method: Method, n: int) -> Work:
        """The work on n prompt tokens up to the first new token, that of other models included."""
        return Work(method.first_token_flops(self.config, n), self.weights)

    def more(self, method: Method, n: int, since: int, m: int, passes: int = 1) -> Work:
        """The work on m more tokens over the stored ones, in one pass (a later turn) or one at a time (decoding).

        n: prompt tokens. since: tokens that ran since the prompt.
        """
        layers, shape = self.config.num_hidden_layers, LayerShape.of(self.config)
        before, after = (method.stored_per_layer(layers, n, later) for later in (since, since + m))
        flops = prefill_flops(self.config, after, passes) - prefill_flops(self.config, before, 0)
        linear = layers * m * shape.linear_flops + passes * 2 * shape.width * self.config.vocab_size
        # tokens whose K and V are read, in all layers: for each decoding step, or once for all tokens of a pass
        attended = (flops - linear) // shape.pair_flops if passes == m else sum(after)
        return Work(flops, passes * self.weights + attended * self.kv_bytes)

    def conversation(
        self, method: Method, messages: Sequence[int], new_tokens: int, turns: str = "continue"
    ) -> list[Work]:
        """Prefill, decoding, and the same of each later turn. messages: tokens of each, the prompt first.

        turns: as in `lazyllm.start`.
        """
        n, since, works = 0, 0, list[Work]()
        for turn, message in enumerate(messages):
            m = message + (turn > 0)  # the last token of the answer before runs with the message
            if turn > 0 and turns == "continue":
                works.append(self.more(method, n, since, m))
                since += m
            else:
                n, since = n + since + m, 0
                works.append(self.prefill(method, n))
            works.append(self.more(method, n, since, new_tokens - 1, passes=new_tokens - 1))
            since += new_tokens - 1
        return works

    def memory(self, method: Method, n: int, new_tokens: int) -> dict[str, int]:
        """Bytes of each part at the peak of a generation; "working" is one layer of the prefill besides its input."""
        shape, layers, size = LayerShape.of(self.config), self.config.num_hidden_layers, _BYTES.get(self.spec.dtype, 2)
        tokens = method.tokens_per_layer(layers, n)
        scores = 2 * shape.heads * tokens[0] ** 2 if self.spec.attn_implementation == "eager" else 0
        working = max(3 * tokens[0] * (shape.width + shape.mlp_width), scores)
        others = [Model.of(replace(other, dtype=self.spec.dtype)) for other in method.models()]
        held = [other.weights + n * other.config.num_hidden_layers * other.kv_bytes for other in others]
        return {
            "weights": self.weights,
            "other models": sum(held),
            "K and V": (sum(tokens) + layers * new_tokens) * self.kv_bytes,
            "Aux Cache": method.hidden_stored(layers, n) * shape.width * size,
            "working": working * size,
        }


# --------------------------------------------------------------------------------------------------------- cost of runs


@dataclass(frozen=True)
class Rows:
    """`count` rows of a dataset with messages of these numbers of tokens, the prompt first, and maximum answers."""

    dataset: str
    messages: tuple[int, ...]
    new_tokens: int
    count: int

    @property
    def length(self) -> int:
        """Tokens of the last turn's text."""
        return sum(self.messages) + (len(self.messages) - 1) * self.new_tokens


@dataclass(frozen=True)
class Cost:
    """The cost of one run, its paired baseline and warm-ups included.

    prompt_tokens, answer_tokens: sums over examples and their turns. longest: tokens of the longest prompt, with all
    turns. memory: bytes of each part, at the longest prompt. seconds: 0 without a device.
    """

    run: str
    examples: int
    prompt_tokens: int
    longest: int
    answer_tokens: int
    method: Work
    baseline: Work
    memory: dict[str, int]
    seconds: float

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def rows_of(run: Resolved) -> list[Rows]:
    """The run's rows, the first example's first. Raises UserError if data or tokenizer are not in the caches."""
    from eval.run.prepare import prepare

    here = replace(run.config.model, device="cpu", quantise=None, device_map=None)
    try:
        cases = prepare(run.changed(model=here, method={"name": "baseline"}, compare={}, only=None)).cases
    except UserError as error:
        raise UserError(f"{error}. A plan counts the run's own prompts: lazyllm-bench fetch gets them") from error
    messages = [tuple(len(part.token_ids) for part in (case.prompt, *case.prompt.turns)) for case in cases]
    names, limits = [case.dataset.name for case in cases], [case.max_new_tokens for case in cases]
    return [Rows(*key, count) for key, count in Counter(zip(names, messages, limits, strict=True)).items()]


def cost(run: Resolved, rows: Sequence[Rows], device: Device | None) -> Cost:
    """The cost of one run. rows: of `rows_of`. Raises UserError, as the run would."""
    from eval.run.measure import WARMUP_TOKENS
    from eval.run.prepare import parameters_of
    from eval.store.runs import label_of, settings_in

    model = Model.of(run.spec)
    methods: dict[str, Method] = {
        name: build_method(settings) for name, settings in parameters_of(run, model.config).items()
    }
    sides = [(methods, later_turns(run.method))]
    if run.config.timing.paired and run.method["name"] != "baseline":
        sides.append((dict.fromkeys(methods, Baseline()), "continue"))
    first = rows[0]
    warm_up = Rows(first.dataset, first.messages[:1], min(WARMUP_TOKENS, first.new_tokens), run.config.timing.warmup)
    longest = {row.dataset: row for row in sorted(rows, key=lambda row: row.length)}.values()
    works, seconds, peaks = [Work(0, 0), Work(0, 0)], 0.0, []
    for side, (by_dataset, turns) in enumerate(sides):
        for row in (*rows, warm_up):
            for work in model.conversation(by_dataset[row.dataset], row.messages, row.new_tokens, turns):
                works[side] += Work(row.count * work.flops, row.count * work.read)
                seconds += row.count * device.seconds(work) if device is not None else 0
        peaks += [model.memory(by_dataset[row.dataset], row.length, row.new_tokens) for row in longest]
    return Cost(
        run=f"{Path(run.spec.name).name}, {label_of(run.method['name'], settings_in(run.method))}",
        examples=sum(row.count for row in rows),
        prompt_tokens=sum(row.count * sum(row.messages) for row in rows),
        longest=max(sum(row.messages) for row in rows),
        answer_tokens=sum(row.count * len(row.messages) * row.new_tokens for row in rows),
        method=works[0],
        baseline=works[1],
        memory=max(peaks, key=lambda parts: sum(parts.values())),
        seconds=seconds,
    )


def costs(arguments: Sequence[str], device: Device | None) -> list[Cost]:
    """The cost of each run of the arguments. Raises UserError.

    Runs that cannot reach their target speedup are left out, with a line in the log.
    """
    whole = [argument for argument in arguments if not argument.startswith("shard=")]
    jobs = [resolve(to_run_config(compose_config(job))) for job in jobs_of(whole)]
    from eval.run.prepare import within_reach

    known: dict[str, list[Rows]] = {}  # by settings: the runs of a sweep share their prompts
    planned = []
    for job in jobs:
        key = repr(replace(job.config, method={}, compare={}, only=None))
        for run in within_reach(job).values():
            rows = known[key] = known.get(key) or rows_of(run)
            planned.append(cost(run, rows, device))
    if not planned:
        raise UserError("no run reaches its speedup on this model: give a lower one")
    return planned


# --------------------------------------------------------------------------------------------------------- command line


def as_text(planned: Sequence[Cost], device: Device | None) -> str:
    """A Markdown table, and the assumptions below it."""
    from eval.analysis.table import markdown_lines  # not at the top: it imports pandas

    headings = ["run", "examples", "prompt tokens", "longest", "answer tokens", "PFLOP", "of baseline"]
    headings += ["TB read", "of baseline", "GB", "hours"]
    rows = [
        [
            *(one.run, str(one.examples), f"{one.prompt_tokens:,}", f"{one.longest:,}", f"{one.answer_tokens:,}"),
            *(f"{work.flops / 1e15:.4g}" for work in (one.method, one.baseline)),
            *(f"{work.read / 1e12:.4g}" for work in (one.method, one.baseline)),
            *(f"{one.peak / 1e9:.3g}", "?" if device is None else f"{one.seconds / 3600:.2g}"),
        ]
        for one in planned
    ]
    largest = max(planned, key=lambda one: one.peak)
    parts = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in largest.memory.items() if size)
    lines = [
        *markdown_lines(headings, rows, 1),
        "",
        f"most memory: {largest.peak / 1e9:.3g} GB ({parts}), {largest.run}; Python and torch take more",
    ]
    if device is None:
        return "\n".join([*lines, f"{len(planned)} runs; for hours, give --gpu {', '.join(GPUS)}"])
    rates = f"{device.flops_per_s / 1e12:.0f} TFLOP/s and {device.bytes_per_s / 1e12:.3g} TB/s"
    hours = sum(one.seconds for one in planned) / 3600
    lines.append(f"{len(planned)} runs, {hours:.2g} hours one after the other at {RATE:.0%} of {device.name}'s {rates}")
    if largest.peak > 0.95e9 * device.gigabytes:
        lines.append(
            f"does not fit into {device.gigabytes:.0f} GB: try model.quantise=int8, a smaller "
            "model.max_prompt_tokens, method.aux_device=cpu (lazy), or model.device_map=auto"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb `plan`. Returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="lazyllm-bench plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="*", metavar="KEY=VALUE", help="as of lazyllm-bench run")
    parser.add_argument("--gpu", choices=GPUS, help="for hours on this GPU")
    parser.add_argument("-m", action="store_true", help="no effect: all jobs of a sweep are planned anyway")
    options = parser.parse_intermixed_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's client is imported: planning downloads nothing
    device = GPUS.get(options.gpu)
    print(as_text(costs(options.run, device), device))
    return 0
