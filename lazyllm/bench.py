"""Time methods on random weights: against the baseline, against their FLOPs, and against transformers.

One process makes a model of random weights and a random prompt. The baseline and a method take turns token by token, so
a slow spell of the machine slows both; both KV caches are in memory. Ratios are taken within such a pair; the table
shows their median and quartiles. With one CPU thread, seconds are the process's CPU time.

    lazyllm-bench bench --shape llama-1b --threads 1 --tokens 2000 --new-tokens 33 --method paper --against hf
    lazyllm-bench bench --shape layers=16,width=1024 --dtype float32 --method '{2: 0.4, 5: 0.5}' --json out.json
    lazyllm-bench bench --field --threads 1 --tokens 2000 4000 --new-tokens 9 --repeats 2
    lazyllm-bench bench --turn 64 256 --threads 1 --tokens 2000 --repeats 5 --against hf

A method is a schedule: `paper` (Figure 4's), `none`, `keep1` (Figure 4's layers, keep ratio 1), or
{layer: keep ratio, ...}. Random weights attend to all tokens alike, so LazyLLM revives in nearly every step until
nothing is left to revive. --field times all methods instead, each at the ideal speedups that it reaches.

--against hf also times transformers' own `generate(...)` and then `model(...)`, before a generation of the baseline.
--turn times the second turn of a conversation: N tokens after the prompt and an answer of one token. The two turns of a
pair run one after the other; transformers continues from its KV cache.

Columns: "ideal" is the TTFT speedup by FLOPs. "baseline's MFU" is model FLOPs utilisation: FLOPs / TTFT over the
device's peak, on a CPU over the rate of a matrix product. "without revival" compares the steps in which LazyLLM
revives nothing, "whole" the whole generation. "revived" counts tokens, mean over layers. "stored" is the KV and Aux
Cache after the prefill, over the baseline's KV: of stored tokens, and of those that may be revived. Room for more
tokens is in the peaks of memory alone. These are beyond the weights; the last one is the baseline's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lazyllm.engine.flops import LayerShape, prefill_flops, windows_of
from lazyllm.engine.inputs import Prompt
from lazyllm.errors import UserError, parser_of, require
from lazyllm.files import write_whole
from lazyllm.machine import LONG, device_name, git_commit, machine_warnings
from lazyllm.methods import METHODS, Baseline, Lazy, Method, make
from lazyllm.methods.support.schedule import Schedule
from lazyllm.presets import fields_of
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

Selected = dict[int, list[int]]  # {pruning layer: positions of the tokens that enter the next layer}


@dataclass(frozen=True)
class Run:
    """One generation, or the second turn of a conversation.

    step_s: seconds of each decoding step; of transformers' `generate` only the mean step is known.
    flops: up to the first token, scoring included (`lazyllm.engine.flops`).
    mfu: model FLOPs utilisation up to the first token (`lazyllm.measuring.utilisation`); None if the peak is unknown.
    revived: prompt tokens that each step computed, mean over layers; empty for transformers.
    kv_bytes, aux_bytes: as in `lazyllm.Generation`, after the prefill; 0 for transformers, and for a second turn.
    """

    token_ids: list[int]
    ttft_s: float
    step_s: list[float]
    total_s: float
    flops: int
    revived: list[float]
    kv_bytes: int = 0
    aux_bytes: int = 0
    mfu: float | None = None


@dataclass(frozen=True)
class Pair:
    """Two runs on the same prompt: in turns token by token, or one after the other."""

    baseline: Run
    other: Run

    def ttft_speedup(self) -> float:
        return self.baseline.ttft_s / self.other.ttft_s

    def step_ratio(self) -> float | None:
        """The mean step over the baseline's mean step; None if only one token was generated."""
        if not self.other.step_s:
            return None
        return statistics.fmean(self.other.step_s) / statistics.fmean(self.baseline.step_s)

    def idle_step_ratio(self) -> float | None:
        """The median of (seconds / seconds of the baseline's same step) over the steps that revive nothing, if any."""
        steps = zip(self.other.step_s, self.baseline.step_s, self.other.revived, strict=False)
        ratios = [seconds / of_baseline for seconds, of_baseline, revived in steps if not revived]
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True)
class BenchCase:
    """A method, or transformers itself ("hf"), against the baseline. turn: tokens of the second turn; 0 without one.

    peak, baseline_peak: bytes that a generation takes beyond the weights if it runs alone; None if unknown.
    """

    name: str
    tokens: int
    turn: int
    new_tokens: int
    pairs: list[Pair]
    peak: int | None
    baseline_peak: int | None


# {heading: (whether quartiles are shown, quantity)}
COLUMNS: dict[str, tuple[bool, Callable[[Pair], float | None]]] = {
    "TTFT, s": (False, lambda pair: pair.other.ttft_s),
    "TTFT speedup": (True, Pair.ttft_speedup),
    "ideal": (False, lambda pair: pair.baseline.flops / pair.other.flops),
    "share of ideal": (False, lambda pair: pair.ttft_speedup() * pair.other.flops / pair.baseline.flops),
    "baseline's MFU, %": (False, lambda pair: None if pair.baseline.mfu is None else 100 * pair.baseline.mfu),
    "step / baseline's": (True, Pair.step_ratio),
    "without revival": (False, Pair.idle_step_ratio),
    "whole / baseline's": (True, lambda pair: pair.other.total_s / pair.baseline.total_s),
    "revived": (False, lambda pair: sum(pair.other.revived)),
    "stored": (
        False,
        lambda pair: (pair.other.kv_bytes + pair.other.aux_bytes) / (pair.baseline.kv_bytes or 1) or None,
    ),
}
HEADINGS = ("method", "prompt", "turn", "new", *COLUMNS, "peak, GB", "baseline's")
WIDTHS = [24, 6, 6, 6, *(22 if quartiles else len(heading) for heading, (quartiles, _) in COLUMNS.items()), 8, 10]


def row(cells: Iterable[str]) -> str:
    """A row of the Markdown table."""
    return f"| {' | '.join(map(str.rjust, cells, WIDTHS))} |"


def cells_of(case: BenchCase) -> list[str]:
    """A case's row: medians over the pairs, of ratios with quartiles; "-" for what no pair has."""
    cells = [case.name, *map(str, (case.tokens, case.turn, case.new_tokens))]
    for has_quartiles, quantity in COLUMNS.values():
        values = [value for pair in case.pairs if (value := quantity(pair)) is not None]
        cells.append(f"{statistics.median(values):.4g}" if values else "-")
        if has_quartiles and len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
            cells[-1] += f" [{low:.4g}, {high:.4g}]"
    return [*cells, *("-" if peak is None else f"{peak / 1e9:.4g}" for peak in (case.peak, case.baseline_peak))]


def main(arguments: Sequence[str]) -> None:
    """The command `bench`. Raises UserError, for bad arguments before torch is imported."""
    options = parser().parse_args(arguments)
    spec = ModelSpec(
        options.shape, "dummy", options.dtype, options.device, attn_implementation=options.attention, seed=options.seed
    )
    spec.check()
    counts = {"--tokens": options.tokens, "--new-tokens": options.new_tokens, "--turn": options.turn}
    for name, numbers in (counts | {"--repeats": [options.repeats]}).items():
        require(all(number > 0 for number in numbers), name, " ".join(map(str, numbers)), "1 or more")
    if options.field and (options.method or options.against or options.turn):
        raise UserError("--field times all methods: leave out --method, --against and --turn")
    fields, named = fields_of(options.shape), dict[str, Method]()
    for text in options.method or ["paper"]:
        try:
            schedule = Schedule.parse("paper" if text == "keep1" else text, fields["num_hidden_layers"])
        except (ValueError, TypeError) as error:
            raise UserError(f"--method {text}: {error}") from error
        named[text] = Lazy(Schedule(dict.fromkeys(schedule.keep, 1.0)) if text == "keep1" else schedule)

    import torch  # after the arguments are checked, as it takes seconds
    from transformers import AutoConfig

    from lazyllm.engine.checks import check_same_as_model
    from lazyllm.measuring import attention_events, attention_kernel
    from lazyllm.models.load import as_device, random_weights

    device = as_device(options.device)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    fields["max_position_embeddings"] = max(tokens + turn + 1 + new for tokens, turn, new in _sizes(options))
    config = AutoConfig.for_model(**fields)
    about: dict[str, Any] = {
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "commit": git_commit(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    cases = measured_before(options.json, about)
    with TemporaryDirectory() as draft:
        if options.field:
            save_draft(config, spec, draft)
        contenders = {n: field(config, n, options.speedups, draft) if options.field else named for n in options.tokens}
        model = random_weights(config, spec).eval()
        about_model = f"{options.shape}, {options.dtype}, {model.get_memory_footprint() / 1e9:.2f} GB of weights"
        check_same_as_model(model)
        print(f"{about_model}, on {about['device']}, {about['threads']} CPU thread(s)", flush=True)
        prompt = torch.randint(0, config.vocab_size, (min(1000, *options.tokens),))
        events = attention_events(lambda: in_turns(model, [Baseline()], prompt, 1))
        about["attention_kernel"] = attention_kernel(events)
        print(f"the baseline's attention kernel, by its operators: {about['attention_kernel']}")
        print("", row(HEADINGS), row(f"{'-' * (width - 1)}:" for width in WIDTHS), sep="\n")
        print(*(row(cells_of(case)) for case in cases), sep="\n", end="\n" if cases else "")
        for case in measure(options, model, contenders, tuple(cases)):
            cases.append(case)
            print(row(cells_of(case)), flush=True)
            if options.json:
                write_whole(options.json, json.dumps({**about, "cases": list(map(asdict, cases))}) + "\n")
    long = [pair.baseline.mfu for case in cases if case.tokens >= LONG for pair in case.pairs]
    least = min((100 * mfu for mfu in long if mfu is not None), default=math.nan)
    signs = machine_warnings(about["device"], [about["attention_kernel"]], least, options.dtype)
    print(*(f"Caution: {sign}." for sign in signs), sep="\n")


def measured_before(file: Path | None, about: Mapping[str, Any]) -> list[BenchCase]:
    """The cases in the file of an interrupted call; none if its settings, device or versions were others."""
    if file is None or not file.is_file():
        return []
    held = json.loads(file.read_text(encoding="utf-8"))
    if {key: held.get(key) for key in about} != json.loads(json.dumps(about)):
        return []
    return [case_of(case) for case in held["cases"]]


def case_of(fields: Mapping[str, Any]) -> BenchCase:
    """A case as it stands in the file."""
    pairs = [Pair(Run(**pair["baseline"]), Run(**pair["other"])) for pair in fields["pairs"]]
    return BenchCase(**{**fields, "pairs": pairs})


def measure(
    options: Any, model: PreTrainedModel, contenders: dict[int, dict[str, Method]], before: Sequence[BenchCase] = ()
) -> Iterator[BenchCase]:
    """Each method, and transformers, against the baseline; not cases `before`. contenders: {tokens: {name: method}}."""
    import torch

    draw = torch.Generator().manual_seed(options.seed)
    done = {(case.name, case.tokens, case.turn, case.new_tokens) for case in before}
    for tokens, turn, new_tokens in _sizes(options):
        text = torch.randint(0, model.config.vocab_size, (tokens + turn,), generator=draw)
        prompt, later = text[:tokens], text[tokens:]
        peak = None if turn else peak_alone(model, Baseline(), prompt, new_tokens)
        named: dict[str, Method | None] = {**contenders[tokens], **({"hf": None} if options.against else {})}
        for name, method in named.items():
            if (name, tokens, turn, new_tokens) in done:
                continue
            own_peak = None if turn or method is None else peak_alone(model, method, prompt, new_tokens)
            pairs = []
            for number in range(options.warmup + options.repeats):
                # transformers goes first (`in_turns`), and its prefill last of all: next to the baseline's prefill
                baseline_first = number % 2 == 0 and method is not None
                order = [Baseline(), method] if baseline_first else [method, Baseline()]
                if turn:
                    runs = [second_turn(model, contender, prompt, later) for contender in order]
                else:
                    runs = in_turns(model, order, prompt, new_tokens)
                if number >= options.warmup:
                    pairs.append(Pair(*(runs if baseline_first else runs[::-1])))
            yield BenchCase(name, tokens, turn, new_tokens, pairs, own_peak, peak)


def in_turns(model: PreTrainedModel, methods: Sequence[Method | None], prompt: Tensor, new_tokens: int) -> list[Run]:
    """Continue the prompt [n] by each method: all first tokens, then all second tokens, and so on.

    None is transformers itself, which runs to its end before the others. The others' KV caches are in memory at once.
    Raises FloatingPointError if logits are not finite.
    """
    import torch

    from lazyllm.engine.decoder import open_decoder
    from lazyllm.engine.generation import Greedy, Request, advance, begin
    from lazyllm.measuring import utilisation

    def token_by_token(method: Method) -> Iterator[Run | None]:
        """Generate as `lazyllm.generate` does, a token at each `next`; the last one gives the run, the others None."""
        request = Request(Prompt(prompt), method, new_tokens, Greedy())
        ttft_s, generation = timed(model, lambda: begin(decoder, request))
        session, step_s = generation.session, list[float]()
        ttft_s -= session.scoring.uncounted_s
        held = session.kv_bytes, session.aux_bytes
        while not generation.is_done:
            yield None
            seconds, _ = timed(model, lambda: advance([generation]))
            step_s.append(seconds)
        computed = generation.result().computed
        revived = (computed[1:] - computed[:-1]).mean(axis=1).tolist()
        flops = method.first_token_flops(model.config, len(prompt), computed[0].tolist())
        mfu = utilisation(model, flops, ttft_s)
        yield Run(generation.token_ids, ttft_s, step_s, ttft_s + sum(step_s), flops, revived, *held, mfu)

    first = [_transformers(model, prompt, new_tokens) for method in methods if method is None]
    for method in filter(None, methods):
        method.prepare(model)
    with torch.inference_mode(), open_decoder(model) as decoder:
        generations = [token_by_token(method) for method in methods if method is not None]
        for generation in generations * (new_tokens - 1):
            next(generation)
        return first + [run for run in map(next, generations) if run is not None]


def peak_alone(model: PreTrainedModel, method: Method, prompt: Tensor, new_tokens: int) -> int | None:
    """The peak memory of a generation in bytes, beyond what was held before; None if it is unknown."""
    from lazyllm.measuring import read_peak, release_memory, reset_peak

    release_memory(model.device)
    reset_peak(model.device)
    before = read_peak(model.device)
    in_turns(model, [method], prompt, new_tokens)
    peak = read_peak(model.device)
    return None if peak is None or before is None else peak - before


def timed(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of a call."""
    from lazyllm.measuring import read_work_clock

    began = read_work_clock(model.device)
    result = call()
    return read_work_clock(model.device) - began, result


def next_token(model: PreTrainedModel, text: Tensor, cache: Any = None) -> tuple[Any, list[int]]:
    """(KV cache, the next token) by transformers' `model(...)` after a text [1, k], logits of the last token only."""
    out = model(text.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.past_key_values, out.logits[0].argmax(-1).tolist()


def _transformers(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> Run:
    """The mean step of `model.generate`, then the prefill by `model(...)`."""
    import torch

    token_ids = prompt[None].to(model.device)

    def generate(count: int) -> list[int]:
        options = dict(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        return model.generate(token_ids, **options)[0, len(prompt) :].tolist()  # type: ignore[operator]

    flops = prefill_flops(model.config, [len(prompt)] * model.config.num_hidden_layers)
    with torch.inference_mode():
        if new_tokens == 1:
            ttft_s, (_, tokens) = timed(model, lambda: next_token(model, token_ids))
            return Run(tokens, ttft_s, [], ttft_s, flops, [])
        whole_s, tokens = timed(model, lambda: generate(new_tokens))
        first_s, _ = timed(model, lambda: generate(1))
        ttft_s, _ = timed(model, lambda: next_token(model, token_ids))
    return Run(tokens, ttft_s, [(whole_s - first_s) / (new_tokens - 1)], whole_s, flops, [])


def second_turn(model: PreTrainedModel, method: Method | None, prompt: Tensor, turn: Tensor) -> Run:
    """The first token after a turn [m] that follows a prompt [n] and an answer of one token; None is transformers."""
    import torch

    from lazyllm.engine.generation import start

    before, after, revived = Selected(), Selected(), 0.0
    if method is None:
        with torch.inference_mode():
            cache, token = next_token(model, prompt[None])
            text = torch.tensor([[*token, *turn.tolist()]])
            seconds, (_, token_ids) = timed(model, lambda: next_token(model, text, cache))
    else:
        with start(model, prompt, method) as conversation:
            before = conversation.answer(None, 1, ()).selected[0]
            seconds, second = timed(model, lambda: conversation.answer(turn, 1, ()))
        token_ids, after, revived = second.token_ids, second.selected[0], float(second.revived.mean())
    flops = turn_flops(model.config, before, after, len(prompt), len(turn))
    return Run(token_ids, seconds, [], seconds, flops, [revived])


def turn_flops(config: Any, first: Selected, second: Selected, n: int, m: int) -> int:
    """FLOPs of a second turn of m tokens, after n prompt tokens and one answer token, counted as in `prefill_flops`.

    A layer runs the tokens of the second turn's selection that it did not store in the first turn. Each attends to the
    selection up to itself; in a layer with a sliding window, to the last tokens of that.
    """
    layers, shape = config.num_hidden_layers, LayerShape.of(config)
    flops = prefill_flops(config, [0] * layers)  # the logits
    for begin, end in pairwise([0, *(cut for cut in second if cut < layers), layers]):
        present = second[begin] if begin else range(n + m + 1)
        stored = set(first[begin]) if begin else set(range(n))
        places = [place for place, position in enumerate(present, start=1) if position not in stored]
        for window in windows_of(config)[begin:end]:
            pairs = sum(min(place, window or place) for place in places)
            flops += len(places) * shape.linear_flops + pairs * shape.pair_flops
    return flops


def field(config: Any, n: int, speedups: Sequence[float], draft: str) -> dict[str, Method]:
    """Every method at each ideal TTFT speedup that it reaches on n prompt tokens; without `target_parameter`, once."""
    needed: dict[str, dict[str, Any]] = {  # settings beside `target_parameter`; all others are the authors' defaults
        "asl": {"threshold": 1e9},  # on random weights ranks never settle: cut at the earliest layer
        "prompt_compression": {"keep": 0.5, "unit": "token"},
        "specprefill": {"draft": draft},
        "static_pruning": {"layer": max(1, config.num_hidden_layers * 3 // 10)},
    }
    methods: dict[str, Method] = {}
    for name, kind in METHODS.items():
        settings, parameter = needed.get(name, {}), kind.target_parameter
        if kind is Baseline or kind.diagnostic:
            continue
        if parameter is None:
            methods[name] = make(name, settings)
            continue
        for target in speedups:
            if (value := kind.solve(settings, config, n, target)) is not None:
                methods[f"{name} {target:g}x"] = make(name, settings | {parameter: value})
    return methods


def save_draft(config: PreTrainedConfig, spec: ModelSpec, folder: str) -> None:
    """Save a draft with random weights: a quarter of the model's layers, half as wide."""
    from lazyllm.models.load import random_weights

    halved = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = {name: max(1, getattr(config, name) // 2) for name in halved}
    sizes |= {"num_hidden_layers": max(1, config.num_hidden_layers // 4), "layer_types": None}
    random_weights(type(config)(**(config.to_dict() | sizes)), spec).save_pretrained(folder)


def _sizes(options: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """(prompt tokens, tokens of the second turn, new tokens) of every measurement."""
    return product(options.tokens, options.turn or [0], [1] if options.turn else options.new_tokens)


def parser() -> argparse.ArgumentParser:
    parser = parser_of("bench", __doc__)
    add = parser.add_argument
    add("--shape", default="llama-1b", help="a model's short name, or sizes: layers=16,width=1024,...")
    add("--dtype", default="bfloat16")
    add("--device", default="auto")
    add("--attention", default="sdpa", help="sdpa, eager or flash_attention_2")
    add("--tokens", type=int, nargs="+", default=[2000], help="prompt lengths")
    add("--new-tokens", type=int, nargs="+", default=[17], help="answer lengths")
    add("--method", action="append", help="a schedule, see above; may be repeated; default paper")
    add("--field", action="store_true", help="all methods, at the ideal speedups of --speedups")
    add("--turn", type=int, nargs="+", default=[], help="tokens of a second turn, which is measured")
    add("--speedups", type=float, nargs="+", default=[1.5, 2, 3], help="of --field")
    add("--against", choices=["hf"], help="also time transformers' own model(...) and generate(...)")
    add("--repeats", type=int, default=7, help="timed pairs")
    add("--warmup", type=int, default=2, help="pairs before the timed ones")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="CPU threads")
    add("--json", type=Path, help="file for all samples, settings and versions")
    return parser
