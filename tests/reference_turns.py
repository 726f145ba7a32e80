"""Obvious, slow, independent versions of several turns on one text, for the tests only.

A turn adds tokens to the text and asks for an answer. Nothing here is shared with the ``lazyllm`` package. As in
:mod:`tests.reference`, tokens live in dictionaries, and attention is computed for one query token at a time in float64.

Notation as there. The text: all token ids so far, prompts and answers, in order; a token's position is its place in it.
A step: one pass that gives one set of logits. Step 0 of a turn takes in the turn's tokens, later steps decode.

Decided here, because paper and issue leave it open:

The text
 1. An answer's last token is never run by that answer: it is pending. It is the first row of the next turn's step 0,
    before the turn's own m tokens. That holds for an end token too.
 2. Prompt tokens: those of all turns. Generated tokens: all others, the pending one among them.

LazyLLM
 3. Step 0 of every turn selects as the prefill does: `ceil(ratio * c)` of the c prompt tokens of all turns that
    entered the layer in this step, the newest among them, which always stays. Decoding steps select as in turn 1.
 4. Generated tokens of all turns stay and do not count. With ``prune_generated`` all but a newest one do both.
 5. ``revive=False``: later turns' tokens run over what the first prefill selected, and nothing is selected again.
    Nothing waits in the Aux Cache.
 6. RoPE that depends on the length: a token keeps the length of the text in the step in which it entered layer 1.
 7. Chunks of a prompt see the length of the whole step (6), and only the last one selects, among the rows of all. So
    chunks change no number, and there are none here.

Methods that drop for good
 8. Continue: the pending token and the m new ones run in every layer over what is left of its cache, and stay there.
    Nothing is selected or dropped again; no draft or scoring model runs. Positions are those of the text. If turn 1
    renumbered the kept tokens, positions go on behind them, and so do lengths (6). The baseline: nothing was dropped.
 9. Again: a first turn on the whole text so far, all of it a prompt. So it needs no oracle of its own.

Counters
10. Bytes are of what is held, not of what is reserved: keys and values in the model's dtype, of each layer and head;
    hidden states at boundaries. A pending token holds nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel as Model

from tests.field_oracles import Cache, FieldOutput, Ids, Scores, run_token
from tests.reference import HandModel, Pair, keep_count


@dataclass
class TurnOutput:
    """One answer. Lists have an entry for each step of this turn.

    Attributes:
        token_ids: the generated tokens, the end token (if reached) included.
        logits: the logits [V] that chose the token.
        selected: {boundary: sorted positions of the step's set after it, generated tokens and the newest included}.
        revived: {boundary: sorted positions that left the Aux Cache there and entered the next layer}.
        importance: {boundary: {position: mean attention probability of the newest token}} of the step's set before it.
        computed: [steps, L] int, distinct prompt tokens, of all turns, computed in each layer since the first turn.
        aux: {boundary: positions whose hidden state is held there at the end of the answer}.
        kv_bytes, aux_bytes: held at the end of the answer.
        margin: as of :class:`tests.reference.ReferenceOutput`, over this answer.
    """

    token_ids: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    selected: list[dict[int, list[int]]] = field(default_factory=list)
    revived: list[dict[int, list[int]]] = field(default_factory=list)
    importance: list[dict[int, Scores]] = field(default_factory=list)
    computed: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    aux: dict[int, set[int]] = field(default_factory=dict)
    kv_bytes: int = 0
    aux_bytes: int = 0
    margin: float = float("inf")


def _kv_bytes(hand: HandModel, model: Model, num_pairs: int) -> int:
    """Bytes of key and value of ``num_pairs`` tokens, each in one KV head of one layer."""
    return num_pairs * 2 * hand.head_dim * model.dtype.itemsize


class LazyTurns:
    """LazyLLM over several turns. With an empty schedule: the baseline.

    There is no Aux Cache here: every layer remembers all hidden states of its output. A selected token that was not in
    the next layer yet enters it from there. The size of the Aux Cache follows by counting.

    Args:
        model: a Hugging Face model that :class:`HandModel` knows; only its weights are used.
        schedule: {pruning layer, from 1: keep ratio in (0, 1]}.
        prune_generated, revive: as of :func:`tests.reference.lazy_reference`.
    """

    def __init__(
        self, model: Model, schedule: Mapping[int, float], prune_generated: bool = False, revive: bool = True
    ) -> None:
        self.model, self.hand, self.schedule = model, HandModel(model), dict(schedule)
        self.prune_generated, self.revive = prune_generated, revive
        self.layers = range(1, self.hand.num_layers + 1)

        self.text: list[int] = []
        self.prompt: set[int] = set()  # positions of prompt tokens
        self.num_run = 0  # number of the text's first tokens that have been in a step
        self.reach: dict[int, int] = {}
        self.kv: dict[int, dict[int, Pair]] = {layer: {} for layer in self.layers}
        self.after: dict[int, dict[int, np.ndarray]] = {layer: {} for layer in (0, *self.layers)}  # 0: embeddings
        self.counts: Counter[tuple[int, int]] = Counter()  # of (layer, position): how often it was computed
        self.first_selected: dict[int, set[int]] = {}  # by the first prefill
        self.first_length = 0

    def answer(self, new_ids: Ids, max_new_tokens: int) -> TurnOutput:
        """Append a turn's tokens to the text and generate greedily."""
        out, computed = TurnOutput(), []
        self.prompt |= set(range(len(self.text), len(self.text) + len(new_ids)))
        self.text += new_ids
        self.first_length = self.first_length or len(self.text)
        while len(out.token_ids) < max_new_tokens:
            self._step(out)
            computed.append([len(self.prompt & set(self.after[layer])) for layer in self.layers])
            out.token_ids.append(int(np.argmax(out.logits[-1])))  # the lowest id wins ties
            self.text.append(out.token_ids[-1])
        assert max(self.counts.values()) == 1, "a token was computed twice in a layer"
        out.computed = np.array(computed, dtype=np.int64)
        out.aux = {boundary: self._waiting(boundary) for boundary in sorted(self.schedule)}
        held = sum(len(positions) for positions in out.aux.values())
        out.aux_bytes = held * self.model.config.hidden_size * self.model.dtype.itemsize
        num_pairs = self.hand.num_kv_heads * sum(len(stored) for stored in self.kv.values())
        out.kv_bytes = _kv_bytes(self.hand, self.model, num_pairs)
        return out

    def _waiting(self, boundary: int) -> set[int]:
        """Computed up to the boundary and not beyond. Without revival, nothing waits."""
        if boundary == self.hand.num_layers or not self.revive:
            return set()
        return set(self.after[boundary]) - set(self.after[boundary + 1])

    def _step(self, out: TurnOutput) -> None:
        """All tokens of the text that have not been in a step, through the model."""
        rows = range(self.num_run, len(self.text))
        for p in rows:
            self.after[0][p] = self.hand.embed(self.text[p])
            self.reach[p] = len(self.text)
        for by_boundary in (out.selected, out.revived, out.importance):
            by_boundary.append({})

        active = set(range(len(self.text)))  # the step's set
        for layer in self.layers:
            before = set(self.after[layer])
            importance = self._enter(layer, active)
            if layer in self.schedule:
                active = self._select(layer, active, importance, out)
                beyond = active if layer == self.hand.num_layers else set(self.after[layer + 1])
                out.importance[-1][layer] = importance
                out.selected[-1][layer] = sorted(active)
                out.revived[-1][layer] = sorted((active & before) - beyond)
        out.logits.append(self.hand.logits(self.after[self.hand.num_layers][rows[-1]]))
        self.num_run = len(self.text)

    def _enter(self, layer: int, active: set[int]) -> Scores:
        """Run the tokens of the set that the layer has not seen yet; attention of the last one, mean over heads."""
        new = [p for p in sorted(active) if p not in self.after[layer]]
        for p in new:
            self.kv[layer][p] = self.hand.key_value(layer, self.after[layer - 1][p], p, self.reach[p])
        importance = dict.fromkeys(sorted(active), 0.0)  # 0 outside the layer's window
        for p in new:
            seen = [other for other in sorted(active) if self.hand.sees(layer, p, other)]
            pairs = [self.kv[layer][other] for other in seen]
            after, attention, _ = self.hand.layer(layer, self.after[layer - 1][p], p, self.reach[p], pairs)
            self.after[layer][p] = after
            self.counts[layer, p] += 1
            if p == max(active):
                importance |= dict(zip(seen, attention.mean(axis=0).tolist(), strict=True))
        return importance

    def _select(self, boundary: int, active: set[int], importance: Scores, out: TurnOutput) -> set[int]:
        """The tokens of the step's set that continue."""
        if not self.revive and boundary in self.first_selected:
            return {p for p in active if p in self.first_selected[boundary] or p >= self.first_length}
        newest = max(active)
        counted = set(active) if self.prune_generated else active & self.prompt
        if newest not in self.prompt:
            counted -= {newest}
        room = keep_count(self.schedule[boundary], len(counted)) - (newest in counted)
        ranking = sorted(counted - {newest}, key=lambda p: (-importance[p], p))
        kept, dropped = ranking[:room], ranking[room:]
        if kept and dropped and (gap := importance[kept[-1]] - importance[dropped[0]]) > 0:
            out.margin = min(out.margin, gap)
        selected = (active - set(dropped)) | {newest}
        self.first_selected.setdefault(boundary, selected)
        return selected


# ---------------------------------------------------------------------------------------------------------------------
# Methods that drop for good
# ---------------------------------------------------------------------------------------------------------------------


class ContinuedTurns:
    """Later turns over the cache that a method's first turn left.

    Args:
        model: the model of the first turn.
        first: the first turn, by :mod:`tests.field_oracles`. It is left as it is.
    """

    def __init__(self, model: Model, first: FieldOutput) -> None:
        self.model, self.hand = model, HandModel(model)
        self.cache: Cache = copy.deepcopy(first.stored)
        self.pending = first.token_ids[-1]
        self.position = first.decode_from + len(first.token_ids) - 1  # of the pending token
        self.computed = [max(layer) for layer in zip(*first.passes, strict=True)]  # a second pass reads the same tokens

    def answer(self, new_ids: Ids, steps: int) -> TurnOutput:
        """Append a turn's tokens and generate ``steps`` tokens greedily. Nothing is selected."""
        out, rows = TurnOutput(), [self.pending, *new_ids]
        self.computed = [count + len(new_ids) for count in self.computed]
        while len(out.token_ids) < steps:
            reach = self.position + len(rows)
            newest = [self._run(token, reach) for token in rows][-1]  # one by one is all at once: attention is causal
            out.logits.append(self.hand.logits(newest))
            self.pending = int(np.argmax(out.logits[-1]))  # the lowest id wins ties
            out.token_ids.append(self.pending)
            rows = [self.pending]
        out.selected, out.revived, out.importance = [{}] * steps, [{}] * steps, [{}] * steps
        out.computed = np.array([self.computed] * steps, dtype=np.int64)
        num_pairs = sum(len(held) for heads in self.cache.values() for held in heads)
        out.kv_bytes = _kv_bytes(self.hand, self.model, num_pairs)
        return out

    def _run(self, token: int, reach: int) -> np.ndarray:
        """One token through all layers, into the cache; its hidden state after the last layer."""
        newest, _ = run_token(self.hand, self.cache, token, self.position, reach)
        self.position += 1
        return newest
