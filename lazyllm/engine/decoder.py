"""The model's layers, run one group at a time, so that tokens can be dropped between groups.

Notation:
    m  tokens in this run      s  stored tokens of a group      w  hidden width      v  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.architecture import Surroundings, check_surroundings
from lazyllm.engine.attention import (
    AttentionContext,
    KeysReached,
    RecordingAttention,
    installed_attention,
)
from lazyllm.engine.depth import Depth
from lazyllm.engine.devices import concat, device_of, devices_of, is_spread, main_device, to_device
from lazyllm.engine.flops import LayerShape, windows_of
from lazyllm.engine.inputs import NO_SCORES, ScoreSpec
from lazyllm.engine.sdpa import backends
from lazyllm.errors import UserError

# The ids of open models' configs: opening a model replaces the attention function in its config
_OPEN: set[int] = set()
_LOCK = Lock()


@dataclass(frozen=True)
class Tokens:
    """The tokens of one generation that a group of layers computes in one step.

    hidden: [1, m, w]. positions: [m] ascending.
    rope: (cos, sin, cos, sin, ...), [1, m, d] each: a pair for each kind of RoPE in the model.
    is_newest: whether they come after all stored tokens; False if some are revived.
    ranks: as in `AttentionContext`.
    """

    hidden: Tensor
    positions: Tensor
    rope: tuple[Tensor, ...]
    is_newest: bool = True
    ranks: Sequence[int] | None = None

    def __getitem__(self, indices: Tensor | slice) -> Tokens:
        rope = tuple(part[:, indices] for part in self.rope)
        return Tokens(self.hidden[:, indices], self.positions[indices], rope, self.is_newest)

    def __len__(self) -> int:
        return self.positions.shape[0]


class Decoder:
    """The parts of a transformers causal language model, and the loop over some of its layers.

    device: of everything that no layer owns. devices: all that the model computes on.
    tokens_run: tokens run so far; a run through some layers counts as that share of a token.
    attention: the attention function installed while the decoder is open.
    """

    attention: RecordingAttention

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self.shape = LayerShape.of(model.config)
        self.depth = Depth.of(model.config)
        self.dtype = model.dtype
        self.device = main_device(model)
        self.devices = devices_of(model)
        self.tokens_run = 0.0
        self._inner: Any = model.model
        self.layers: Any = [*self._inner.layers]  # an index into a ModuleList takes microseconds
        self._surroundings = Surroundings(model)
        self._windows = windows_of(model.config)
        self._rope_of: list[int] = []  # the pair of `Tokens.rope` of each layer, found by `embed`
        spread = is_spread(model)
        self._layer_devices = [device_of(layer) if spread else self.device for layer in self.layers]

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tokens:
        """Make the tokens [m] that enter layer 1. positions: after those of stored tokens."""
        hidden, calls = self._surroundings.before_layers(token_ids, positions)
        pairs = [call["position_embeddings"] for call in calls]
        kinds = list({id(pair): pair for pair in pairs}.values())
        numbers = {id(pair): number for number, pair in enumerate(kinds)}
        self._rope_of = [numbers[id(pair)] for pair in pairs]
        rope = to_device(tuple(part for pair in kinds for part in pair), self.device)
        return Tokens(hidden, positions, rope)

    def embed_each(self, token_ids: Sequence[Tensor], positions: Sequence[Tensor]) -> list[Tokens]:
        """Run `embed` for each of several generations, at once if no RoPE depends on a length."""
        if len(token_ids) > 1 and not _has_rope(self.config, "dynamic", "longrope"):
            sizes = [*map(len, token_ids)]
            whole = self.embed(torch.cat([*token_ids]), torch.cat([*positions]))
            ropes = zip(*(part.split(sizes, dim=1) for part in whole.rope), strict=True)
            return [*map(Tokens, whole.hidden.split(sizes, dim=1), positions, ropes)]
        tokens = []
        for ids, places in zip(token_ids, positions, strict=True):
            with preserve_rope_state(self.model):  # each starts from the state of the open model
                tokens.append(self.embed(ids, places))
        return tokens

    def run(
        self, contexts: Sequence[AttentionContext], tokens: Sequence[Tokens], layers: range
    ) -> list[Tokens]:
        """Run the tokens of all generations through layers, as one sequence [1, sum of m, w].

        contexts: one for each generation. layers: of a group, from where the last run stopped.
        """
        sizes = [len(part) for part in tokens]
        self.tokens_run += sum(sizes) * len(layers) / len(self.layers)
        hidden = concat([part.hidden for part in tokens])
        position_ids = concat([part.positions[None] for part in tokens])
        rope = tuple(map(concat, zip(*(part.rope for part in tokens), strict=True)))
        self.attention.running = [*zip(contexts, sizes, strict=True)]
        device = self.device
        for layer in layers:
            for context in contexts:
                context.enter_layer(self._windows[layer])
            if self._layer_devices[layer] != device:  # accelerate would move them for every layer
                device = self._layer_devices[layer]
                hidden, position_ids, rope = to_device((hidden, position_ids, rope), device)
            kind, run_layer = self._rope_of[layer], self.layers[layer]
            hidden = run_layer(
                hidden,
                attention_mask=None,
                position_ids=position_ids,
                past_key_values=_Unstored,  # the attention function stores K and V
                use_cache=True,
                position_embeddings=rope[2 * kind : 2 * kind + 2],
            )
        hidden = to_device(hidden, self.device)
        parts = [hidden] if len(tokens) == 1 else hidden.split(sizes, dim=1)
        return [
            Tokens(after, before.positions, before.rope, before.is_newest)
            for before, after in zip(tokens, parts, strict=True)
        ]

    def norm(self, hidden: Tensor) -> Tensor:
        return self._inner.norm(hidden)

    def head(self, normed: Tensor) -> Tensor:
        """Compute the logits [m, v] of states [m, w] after the last norm, by the model's code."""
        return self._surroundings.logits(normed[None])[0]

    def last_logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """Compute the logits [r, v] of the last token of each of r sequences [1, m, w]."""
        last = concat([part[:, -1:] for part in hidden])
        return to_device(self.head(self.norm(last)[0]), self.device)


@contextmanager
def open_decoder(model: PreTrainedModel, decoder: Decoder | None = None) -> Iterator[Decoder]:
    """Open a `Decoder` over `model`; on exit the model is as it was.

    decoder: that of an earlier call, whose sessions go on.

    Raises UserError if the model is open already (in another thread, or in a callback), and as
    `check_surroundings`.
    """
    key = id(model.config)
    with _LOCK:
        if key in _OPEN:
            raise UserError(
                f"{type(model).__name__} is generating already, and runs one generation at a time: "
                "wait for it, load the model once more, or decode several prompts together with "
                "lazyllm.generate_many"
            )
        _OPEN.add(key)
    try:
        check_surroundings(model)
        decoder = decoder or Decoder(model)
        with preserve_rope_state(model), installed_attention(model) as decoder.attention:
            yield decoder
    finally:
        _OPEN.remove(key)


def check_longrope(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a generation during which a LongRoPE's frequencies would change. Raises ValueError.

    At such a change, `model.generate` recomputes all K and V; here every token is computed once.
    """
    last = prompt_tokens + max_new_tokens - 1  # the last new token is not run
    for rope in _rope_parameters(model.config):
        if rope.get("rope_type") != "longrope":
            continue
        switch = rope["original_max_position_embeddings"]
        if prompt_tokens <= switch < last:
            raise ValueError(
                f"{type(model).__name__} changes its RoPE for all tokens if a text grows beyond "
                f"{switch} tokens, and {prompt_tokens} prompt tokens with up to {max_new_tokens} "
                f"new ones would: give a text of at most {switch} tokens, or a prompt of more"
            )


def longest_text(config: Any) -> float:
    """Read the model's number of positions; infinite if its RoPE grows with the text."""
    return float("inf") if _has_rope(config, "dynamic") else config.max_position_embeddings


@contextmanager
def preserve_rope_state(model: Any) -> Iterator[None]:
    """On exit, restore a RoPE that grows with the text; not all releases of transformers do so."""
    children = model.model.named_children() if _has_rope(model.config, "dynamic") else ()
    ropes = [child for name, child in children if name not in ("embed_tokens", "layers", "norm")]
    held = [
        ({key: value for key, value in vars(rope).items() if key[0] != "_"}, dict(rope._buffers))
        for rope in ropes
    ]
    try:
        yield
    finally:
        for rope, (values, buffers) in zip(ropes, held, strict=True):
            for key in [key for key in vars(rope) if key[0] != "_"]:
                del rope.__dict__[key]
            rope.__dict__.update(values)
            rope._buffers.update(buffers)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """List RoPE parameters: those of all layers, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(part for part in parameters.values() if isinstance(part, dict))]


def _has_rope(config: Any, *kinds: str) -> bool:
    """Say whether a RoPE of the model is of one of these kinds."""
    types = [str(rope.get("rope_type")) for rope in _rope_parameters(config)]
    return any(kind in name for kind in kinds for name in types)


def run_layers(
    decoder: Decoder,
    token_ids: Tensor,
    layers: int | None = None,
    scores: ScoreSpec = NO_SCORES,
    stop_at: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run tokens that attend to one another only, and are stored nowhere.

    decoder: must be open.
    token_ids: [n], on the model's device, at positions from 0 on.
    layers: number of the first layers to run; None for all.
    scores, stop_at: as in `AttentionContext`.

    Returns the hidden states [1, n, w] after these layers, and the scores of each layer that
    `scores` names. The run counts in `decoder.tokens_run`, and so in `Generation.scoring_tokens`.
    """
    positions = torch.arange(token_ids.shape[0], device=decoder.device)
    unstored: Any = _Unstored(positions)
    context = AttentionContext(unstored, positions, len(positions), scores, stop_at=stop_at)
    with backends(decoder.model, decoder.devices, decodes=False):
        embedded = decoder.embed(token_ids, positions)
        [tokens] = decoder.run([context], [embedded], range(len(decoder.layers))[:layers])
    return tokens.hidden, context.take_each() if scores.layers else []


def run_to_keys(decoder: Decoder, token_ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Run up to the attention of `layer`: its query [1, h, n, d] and key [1, g, n, d], after RoPE.

    layer: from 1; it counts in `decoder.tokens_run` as a whole layer.
    """
    try:
        run_layers(decoder, token_ids, layer, stop_at=layer - 1)
    except KeysReached as reached:
        return reached.args
    raise RuntimeError(f"layer {layer} did not call the installed attention function")


class _Unstored:
    """A cache that stores nothing: the tokens of a run attend to one another.

    Layers get the class as `past_key_values`, an `AttentionContext` an instance as its `cache`.
    """

    is_ascending = is_contiguous = True

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.added = self.length = positions.shape[0]  # as in a prefill: every token is new

    @staticmethod
    def update(key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


@torch.inference_mode()
def importance_of_layers(model: PreTrainedModel, token_ids: Tensor | Sequence[int]) -> Tensor:
    """Compute Eq. 1 in every layer, [layers, n], on the host: a row sums to 1 (Figure 2).

    token_ids: one prompt [n]. Nothing is pruned.
    """
    with open_decoder(model) as decoder:
        prompt = torch.as_tensor(token_ids).to(decoder.device)
        _, scores = run_layers(decoder, prompt, scores=ScoreSpec(range(len(decoder.layers))))
        return torch.stack(scores).cpu()
