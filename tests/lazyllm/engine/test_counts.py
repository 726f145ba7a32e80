"""Counts that determine times: operations, FLOPs, waits for the device, bytes, sizes. Times are
never tested.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MistralConfig, MistralForCausalLM

import lazyllm
from lazyllm.engine import masks
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.session import Session
from lazyllm.methods import (
    CLAA,
    METHODS,
    Baseline,
    FastKV,
    Lazy,
    Method,
    PyramidInfer,
    UniPrefill,
    make,
)
from tests.helpers import prompt_tensor, slow

LAYERS, WIDTH, HEADS, VOCAB = 10, 48, 4, 97
# Settings that drop something, of methods that need them or keep every token of a short prompt
DROPPING: dict[str, dict[str, Any]] = {
    "asl": {"first": 1, "layers": 2, "threshold": 2.0, "keep": 0.2},
    "gemfilter": {"keep": 0.2},
    "lazy": {"schedule": {2: 0.3, 5: 0.5}},
    "prompt_compression": {"keep": 0.5, "unit": "token"},
    "random_drop": {"keep": 0.5},
    "static_pruning": {"layer": 2, "keep": 0.5},
    "uniprefill": {"p": 0.5},
}


def small_llama(
    kv_heads: int = HEADS,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float64,
    window: int | None = None,
    attention: str = "sdpa",
) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(  # a Llama with a window
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads, vocab_size=VOCAB, max_position_embeddings=4096,
        attn_implementation=attention,
        sliding_window=window,
    )  # fmt: skip
    return MistralForCausalLM(config).to(dtype).eval()


class Seen(TorchDispatchMode):
    """The dispatcher's operations by name. largest: bytes of the largest returned tensor, but
    for another library's.
    """

    # these return views of the same numbers, without work on a device
    VIEWS = frozenset(
        {"alias", "contiguous", "expand", "flatten", "lift_fresh", "promote_types", "reshape"}
        | {"select", "slice", "split_with_sizes", "squeeze", "to", "transpose", "unsqueeze", "view"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    @property
    def work(self) -> int:
        return sum(count for name, count in self.names.items() if name not in self.VIEWS)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if torch.is_tensor(tensor) and tensor.layout == torch.strided:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@dataclass(frozen=True)
class SteeredLazy(Lazy):
    """LazyLLM that computes its importance, but selects by a random one, as random weights revive
    in nearly every step.

    The random importance of a share `drift` of all positions is drawn anew in every `every`-th
    decoding step; the other steps revive nothing.
    """

    drift: float = 0.02
    every: int = 8

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        session: Any = super().start(decoder, prompt, max_new_tokens)
        importance, begin_step = session.importance, session.begin_step
        draw, size = torch.Generator().manual_seed(0), session.max_positions
        wanted = torch.rand(size, generator=draw)

        def look_up_drawn(index: int) -> torch.Tensor:
            importance(index)
            return wanted[session.caches[index].positions]

        def drifting_step() -> torch.Tensor:
            if (len(session.computed) - 1) % self.every == 0:
                fresh, chance = torch.rand(2, size, generator=draw)
                wanted.copy_(torch.where(chance < self.drift, fresh, wanted))
            return begin_step()

        session.importance, session.begin_step = look_up_drawn, drifting_step
        return session


def steps_of(
    model: MistralForCausalLM, method: Method, n: int, steps: int
) -> tuple[list[Seen], list[int]]:
    """The operations of each decoding step, and the number of tokens that it revives, over all
    layers.
    """
    seen, token = [], torch.tensor([7])
    with torch.inference_mode(), open_decoder(model) as decoder:
        session = method.start(decoder, Prompt(prompt_tensor(n)), steps + 1)
        session.prefill(prompt_tensor(n))
        for _ in range(steps):
            with Seen() as step:
                session.step(token)
            seen.append(step)
    computed = [sum(step) for step in session.computed]
    return seen, [after - before for before, after in pairwise(computed)]


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_operations_of_a_step_in_which_nothing_is_revived(kv_heads: int) -> None:
    model, boundaries = small_llama(kv_heads), 3
    baseline, _ = steps_of(model, Baseline(), 200, 6)
    steered, revived = steps_of(model, SteeredLazy(drift=0.2), 200, 6)
    assert revived[0] > 0
    assert revived[1:] == [0] * 5
    for ours, theirs in zip(steered[1:], baseline[1:], strict=True):
        assert ours.work - theirs.work <= 15 * boundaries
        assert ours.names["scaled_dot_product_attention"] == LAYERS
    # keeping everything makes no boundary
    keeping, _ = steps_of(model, Lazy({3: 1.0, 6: 1.0}), 200, 3)
    assert [step.work for step in keeping] == [step.work for step in baseline[:3]]


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_baseline_does_no_more_than_the_model_itself(kv_heads: int) -> None:
    """Each large operation runs as often as in `model(...)`; one stores K and V, and in prefill
    two more find slots.
    """
    model, prompt = small_llama(kv_heads, dtype=torch.bfloat16), prompt_tensor(200)
    with torch.inference_mode():
        with Seen() as their_prefill:
            cache = model(prompt[None], use_cache=True, logits_to_keep=1).past_key_values
        with Seen() as their_step:
            model(prompt[None, :1], use_cache=True, logits_to_keep=1, past_key_values=cache)
        with open_decoder(model) as decoder:
            session = Baseline().start(decoder, Prompt(prompt), 2)
            with Seen() as our_prefill:
                session.prefill(prompt)
            with Seen() as our_step:
                session.step(prompt[:1])
    for ours, theirs in ((our_prefill, their_prefill), (our_step, their_step)):
        for name in ("linear", "scaled_dot_product_attention", "mul", "add", "pow", "mean", "silu"):
            assert abs(ours.names[name] - theirs.names[name]) <= (name == "add")
    # the slots of the prompt's tokens, written once
    assert our_prefill.work <= their_prefill.work + 2
    assert our_step.work <= their_step.work - LAYERS


def test_prompt_that_is_computed_everywhere_costs_no_search_for_tokens_to_revive() -> None:
    """Once a group has computed all prompt tokens, the host need not ask the device for tokens
    to revive.
    """
    seen, revived = steps_of(small_llama(), SteeredLazy({5: 0.9}, drift=1.0, every=1), 30, 12)
    assert sum(revived) == 5 * 3  # 3 of 30 tokens were pruned before 5 layers
    assert seen[0].names["nonzero"] == 1
    assert seen[-1].names["nonzero"] == 0


@pytest.mark.parametrize(
    ("kv_heads", "attention", "window"), [(HEADS, "sdpa", 40), (1, "sdpa", None), (1, "eager", 40)]
)
@pytest.mark.parametrize("method", [Baseline(), Lazy({2: 0.3, 5: 0.5}), FastKV()], ids=str)
def test_no_tensor_of_a_generation_is_quadratic_in_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
    method: Method,
    kv_heads: int,
    window: int | None,
    attention: str,
) -> None:
    n, block, row = 401, 2**14, 4 * max(64, WIDTH, VOCAB)  # bytes of a token's widest row
    model = small_llama(kv_heads, layers=6, dtype=torch.float32, window=window, attention=attention)
    whole = lazyllm.generate(model, prompt_tensor(n), method, 4, ())
    monkeypatch.setattr(masks, "BLOCK_ON_CPU", block)
    monkeypatch.setattr("lazyllm.engine.kernels.SPLIT_ON_CPU", block // 4)  # cells
    with Seen() as seen:
        in_blocks = lazyllm.generate(model, prompt_tensor(n), method, 4, ())
    assert in_blocks.computed.tolist() == whole.computed.tolist()
    if isinstance(method, Lazy) and window is None:
        assert (in_blocks.computed[1:] - in_blocks.computed[:-1]).max() > 60  # were revived at once
    # the row of one query may cost more than a block
    assert n * row // 4 < seen.largest <= max(n * row, 2 * block) < n * n


class Held(TorchDispatchMode):
    """peak: the maximum number of bytes held at once, after any operation, by tensors that
    operations returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        # with tensors that are free by now: these are looked for only if the peak may grow
        self._sum = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                _, before = self._held.get(storage._cdata, (None, 0))
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._sum += storage.nbytes() - before
        if self._sum > self.peak:
            self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
            self._sum = sum(nbytes for _, nbytes in self._held.values())
            self.peak = max(self.peak, self._sum)
        return out


def bytes_of_a_layer(model: MistralForCausalLM, n: int) -> int:
    """The peak of one of transformers' own layers on n hidden states, these included."""
    with torch.inference_mode(), Held() as held:
        hidden = torch.zeros(1, n, WIDTH, dtype=model.dtype)
        rope = model.model.rotary_emb(hidden, torch.arange(n)[None])
        model.model.layers[0](hidden, position_embeddings=rope, attention_mask=None)
    return held.peak


@pytest.mark.parametrize("name", METHODS)
def test_generation_holds_its_caches_one_layer_and_one_block(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, n, block = small_llama(dtype=torch.float32), 1000, 2**17
    monkeypatch.setattr(masks, "BLOCK_ON_CPU", block // 2)
    monkeypatch.setattr("lazyllm.engine.scores.SUMMED_ON_CPU", block // 8)  # cells
    whole = lazyllm.generate(model, prompt_tensor(n), Baseline(), 3, ()).kv_bytes
    with Held() as held:
        out = lazyllm.generate(model, prompt_tensor(n), make(name, DROPPING.get(name, {})), 3, ())
    # SpecPrefill without a draft reads the whole prompt with the whole model to choose from it
    stored = max(out.kv_bytes, whole if name == "specprefill" else 0)
    assert held.peak <= 1.1 * (stored + out.aux_bytes + bytes_of_a_layer(model, n) + block)


@pytest.mark.parametrize(
    ("kv_heads", "attention", "window"),
    [
        (1, "sdpa", 9),
        (HEADS, "eager", None),
        *slow((1, "eager", 70), (HEADS, "sdpa", 70), (HEADS, "eager", 9)),
    ],
)
@pytest.mark.parametrize(
    "method",
    [
        Baseline(),
        Lazy({2: 0.3, 5: 0.5}),
        CLAA(),
        PyramidInfer(),
        UniPrefill(None, 0.6, 20, 4, 4, 4),
    ],
    ids=str,
)
def test_blocks_change_no_result(
    monkeypatch: pytest.MonkeyPatch,
    method: Method,
    kv_heads: int,
    window: int | None,
    attention: str,
) -> None:
    model = small_llama(kv_heads, layers=6, window=window, attention=attention)
    whole = lazyllm.generate(model, prompt_tensor(90), method, 4, ())
    for block in (1, 4000, 30000):  # a query alone, some, many
        monkeypatch.setattr(masks, "BLOCK_ON_CPU", block)
        monkeypatch.setattr("lazyllm.engine.kernels.SPLIT_ON_CPU", block // 4)
        found = lazyllm.generate(model, prompt_tensor(90), method, 4, ())
        assert (found.token_ids, found.selected) == (whole.token_ids, whole.selected)
        tolerance = 1e-9 if attention == "sdpa" else 1e-6  # eager's softmax is in float32
        torch.testing.assert_close(found.first_logits, whole.first_logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("kv_heads", "layers"), [(HEADS, 32), (1, 16)])
def test_bytes_at_the_end_of_prefill_with_figure_4s_schedule(kv_heads: int, layers: int) -> None:
    model, n = small_llama(kv_heads, layers), 200
    ours = lazyllm.generate(model, prompt_tensor(n), Lazy(), 1, ())
    theirs = lazyllm.generate(model, prompt_tensor(n), Baseline(), 1, ())
    first, second, third = (layers * tenths // 10 for tenths in (3, 6, 9))
    row = 2 * kv_heads * (WIDTH // HEADS) * 8  # K and V of one token in one layer, float64
    # 200, 140, 98, 69 tokens enter the groups
    entered = first * 200 + (second - first) * 140 + (third - second) * 98 + (layers - third) * 69
    assert ours.kv_bytes == entered * row
    assert ours.aux_bytes == (60 + 42 + 29) * WIDTH * 8
    assert theirs.kv_bytes == layers * 200 * row
    assert (ours.kv_bytes + ours.aux_bytes) / theirs.kv_bytes <= 0.75
