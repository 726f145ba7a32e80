"""Later turns of the methods that drop tokens for good: obvious and slow, for the tests only.

Continue: the pending token and the m new ones run in every layer over what is left of its cache, and stay there.
Nothing is selected or dropped again; no draft or scoring model runs. Positions are those of the text. If turn 1
renumbered the kept tokens, positions go on behind them, and so do lengths. The baseline: nothing was dropped.

Again: a first turn on the whole text so far, all of it a prompt. So it needs no oracle of its own.
LazyLLM's turns, and what else was decided: `tests.reference`.
"""

import copy

import numpy as np
from transformers import PreTrainedModel as Model

from tests.field_oracles import Cache, FieldOutput, Ids, run_token
from tests.reference import HandModel, ReferenceOutput, kv_bytes_of


class ContinuedTurns:
    """Later turns over the cache that a method's first turn left.

    model: the model of the first turn.
    first: the first turn, by `tests.field_oracles`. It is left as it is.
    """

    def __init__(self, model: Model, first: FieldOutput) -> None:
        self.model, self.hand = model, HandModel(model)
        self.cache: Cache = copy.deepcopy(first.stored)
        self.pending = first.token_ids[-1]
        self.position = first.decode_from + len(first.token_ids) - 1  # of the pending token
        self.computed = [max(layer) for layer in zip(*first.passes, strict=True)]  # a second pass reads the same tokens

    def answer(self, new_ids: Ids, steps: int) -> ReferenceOutput:
        """Append a turn's tokens and generate `steps` tokens greedily. Nothing is selected."""
        out, rows = ReferenceOutput(), [self.pending, *new_ids]
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
        out.kv_bytes = kv_bytes_of(self.hand, self.model, num_pairs)
        return out

    def _run(self, token: int, reach: int) -> np.ndarray:
        """One token through all layers, into the cache; its hidden state after the last layer."""
        newest, _ = run_token(self.hand, self.cache, token, self.position, reach)
        self.position += 1
        return newest
