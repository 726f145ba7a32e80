"""One generation's state, and the loop that runs its tokens, alone or with other generations.

A boundary lies between two groups of layers. All layers of a group see the same tokens in a step,
so tokens are chosen at boundaries only: `Session.leave` gets the tokens of a group, and returns
those that enter the next.

Notation:
    n  prompt tokens         p  positions up to the step's newest token
    m  tokens computed in a group in this step               s  tokens stored in a group
    w  hidden width          v  vocabulary                   r  sessions
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from lazyllm.engine.attention import AttentionContext, Sees
from lazyllm.engine.cache import GroupCache
from lazyllm.engine.decoder import Decoder, Tokens, check_longrope
from lazyllm.engine.inputs import NO_SCORES, Boundary, Group, Selection
from lazyllm.engine.masks import Chosen
from lazyllm.engine.sdpa import backends
from lazyllm.errors import UserError

if TYPE_CHECKING:
    from lazyllm.engine.method import Method


@dataclass(frozen=True)
class Scoring:
    """What was spent on scoring a prompt before its prefill.

    seconds: counted in TTFT. tokens: as `Generation.scoring_tokens`.
    """

    seconds: float = 0.0
    tokens: int = 0


class Session:
    """The state of one generation. A method that decodes in another way has a subclass.

    Call `prefill` once, then `step` or `step_together` with each generated token.

    decoder: must be open in every call.
    groups: all layers, in order.
    prompt_tokens: n.
    max_new_tokens: the most tokens that are generated.
    method: chooses tokens at the boundaries of the prefill; None: all go on, and stay stored.
    sees: as in `AttentionContext`, for the prefill.

    Raises ValueError for a length at which the model's RoPE would change (`check_longrope`).
    """

    context: AttentionContext  # of the group that runs, or has just run

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        method: Method | None = None,
        sees: Sees | None = None,
    ) -> None:
        check_longrope(decoder.model, prompt_tokens, max_new_tokens)
        self.decoder = decoder
        self.groups = groups
        self.prompt_tokens = prompt_tokens
        self.max_positions = prompt_tokens + max_new_tokens
        self.scoring = Scoring()
        self.length = 0  # tokens run so far, prompt and generated
        # per step and layer: distinct prompt tokens computed so far
        self.computed: list[list[int | Tensor]] = []
        self.caches = [
            # room for the generated tokens, all of which every layer computes
            GroupCache(
                group.slots(max_new_tokens, self.max_positions), self.max_positions, decoder.device
            )
            for group in groups
        ]
        self._method = method
        self._sees = sees
        self._notes: dict[str, Any] = {}  # as in `Boundary`
        self._unchecked: list[tuple[str, Tensor, int, int | None]] = []  # `check_selected_values`
        # per group; tensors if the host does not know the numbers
        self._num_computed: list[int | Tensor] = [0] * len(groups)
        self._num_revived: list[int | Tensor] = [0] * len(groups)
        self._selected: list[dict[int, Tensor]] = []  # as noted by `note_selection`
        self._in_prefill = False
        self._all_positions = torch.arange(self.max_positions, device=decoder.device)

    def selections(self) -> list[dict[int, list[int]]]:
        """List per step {pruning layer: ascending positions of the tokens that enter the next}."""
        return [
            {
                layer: (chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen).tolist()
                for layer, chosen in step.items()
            }
            for step in self._selected
        ]

    @property
    def revived(self) -> list[int]:
        """Per layer: the number of tokens of earlier steps that the layer computed later."""
        return self.by_layer([int(count) for count in self._num_revived])

    @property
    def kv_bytes(self) -> int:
        """Bytes of all stored K and V."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def aux_bytes(self) -> int:
        """Bytes of hidden states of the tokens that may be revived."""
        return 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all that grows with the text, room for more tokens included."""
        return sum(cache.allocated_bytes for cache in self.caches)

    def prefill(self, token_ids: Tensor) -> Tensor:
        """Run the prompt [n]: the logits [v] of its last token.

        Only an `adaptive` method waits for the device.
        """
        n = token_ids.shape[0]
        return self._prefill(self.decoder.embed(token_ids, self._all_positions[:n]), n)

    def _prefill(self, tokens: Tokens, length: int) -> Tensor:
        """Run these tokens of a prompt of `length` tokens."""
        self._selected.append({})
        self.length = length
        self._in_prefill = True
        with backends(self.decoder.model, self.decoder.devices, decodes=False):
            logits = _run([self], [tokens])[0]
        self._in_prefill = False
        return logits

    def fork(self) -> Self:
        """Copy the state; nothing is shared but the model and the method."""
        return copy.deepcopy(self, {id(shared): shared for shared in (self.decoder, self._method)})

    def step(self, token_id: Tensor) -> Tensor:
        """Run the token [1] of a decoding step: the logits [v] after it."""
        return step_together([self], [token_id])[0]

    def begin_step(self) -> Tensor:
        """Lengthen the text by the token of a decoding step: its position [1]."""
        self._selected.append({})
        self.length += 1
        return self._all_positions[self.length - 1 : self.length]

    def enter(self, index: int, tokens: Tokens) -> None:
        """Prepare a run through group `index`: slots, masks, scores, counts."""
        group, cache = self.groups[index], self.caches[index]
        records = group.scores and (self._in_prefill or group.score_in_decode)
        scores = group.scores if group.scores and records else NO_SCORES
        cache.advance(tokens.positions, self.length, tokens.is_newest)
        self.context = AttentionContext(
            cache, tokens.positions, self.length, scores, self.chosen(cache), tokens.ranks
        )
        if self._in_prefill:
            self.context.sees = self._sees
        # in decoding one token was generated: the newest
        from_prompt = len(tokens) if self._in_prefill else len(tokens) - 1
        # not `+=`: `computed` holds this tensor
        self._num_computed[index] = self._num_computed[index] + from_prompt

    def choose(self, index: int) -> None:
        """Choose the tokens that a decoding step goes on with after group `index`.

        Never waits for the device.
        """

    def missing(self, index: int) -> Tensor | None:
        """Mark the positions that the next group computes in a decoding step, [p] bool.

        None if `leave` needs no mark. Never waits for the device.
        """
        return None

    def leave(self, index: int, tokens: Tokens, positions: Tensor | None) -> Tokens:
        """Return the tokens that enter the next group, revived ones included; the newest last.

        positions: those that `missing` marks, ascending; None without a mark.
        By default the method chooses in prefill, and in decoding all tokens go on.
        """
        method, group, depth = self._method, self.groups[index], self.decoder.depth
        if method is None or not self._in_prefill:
            return tokens
        layer, selection, kv_heads = group.layers.stop, Selection(), self.decoder.shape.kv_heads
        if group.scores is not None:
            recorded = self.context.take_each() if group.scores.layers else []
            n, notes = self.prompt_tokens, self._notes
            at = Boundary(layer, depth, n, tokens.positions, kv_heads, notes)
            selection = method.prune(at, recorded)
        if selection.stored is not None:
            heads = (kv_heads,)
            self.check_selection(method.label, selection.stored, len(tokens), None, heads=heads)
            self.caches[index].retain(selection.stored)
        entering = selection.entering
        if entering is not None:
            is_known = layer < depth.count and not method.adaptive
            declared = self.groups[index + 1].prompt_tokens if is_known else None
            self.check_selection(method.label, entering, len(tokens), declared, len(tokens) - 1)
            for cache in self.caches[: index + 1] if selection.forget else ():
                cache.retain(entering)  # each of them holds exactly the tokens of this group
            tokens = tokens[entering]
        if entering is not None or layer in method.pruning_layers(depth):
            self.note_selection(layer, tokens.positions)
        return tokens

    def by_layer(self, values: Sequence[Any]) -> list[Any]:
        """Repeat a value of each group for each of its layers."""
        return [
            value for group, value in zip(self.groups, values, strict=True) for _ in group.layers
        ]

    def chosen(self, cache: GroupCache) -> Chosen | None:
        """Say which stored tokens the step's tokens attend to; None for all."""
        return None

    def note_selection(self, layer: int, chosen: Tensor) -> None:
        """Note this step's choice after `layer`: positions [k], ascending, or a mask [p] bool."""
        self._selected[-1][layer] = chosen

    def check_selection(
        self,
        label: str,
        kept: Tensor,
        m: int,
        count: int | None,
        must_keep: int | None = None,
        heads: tuple[int, ...] = (),
    ) -> None:
        """Refuse indices `kept` of m tokens by number, shape and dtype, without a wait.

        label: the method's.
        count: how many the method declares; None if that depends on the prompt.
        must_keep: what the last index must be; None for any.
        heads: (g,) if each key head has its indices.
        """
        if not isinstance(kept, Tensor):
            found = type(kept).__name__
            raise UserError(f"{label}: selected a {found}: expected a tensor of indices")
        k = kept.numel()
        if k == 0 or k != (count or k):
            raise UserError(
                f"{label}: selected {k} of {m} tokens: expected {count or 'at least one'}, as it "
                "declares (adaptive = True if the number depends on the prompt)"
            )
        is_shaped = kept.ndim == 1 + len(heads) and kept.shape[:-1] == heads
        if not is_shaped or kept.dtype == torch.bool or kept.is_floating_point():
            found = f"{list(kept.shape)} of {kept.dtype}"
            expected = f"indices [{', '.join([*map(str, heads), 'k'])}]"
            raise UserError(f"{label}: selected {found}: expected {expected}")
        self._unchecked.append((label, kept, m, must_keep))

    def check_selected_values(self) -> None:
        """Check the values of all selections so far. Waits for the device. Raises UserError."""
        unchecked, self._unchecked = self._unchecked, []
        for label, kept, m, must_keep in unchecked:
            indices = kept.numpy(force=True)
            least, most = indices.min(), indices.max()
            falls = np.diff(indices) <= 0
            if least < 0 or most >= m:
                reason = f"selected {least} to {most}: expected indices of {m} tokens"
            elif falls.any():
                before, after = indices[..., :-1][falls][0], indices[..., 1:][falls][0]
                reason = f"selected {before} before {after}: expected ascending indices, each once"
            elif must_keep is not None and indices[-1] != must_keep:
                kept_too = "expected it to be kept (NaN scores come first)"
                reason = f"dropped the newest of {m} tokens: {kept_too}"
            else:
                continue
            raise UserError(f"{label}: {reason}")


def step_together(sessions: Sequence[Session], token_ids: Sequence[Tensor]) -> Tensor:
    """Run the token [1] of a decoding step in each session: the logits [r, v] after them."""
    positions = [session.begin_step() for session in sessions]
    decoder = sessions[0].decoder
    with backends(decoder.model, decoder.devices, decodes=True):
        return _run(sessions, decoder.embed_each(token_ids, positions))


def _run(sessions: Sequence[Session], tokens: list[Tokens]) -> Tensor:
    """Run a step's tokens of each session through all groups: [r, v] logits of the last tokens.

    The groups of two sessions may end at different layers: all run together up to the next end.
    Waits for the device at most once there, and once more for each session that sorts K and V.
    """
    decoder = sessions[0].decoder
    group_of = [0] * len(sessions)  # the group that each session is in
    at_boundary: Sequence[int] = range(len(sessions))  # the sessions that enter a group
    start = 0  # layers that have run
    while start < len(decoder.layers):
        ends = [
            session.groups[index].layers.stop
            for session, index in zip(sessions, group_of, strict=True)
        ]
        stop = min(ends)
        for number in at_boundary:
            sessions[number].enter(group_of[number], tokens[number])
        contexts = [session.context for session in sessions]
        tokens = decoder.run(contexts, tokens, range(start, stop))
        at_boundary, start = [number for number, end in enumerate(ends) if end == stop], stop
        for number in at_boundary:
            sessions[number].choose(group_of[number])
        masks = {number: sessions[number].missing(group_of[number]) for number in at_boundary}
        positions = _to_indices({key: mask for key, mask in masks.items() if mask is not None})
        for number in at_boundary:
            index, missing = group_of[number], positions.get(number)
            tokens[number] = sessions[number].leave(index, tokens[number], missing)
            group_of[number] += 1
    for session in sessions:
        session.computed.append(session.by_layer(session._num_computed))
    return decoder.last_logits([part.hidden for part in tokens])


def _to_indices(masks: dict[int, Tensor]) -> dict[int, Tensor]:
    """Turn masks [p] into ascending positions, in one wait for the device."""
    if len(masks) <= 1:
        return {number: mask.nonzero()[:, 0] for number, mask in masks.items()}
    counts = torch.stack([mask.sum() for mask in masks.values()]).tolist()
    return {
        number: torch.nonzero_static(mask, size=count)[:, 0]
        for (number, mask), count in zip(masks.items(), counts, strict=True)
    }
