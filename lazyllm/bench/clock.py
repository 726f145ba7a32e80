"""Measuring: pairs of runs that take turns token by token, and a separate run of each method for memory and waits."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lazyllm.bench.cases import BenchCase, Pair, Run, Untimed
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.devices import read_clock as wall_clock
from lazyllm.engine.devices import read_peak, reset_peak
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.engine.generation import greedy
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.session import Session
from lazyllm.methods import Baseline, Lazy, Method
from lazyllm.methods.support.schedule import Schedule

P = ParamSpec("P")
T = TypeVar("T")


def read_clock(device: torch.device) -> float:
    """Seconds, read after the device has finished all its work.

    With one CPU thread: CPU time of this process, which other processes disturb least.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    return wall_clock(device)


def measure(
    model: PreTrainedModel,
    name: str,
    method: Method | None,
    prompt: Tensor,
    new_tokens: int,
    repeats: int,
    warmup: int,
    baseline_untimed: Untimed,
    beside_equal: bool = False,
) -> BenchCase:
    """Measure a method beside the baseline on a prompt [n].

    method: None for transformers' own `model(...)` and `generate`.
    repeats: timed pairs, after `warmup` untimed ones. 0 is for prompts that take many minutes: the only sample is then
        the prefill of the two runs that count memory and waits.
    baseline_untimed: the baseline's, measured on the same prompt just before. beside_equal: time `Pair.equal` too.
    """
    n, config = prompt.shape[0], model.config
    layers = config.num_hidden_layers
    if method is not None:
        method.prepare(model)
    of_method, computed = untimed(model, method, prompt, new_tokens) if method else (None, [n] * layers)
    stored = round(n * of_method.kv_bytes / baseline_untimed.kv_bytes) if of_method and beside_equal else 0
    rate = 0.0 if repeats else product_rate(model, n)  # a timed pair measures its own
    pairs = []
    for repeat in range(warmup + repeats if repeats else 0):
        baseline_first = repeat % 2 == 0
        if method is None:
            pair = _beside_transformers(model, prompt, new_tokens, baseline_first)
        else:
            pair = _beside_baseline(model, method, prompt, new_tokens, baseline_first, stored)
        if repeat >= warmup:
            pairs.append(pair)
    if repeats == 0 and of_method is not None:
        pairs = [Pair(*(Run(run.prefill_s, [], run.prefill_s, [], rate) for run in (baseline_untimed, of_method)))]
    return BenchCase(
        name=name,
        tokens=n,
        new_tokens=new_tokens,
        boundaries=sum(ratio < 1 for ratio in keep_ratios(method, layers).values()),
        ideal_ttft_speedup=method.ideal_speedup(config, n, computed) if method else 1.0,
        prefill_flops=prefill_flops(config, computed),
        baseline_prefill_flops=prefill_flops(config, [n] * layers),
        pairs=pairs,
        untimed=of_method,
        baseline_untimed=baseline_untimed,
    )


def keep_ratios(method: Method | None, layers: int) -> Mapping[int, float]:
    """{layer: keep ratio} of LazyLLM's schedule; nothing of other methods."""
    return Schedule.parse(method.schedule, layers).keep if isinstance(method, Lazy) else {}


def _beside_baseline(
    model: PreTrainedModel, method: Method, prompt: Tensor, new_tokens: int, baseline_first: bool, stored: int
) -> Pair:
    """The pair, with a third run of the baseline on `stored` tokens if that is not 0."""
    order = [(Baseline(), prompt), (method, prompt)]
    order = order if baseline_first else order[::-1]
    runs = [turns.run() for turns in in_turns(model, [*order, *[(Baseline(), prompt[:stored])][:stored]], new_tokens)]
    first, second, *equal = runs
    return Pair(*((first, second) if baseline_first else (second, first)), *equal)


def _beside_transformers(model: PreTrainedModel, prompt: Tensor, new_tokens: int, baseline_first: bool) -> Pair:
    """The pair of the baseline and transformers, one whole generation after the other."""
    other = None if baseline_first else _transformers(model, prompt, new_tokens, prefill_first=False)
    [alone] = in_turns(model, [(Baseline(), prompt)], new_tokens)
    return Pair(alone.run(), other or _transformers(model, prompt, new_tokens, prefill_first=True))


class Turns:
    """The generation of `lazyllm.generate`, one token a call.

    token_ids: the tokens so far. seconds: of each token; the first includes the start of the session.
    """

    def __init__(self, decoder: Decoder, method: Method, prompt: Tensor, new_tokens: int) -> None:
        self.token_ids: list[int] = []
        self.seconds: list[float] = []
        self.method = method
        self._decoder = decoder
        self._prompt = prompt
        self._new_tokens = new_tokens
        self._session: Session | None = None
        self._product_flops_per_s = 0.0
        self._choose = greedy()

    @property
    def selected(self) -> list[dict[int, list[int]]]:
        """`Generation.selected`."""
        assert self._session is not None
        return [{layer: kept.tolist() for layer, kept in step.items()} for step in self._session.selected]

    def take(self) -> None:
        """Generate the next token."""
        if self._session is None:
            self._product_flops_per_s = product_rate(self._decoder.model, len(self._prompt))
        start = read_clock(self._decoder.device)
        if self._session is None:
            self._session = self.method.start(self._decoder, Prompt(self._prompt), self._new_tokens)
            start += self._session.scoring.uncounted_s
            logits = self._session.prefill(self._prompt.to(self._decoder.device))
        else:
            logits = self._session.step(self.token_ids[-1])
        token_id, _ = self._choose(logits)
        self.seconds.append(read_clock(self._decoder.device) - start)
        self.token_ids.append(token_id)

    def run(self) -> Run:
        """The times of the finished generation."""
        first, *steps = self.seconds
        revived = [0] * len(steps)
        if isinstance(self.method, Lazy):
            revived = revived_flops(self._decoder.model, self.method, self.selected, len(self._prompt))
        return Run(first, steps, sum(self.seconds), revived, self._product_flops_per_s)


@torch.inference_mode()
def in_turns(model: PreTrainedModel, contenders: Sequence[tuple[Method, Tensor]], new_tokens: int) -> list[Turns]:
    """Continue each prompt [n] by its method: all first tokens, then all second tokens, and so on.

    A slow spell of the machine slows all of them. All KV caches are in memory at once. Raises FloatingPointError if
    logits are not finite.
    """
    for method, _ in contenders:
        method.prepare(model)
    with open_decoder(model) as decoder:
        generations = [Turns(decoder, method, prompt, new_tokens) for method, prompt in contenders]
        for _ in range(new_tokens):
            for turns in generations:
                turns.take()
    return generations


def product_rate(model: PreTrainedModel, n: int) -> float:
    """FLOP/s of one product of n tokens with a matrix of the MLP: the best that the device reaches."""
    width, mlp = model.config.hidden_size, model.config.intermediate_size
    draw = torch.Generator(model.device).manual_seed(0)
    rows = torch.rand(n, width, device=model.device, generator=draw).to(model.dtype)
    weight = torch.rand(mlp, width, device=model.device, generator=draw).to(model.dtype)
    F.linear(rows[:1], weight)
    start = read_clock(model.device)
    repeats = 10 if model.device.type != "cpu" else 1
    for _ in range(repeats):
        F.linear(rows, weight)
    return repeats * 2 * n * width * mlp / (read_clock(model.device) - start)


@torch.inference_mode()
def _transformers(model: PreTrainedModel, prompt: Tensor, new_tokens: int, prefill_first: bool) -> Run:
    """The prefill by `model(...)`, logits of the last token only, and the mean step of `model.generate`.

    prefill_first: run the prefill before `generate`, so that it is next to the baseline's.
    """
    rate = product_rate(model, len(prompt))
    token_ids = prompt[None].to(model.device)

    def seconds(call: Callable[[], Tensor]) -> float:
        start = read_clock(model.device)
        call()
        return read_clock(model.device) - start

    def generated(count: int) -> Tensor:
        return model.generate(  # type: ignore[operator]
            token_ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def prefill() -> float:
        return seconds(lambda: model(token_ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().cpu())

    if new_tokens == 1:
        ttft = prefill()
        return Run(ttft, [], ttft, [], rate)
    ttft = prefill() if prefill_first else None
    total, first = seconds(lambda: generated(new_tokens)), seconds(lambda: generated(1))
    return Run(prefill() if ttft is None else ttft, [(total - first) / (new_tokens - 1)], total, [0], rate)


def revived_flops(
    model: PreTrainedModel, method: Lazy, selected: Sequence[Mapping[int, list[int]]], prompt_tokens: int
) -> list[int]:
    """FLOPs of the tokens that each decoding step revives, in the layers that compute them.

    selected: `Generation.selected`. A step revives the prompt tokens that no earlier step selected.
    """
    layers = model.config.num_hidden_layers
    cuts = [cut for cut in keep_ratios(method, layers) if cut < layers]
    per_step = [0] * (len(selected) - 1)
    for cut, end in zip(cuts, [*cuts[1:], layers], strict=True):
        stored = set(selected[0][cut])
        for step, of_step in enumerate(selected[1:]):
            present = of_step[cut]
            revived = [position for position in present if position not in stored and position < prompt_tokens]
            stored.update(revived)
            per_step[step] += flops_of_rows(model.config, revived, present, end - cut)
    return per_step


def flops_of_rows(config: Any, rows: Sequence[int], present: Sequence[int], layers: int) -> int:
    """FLOPs of tokens at positions `rows` in some layers; each attends to those `present`, ascending, up to itself."""
    shape = LayerShape.of(config)
    pairs = sum(bisect_right(present, position) for position in rows)
    return layers * (len(rows) * shape.linear_flops + pairs * shape.pair_flops)


@torch.inference_mode()
def untimed(
    model: PreTrainedModel, method: Method, prompt: Tensor, new_tokens: int, steps: int = 8
) -> tuple[Untimed, list[int]]:
    """A separate run, as counting disturbs the clock; and the prompt tokens computed in each layer of its prefill."""
    device, token_ids = model.device, prompt.to(model.device)
    selecting = _SelectionClock(device)
    with open_decoder(model) as decoder:
        _trim()
        reset_peak(device)
        before = read_peak(device)

        def peak() -> int | None:
            now = read_peak(device)
            return None if now is None or before is None else now - before

        start, began = read_clock(device), wall_clock(device)
        with Waits() as in_prefill:
            session = method.start(decoder, Prompt(prompt), new_tokens)
            session.cross_in_prefill = selecting.around(session.cross_in_prefill)
            decoder.probe.look = selecting.around(decoder.probe.look)
            session.prefill(token_ids)
        seconds, wall_s, prefill_peak = read_clock(device) - start, wall_clock(device) - began, peak()
        selection_share = (selecting.seconds + session.scoring.seconds) / wall_s
        computed = [int(count) for count in session.computed[0]]
        kv_bytes, aux_bytes = session.kv_bytes, session.aux_bytes
        step_waits = 0
        for _ in range(min(steps, new_tokens - 1)):
            with Waits() as in_step:
                session.step(0)
            step_waits = max(step_waits, len(in_step.found))
    found = Untimed(
        prefill_s=seconds,
        selection_share=selection_share,
        prefill_waits=len(in_prefill.found),
        step_waits=step_waits,
        kv_bytes=kv_bytes,
        aux_bytes=aux_bytes,
        prefill_peak_bytes=prefill_peak,
        generation_peak_bytes=peak(),
    )
    return found, computed


def _trim() -> None:
    """Return freed memory that the C library still holds to the system: a peak does not show new use of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc has it, musl has not
        trim(0)


class _SelectionClock:
    """The seconds spent in the functions that `around` wraps."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device

    def around(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            start = wall_clock(self._device)
            found = call(*args, **kwargs)
            self.seconds += wall_clock(self._device) - start
            return found

        return timed


class Waits(TorchFunctionMode):
    """Context manager; `found` lists calls that read values from the device, or whose shapes depend on values.

    On a GPU the host waits at such a call until the device has computed its arguments.
    """

    CALLS = frozenset(
        {"tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "unique", "argwhere", "repeat_interleave"}
        | {"equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keys = func.__name__, ()
        if name in ("__getitem__", "__setitem__"):
            keys = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        if name in self.CALLS or any(torch.is_tensor(key) and key.dtype == torch.bool for key in keys):
            self.found.append(name)
        return func(*args, **(kwargs or {}))
