"""The model's own layers, run one group at a time, so that tokens can be dropped between groups.

Notation:
    m  tokens in this run      s  stored tokens of a group      w  hidden width      v  vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.architecture import Layout, find_layout, hidden_before_layers, logits_of_normed
from lazyllm.engine.attention import KeysReached, ObservedAttention, Probe, installed_attention
from lazyllm.engine.devices import device_of, devices_of, home_of, is_spread, moved, products_of
from lazyllm.engine.flops import LayerShape
from lazyllm.engine.inputs import NOTHING, Look
from lazyllm.engine.sdpa import backends
from lazyllm.errors import UserError

# The open models, by their configs: a config names its model's attention function, which is replaced
_OPEN: set[int] = set()
_LOCK = Lock()

Rope = tuple[Tensor, ...]  # (cos, sin, cos, sin, ...), [1, m, d] each: a pair for each of `Layout.ropes`


@dataclass(frozen=True)
class Batch:
    """The tokens that a group computes in one step: hidden [1, m, w], positions [m] ascending, their cos and sin.

    is_newest: whether they come after all stored tokens; False if some are revived.
    ranks: as of `Probe.begin`.
    """

    hidden: Tensor
    positions: Tensor
    rope: Rope
    is_newest: bool = True
    ranks: Sequence[int] | None = None

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        """The batch of some of its rows."""
        rope = tuple(part[:, rows] for part in self.rope)
        return Batch(self.hidden[:, rows], self.positions[rows], rope, self.is_newest)

    def __len__(self) -> int:
        return self.positions.shape[0]


class Decoder:
    """The parts of a transformers causal language model, and the loop over a group of its layers.

    Use `open_decoder`, which installs the observing attention and removes it again.

    probe: of the one generation that this decoder runs; `beside` gives a decoder for another one.
    device: holds everything that no layer owns. devices: all that compute. The inputs of layers on other devices are
    moved there, and a group's output is moved back.
    tokens_run: tokens run so far; a run through a share of the layers counts as that share of a token.
    """

    def __init__(self, model: PreTrainedModel, attention: ObservedAttention, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        self._attention = attention
        self._inner: Any = model.model
        self.layers: Any = self._inner.layers
        self.config = model.config
        self.device = home_of(model)
        self.probe = Probe(self.device)
        self.devices = devices_of(model)
        self._is_spread = is_spread(model)
        self._layer_devices = [device_of(layer) if self._is_spread else self.device for layer in self.layers]
        self.dtype = model.dtype
        self.width: int = model.config.hidden_size
        self.tokens_run = 0.0
        self._largest_matrix = LayerShape.of(model.config).largest_matrix

    def beside(self) -> Decoder:
        """A decoder of the same open model for another generation, whose tokens can run packed with this one's."""
        other = copy.copy(self)
        other.probe, other.tokens_run = Probe(self.device), 0.0
        return other

    def batch(self, token_ids: Tensor, positions: Tensor) -> Batch:
        """The batch of tokens [m] before layer 1, at `positions` [m] after all that are stored."""
        hidden = self.embed(token_ids, positions)
        return Batch(hidden, positions, self.rope(hidden, positions))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[m] token ids -> [1, m, w] hidden states before layer 1 of the tokens at `positions` [m]."""
        if self.layout.plain_embeddings:
            return self._inner.embed_tokens(token_ids[None])
        return hidden_before_layers(self.model, token_ids, positions)

    def rope(self, hidden: Tensor, positions: Tensor) -> Rope:
        """cos and sin of the tokens at `positions` [m]: a pair for each kind of RoPE in the model."""
        position_ids = positions[None]
        ropes = tuple(
            part
            for call in self.layout.ropes
            for part in getattr(self._inner, call.module)(hidden, position_ids=position_ids, **dict(call.extras))
        )
        return moved(ropes, self.device)

    def run(self, batch: Batch, layers: range) -> Batch:
        """The batch after these layers, for which `probe` is prepared (`Probe.begin`); its cache then holds K and V."""
        self.tokens_run += len(batch) * len(layers) / len(self.layers)
        return self.run_packed([self.probe], [batch], layers)[0]

    def run_packed(self, probes: Sequence[Probe], batches: Sequence[Batch], layers: range) -> list[Batch]:
        """The batches of several generations after these layers, which run all tokens as one sequence [1, sum of m, w].

        Each row attends to its own probe's cache only, and its probe records its scores.
        layers: the first ones of the group that each probe is prepared for, or next ones after those that ran.
        """
        sizes = [len(batch) for batch in batches]
        hidden = joined([batch.hidden for batch in batches])
        position_ids = joined([batch.positions[None] for batch in batches])
        rope = tuple(map(joined, zip(*(batch.rope for batch in batches), strict=True)))
        self._attention.rows = [*zip(probes, sizes, strict=True)]
        device = self.device
        packed, decodes = len(batches) > 1 and not self._is_spread, probes[0].decodes
        products = products_of(hidden, self._largest_matrix, packed) if decodes else nullcontext()
        with products, backends(self.model, self.devices, decodes):
            for layer in layers:
                for probe in probes:
                    probe.enter_layer(self.layout.windows[layer])
                if self._layer_devices[layer] != device:  # moved once; accelerate would move them for every layer
                    device = self._layer_devices[layer]
                    hidden, position_ids, rope = moved((hidden, position_ids, rope), device)
                cos = 2 * self.layout.rope_of[layer]
                run_layer = self.layers[layer]
                hidden = run_layer(
                    hidden,
                    attention_mask=None,
                    position_ids=position_ids,
                    past_key_values=_Unstored,  # the attention function stores each row's K and V in its own cache
                    use_cache=True,
                    position_embeddings=rope[cos : cos + 2],
                )
        parts = [moved(hidden, self.device)] if len(batches) == 1 else moved(hidden, self.device).split(sizes, dim=1)
        return [replace(batch, hidden=part, ranks=None) for batch, part in zip(batches, parts, strict=True)]

    def norm(self, hidden: Tensor) -> Tensor:
        """The model's last norm, of hidden [1, m, w]."""
        return self._inner.norm(hidden)

    def head(self, normed: Tensor) -> Tensor:
        """[m, v] logits of hidden states [m, w] after the last norm, scaled and capped by the model's code."""
        return self.model.lm_head(normed) if self.layout.plain_logits else logits_of_normed(self.model, normed[None])[0]

    def last_logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """[r, v] logits of the last token of each of r rows [1, m, w]."""
        last = joined([of_row[:, -1:] for of_row in hidden])
        with products_of(last, self._largest_matrix, not self._is_spread):
            return moved(self.head(self.norm(last)[0]), self.device)


@contextmanager
def open_decoder(model: PreTrainedModel, layout: Layout | None = None) -> Iterator[Decoder]:
    """A `Decoder` over `model`; on exit the model is as it was.

    layout: the model's, if it has been found already. Raises UserError if the model is open already (in another thread,
    or in a callback), or if the loop cannot reproduce it, checked without running its layers
    (`lazyllm.engine.checks.check_same_as_model` runs them).
    """
    key = id(model.config)
    with _LOCK:
        if key in _OPEN:
            raise UserError(
                f"{type(model).__name__} is generating already, and runs one generation at a time: wait for it, load "
                "the model once more, or decode several prompts together with lazyllm.generate_many"
            )
        _OPEN.add(key)
    try:
        layout = layout or find_layout(model)
        with ropes_put_back(model), installed_attention(model) as attention:
            yield Decoder(model, attention, layout)
    finally:
        _OPEN.remove(key)


def check_lengths(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a generation during which the frequencies of a LongRoPE would change. Raises ValueError.

    The model's own `generate` then recomputes all K and V; here every token is computed once.
    """
    ropes = _rope_parameters(model.config)
    for switch in (rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"):
        if prompt_tokens <= switch < prompt_tokens + max_new_tokens - 1:  # the last new token is not run
            raise ValueError(
                f"{type(model).__name__} changes its RoPE for all tokens if a text grows beyond {switch} tokens, and "
                f"{prompt_tokens} prompt tokens with up to {max_new_tokens} new ones would: give a text of at most "
                f"{switch} tokens, or a prompt of more"
            )


def longest_text(config: Any) -> float:
    """The model's number of positions; infinite if its RoPE grows with the text."""
    grows = any("dynamic" in str(rope.get("rope_type")) for rope in _rope_parameters(config))
    return float("inf") if grows else config.max_position_embeddings


@contextmanager
def ropes_put_back(model: Any) -> Iterator[None]:
    """Restore the state of a RoPE that grows with the text on exit; some releases of transformers do not."""
    grows = any("dynamic" in str(rope.get("rope_type")) for rope in _rope_parameters(model.config))
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


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """RoPE parameters: those of all layers, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(part for part in parameters.values() if isinstance(part, dict))]


def run_layers(decoder: Decoder, token_ids: Tensor, layers: int | None = None, look: Look = NOTHING) -> Tensor:
    """[1, n, w] hidden states after the first `layers` layers; None runs all layers.

    decoder: the open model. token_ids: [n], on the model's device, at positions from 0 on; they attend to one another
    only. look: attention scores to record; `decoder.probe.take()` or `take_each()` returns them.
    The run counts in `decoder.tokens_run`, and so in `Generation.scoring_tokens`.
    """
    n = token_ids.shape[0]
    positions = torch.arange(n, device=decoder.device)
    unstored: Any = _Unstored(positions)
    decoder.probe.begin(unstored, positions, n, look)
    return decoder.run(decoder.batch(token_ids, positions), range(len(decoder.layers))[:layers]).hidden


def run_to_keys(decoder: Decoder, token_ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Run layers 1 to `layer`, the last one up to its attention: its query [1, h, n, d] and key [1, g, n, d].

    Both are after RoPE. token_ids: as in `run_layers`. The last layer counts in `decoder.tokens_run` as a whole one.
    """
    decoder.probe.stop_at = layer - 1
    try:
        run_layers(decoder, token_ids, layer)
    except KeysReached as reached:
        return reached.args
    finally:
        decoder.probe.stop_at = None
    raise RuntimeError(f"layer {layer} did not call the installed attention function")


def joined(parts: Sequence[Tensor]) -> Tensor:
    """[1, m, ...] of several generations -> [1, sum of m, ...]."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


class _Unstored:
    """A cache that stores nothing: the tokens of a run attend to one another."""

    is_ascending = is_whole = True

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.added = self.length = positions.shape[0]  # as in a prefill: every token is new

    @staticmethod
    def update(key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


@torch.inference_mode()
def importance_of_layers(model: PreTrainedModel, token_ids: Tensor | Sequence[int]) -> Tensor:
    """[layers, n] Eq. 1 in every layer: attention of the last token to each token, mean over heads (Figure 2).

    token_ids: one prompt [n]. Nothing is pruned. The result is on the host, in at least float32; a row sums to 1.
    """
    with open_decoder(model) as decoder:
        prompt = torch.as_tensor(token_ids).to(decoder.device)
        run_layers(decoder, prompt, look=Look(range(len(decoder.layers))))
        return torch.stack(decoder.probe.take_each()).cpu()
