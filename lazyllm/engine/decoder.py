"""The model's own layers, run one group at a time: the place where hidden states can be shortened between layers.

Notation:
    m  tokens in this run      s  stored tokens of a group      w  hidden width      v  vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.architecture import Layout, find_layout, hidden_before_layers, logits_of_normed, windows_of
from lazyllm.engine.attention import Probe, installed_attention, part_mask
from lazyllm.engine.cache import GroupCache
from lazyllm.engine.cpu_linear import products_of
from lazyllm.engine.devices import device_of, devices_of, home_of, is_spread, moved
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import UserError

Rope = tuple[Tensor, ...]  # cos and sin, [1, m, d] each, for every kind of layer that has its own


class Decoder:
    """The parts of a transformers causal language model, and how a group of its layers is run.

    Use `open_decoder`, which installs the observing attention and removes it again.

    device: where everything is that no layer owns; `devices`: all that compute. Layers may be elsewhere: then what they
    need is brought there, and what leaves a group of them is brought back.
    """

    def __init__(self, model: PreTrainedModel, probe: Probe, layout: Layout) -> None:
        self.model = model
        self.probe = probe
        self.layout = layout
        self._inner: Any = model.model
        self.layers: Any = self._inner.layers
        self.config = model.config
        self.device = home_of(model)
        self.devices = devices_of(model)
        self._layer_devices = [device_of(layer) if is_spread(model) else self.device for layer in self.layers]
        self.dtype = model.dtype
        self.width: int = model.config.hidden_size
        shape = LayerShape.of(model.config)
        self._share = shape.heads // shape.kv_heads
        self._largest_matrix = shape.width * max(shape.mlp_width, shape.heads * shape.head_dim)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[m] token ids -> [1, m, w] hidden states before layer 1 of the tokens at `positions` [m]."""
        if self.layout.plain_embeddings:
            return self._inner.embed_tokens(token_ids[None])
        return hidden_before_layers(self.model, token_ids, positions)

    def rope(self, hidden: Tensor, positions: Tensor) -> Rope:
        """cos and sin of the tokens at `positions` [m], one pair after the other where layers differ in it."""
        position_ids = positions[None]
        ropes = tuple(
            part
            for call in self.layout.ropes
            for part in getattr(self._inner, call.module)(hidden, position_ids=position_ids, **dict(call.extras))
        )
        return moved(ropes, self.device)

    def check_lengths(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Refuse a generation during which the frequencies of a LongRoPE would change. Raises ValueError.

        The model's own `generate` then computes all K and V anew; tokens that are computed once cannot.
        """
        for switch in _rope_switches(self.config):
            if prompt_tokens <= switch < prompt_tokens + max_new_tokens - 1:  # the last new token is not run
                raise ValueError(
                    f"{type(self.model).__name__} changes its RoPE for all tokens when a text grows beyond {switch} "
                    f"tokens: {prompt_tokens} prompt tokens and up to {max_new_tokens} new ones would cross that; keep "
                    "the whole text within it, or the prompt beyond it"
                )

    def run(
        self,
        group: GroupCache,
        hidden: Tensor,
        positions: Tensor,
        rope: Rope,
        chosen: Tensor | None,
        watched: range,
        length: int,
    ) -> Tensor:
        """Run the group's layers over hidden [1, m, w]; K and V go into `group`, which must have been extended.

        chosen: [m, s] bool, which stored tokens each query attends to; None for causal attention over the m tokens
            (prefill), or over everything stored (a single query, decoding). A layer with a sliding window attends to
            those of them whose positions lie in the window.
        watched: the layers whose mean importance (Eq. 1) is left in `probe`.
        length: of the whole text; all positions, stored ones too, are below it.
        """
        self.probe.watch(watched)
        self.probe.decodes = group.added < group.length
        # with all tokens of the text stored in their order, the last slots are a window: no mask, and fewer to read
        by_slots = self.probe.decodes and chosen is None and group.is_whole
        masks: dict[int | None, Tensor | None] = {}
        position_ids, device = positions[None], self.device
        with products_of(hidden, self._largest_matrix) if self.probe.decodes else nullcontext():
            for layer in group.layers:
                window = self.layout.windows[layer]
                if window is not None and length <= window:
                    window = None  # nothing is far enough away
                # importance is wanted of all that is stored
                group.attended = window if by_slots and layer not in watched else None
                if group.attended is not None:
                    window = None
                if self._layer_devices[layer] != device:  # moved here, once: accelerate would for every layer anew
                    device = self._layer_devices[layer]
                    hidden, position_ids, rope = moved((hidden, position_ids, rope), device)
                    masks = {of_window: moved(mask, device) for of_window, mask in masks.items()}
                if window not in masks:
                    masks[window] = moved(self._mask(group, positions, chosen, window, length), device)
                of_layer = 2 * self.layout.rope_of[layer]
                hidden = self.layers[layer](
                    hidden,
                    attention_mask=masks[window],
                    position_ids=position_ids,
                    past_key_values=group,
                    use_cache=True,
                    position_embeddings=rope[of_layer : of_layer + 2],
                )
        return moved(hidden, self.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The model's last norm, of hidden [1, m, w]."""
        return self._inner.norm(hidden)

    def head(self, normed: Tensor) -> Tensor:
        """[m, v] logits of hidden states [m, w] behind the last norm, scaled and capped as the model does it."""
        return self.model.lm_head(normed) if self.layout.plain_logits else logits_of_normed(self.model, normed[None])[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[v] logits of the last of the tokens in hidden [1, m, w], and of no other."""
        return moved(self.head(self.norm(hidden[:, -1:])[0])[0], self.device)

    def _mask(
        self, group: GroupCache, positions: Tensor, chosen: Tensor | None, window: int | None, length: int
    ) -> Tensor | None:
        """What a layer's attention gets as its mask; None for plain causal attention, or for everything stored."""
        if window is None:
            if chosen is not None:
                return part_mask(chosen, self._share, self.dtype)
            return self._causal_mask(positions.shape[0])
        m = positions.shape[0]
        query = positions[:, None]
        if self.probe.decodes:
            stored = group.positions
            near = stored > query - window
            chosen = near if chosen is None else chosen & near
            return part_mask(chosen, self._share, self.dtype)
        if self.probe.own_window and m == length:
            return None  # no gaps between positions: the window that the model's own attention knows is the right one
        seen = (positions <= query) & (positions > query - window)
        if self.probe.own_attention_is_eager:
            return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(
                ~seen, torch.finfo(self.dtype).min
            )[None, None]
        return seen[None, None] if self.probe.own_masks else part_mask(seen, self._share, self.dtype)

    def _causal_mask(self, m: int) -> Tensor | None:
        """Only eager attention has no causality of its own: in prefill it needs an additive mask [1, 1, m, m]."""
        if m == 1 or not self.probe.own_attention_is_eager:
            return None
        lowest = torch.finfo(self.dtype).min
        return torch.full((1, 1, m, m), lowest, dtype=self.dtype, device=self.device).triu(1)


@contextmanager
def open_decoder(model: PreTrainedModel, layout: Layout | None = None) -> Iterator[Decoder]:
    """A `Decoder` over `model`; on exit the model is as it was.

    layout: of this model, where it is known already. Raises UserError where the model is not one that the
    loop reproduces, as far as that shows without running its layers (`check_same_as_model` runs them).
    """
    if layout is None:
        check_structure(model)
        layout = find_layout(model)
    with _ropes_put_back(model), installed_attention(model) as probe:
        yield Decoder(model, probe, layout)


@contextmanager
def _ropes_put_back(model: Any) -> Iterator[None]:
    """Leave a RoPE that grows with the text as it was: not every release of transformers does so itself."""
    grows = any("dynamic" in str(one.get("rope_type")) for one in _rope_parameters(model.config))
    parts = ("embed_tokens", "layers", "norm")
    ropes = [child for name, child in model.model.named_children() if name not in parts] if grows else []
    held = [({k: v for k, v in vars(rope).items() if k[0] != "_"}, dict(rope._buffers)) for rope in ropes]
    try:
        yield
    finally:
        for rope, (values, buffers) in zip(ropes, held, strict=True):
            for key in [key for key in vars(rope) if key[0] != "_"]:
                del rope.__dict__[key]
            rope.__dict__.update(values)
            rope._buffers.update(buffers)


def check_structure(model: PreTrainedModel) -> None:
    """Refuse, by name of the cause, what can be seen without running the model. Raises UserError."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UserError(f"{name} is what torch.compile made of a model: give the model itself")
    inner: Any = getattr(model, "model", None)
    missing = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(inner, part)]
    if missing or not hasattr(model, "lm_head"):
        raise UserError(
            f"{name} is not built like a Llama (no {', '.join(missing) or 'lm_head'}); "
            "supported: decoders with embed_tokens, layers, norm and lm_head, see docs/architectures.md"
        )
    count, said = len(inner.layers), model.config.num_hidden_layers
    if count != said:
        raise UserError(f"{name} has {count} modules in `layers`, but num_hidden_layers={said}")
    windows_of(model.config)
    for layer in inner.layers:
        accepted = inspect.signature(layer.forward).parameters
        for keyword in ("position_embeddings", "past_key_values", "attention_mask"):
            if keyword not in accepted:  # else **kwargs would swallow it without a word
                raise UserError(f"the layers of {name} take no `{keyword}`, unlike those of transformers 5")
    if model.training:
        raise UserError(f"{name} is in training mode (dropout): call model.eval() first")


def sliding_window(config: Any) -> int | None:
    """The shortest attention window of any layer, in tokens; None where every layer sees everything."""
    return min((window for window in windows_of(config) if window is not None), default=None)


def _rope_switches(config: Any) -> Iterator[int]:
    """The text lengths beyond which a LongRoPE takes its other frequencies."""
    for one in _rope_parameters(config):
        if one.get("rope_type") == "longrope":
            yield one["original_max_position_embeddings"]


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Those of all layers, or those of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(part for part in parameters.values() if isinstance(part, dict))]


CHECKED_STEPS = 2  # decoding steps of the start-up check
CHECKED_WINDOW = (
    512  # tokens: for longer windows the check of the masks alone must do (see `lazyllm.engine.architecture`)
)


@torch.inference_mode()
def check_same_as_model(model: PreTrainedModel, length: int = 8) -> None:
    """Run a few tokens through the loop over the layers and through `model(...)`: the logits must be the same.

    Most of the tokens are run as a prompt, the others as decoding steps: a layer that keeps anything but K and V, or
    mixes tokens outside attention, cannot give the same then. A window of up to `CHECKED_WINDOW` tokens is exceeded.
    Raises UserError where they differ, or where a layer does not attend as transformers' layers do. Rounded
    weights need no other tolerance: both ways run the same weights on the same rows, and differ by the order of
    attention's sums only. Raises FloatingPointError where the model's own logits are not finite.
    """
    name = type(model).__name__
    with open_decoder(model) as decoder:
        shortest = sliding_window(model.config)
        if shortest is not None and shortest <= CHECKED_WINDOW:
            length = max(length, shortest + CHECKED_STEPS + 2)
        token_ids = torch.arange(length, device=decoder.device) % model.config.vocab_size
        try:
            found = _logits_of_loop(decoder, token_ids)
        except torch.OutOfMemoryError:  # of this moment, not of the model
            raise
        except (RuntimeError, TypeError, AttributeError, KeyError) as error:
            raise UserError(f"the layers of {name} cannot be run one by one: {error}") from error
    expected = model(token_ids[None], logits_to_keep=1 + CHECKED_STEPS, use_cache=False).logits[0].to(found.device)
    if not expected.isfinite().all():
        raise FloatingPointError(f"{name}: the model's own logits are not finite (NaN or infinite)")
    worst = (found - expected).abs().max().item()
    share = 1e-2 if torch.finfo(model.dtype).eps < 1e-3 else 5e-2
    if not worst <= share * expected.abs().max().item():
        raise UserError(
            f"{name}: running its layers one by one gives other logits than the model does (they differ by up to "
            f"{worst:.3g}), so it does something between or around its layers, or mixes tokens outside attention, "
            "which the loop would leave out; this architecture is not supported"
        )
    _SAME_AS_MODEL.add(model)


# Models that have passed the check, so that each is checked once, whoever loaded it
_SAME_AS_MODEL: WeakSet[PreTrainedModel] = WeakSet()


def check_once(model: PreTrainedModel) -> None:
    """`check_same_as_model`, unless this model has passed it. Raises UserError."""
    if model not in _SAME_AS_MODEL:
        check_structure(model)
        check_same_as_model(model)


def _logits_of_loop(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """[1 + CHECKED_STEPS, v] of the last tokens: the last of a prompt, and those of decoding steps."""
    n, layers = token_ids.shape[0], range(len(decoder.layers))
    all_positions = torch.arange(n, device=token_ids.device)
    group = GroupCache(layers, n, n, decoder.device)
    found = []
    ends = range(n - CHECKED_STEPS, n + 1)
    for start, end in zip([0, *ends], ends, strict=False):
        positions = all_positions[start:end]
        hidden = decoder.embed(token_ids[start:end], positions)
        group.extend(positions, end)
        hidden = decoder.run(group, hidden, positions, decoder.rope(hidden, positions), None, layers, end)
        decoder.probe.take()  # raises RuntimeError where a layer attends in a way of its own
        found.append(decoder.logits(hidden))
    without = [layer + 1 for layer in layers if layer not in group.stored_layers]
    if without:
        raise RuntimeError(f"layers {without} store no K and V of their own")
    return torch.stack(found)
