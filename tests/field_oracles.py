"""Obvious, slow, independent versions of the field's other methods that shorten prefill, for the
tests only.

GemFilter (arXiv 2409.17422), FastKV (2502.01068), SpecPrefill (2502.02789), CLAA (2602.16054), ASL
(2601.07667), PyramidInfer (2405.12532), UniPrefill (2605.06221), PromptDistill (2503.23274),
TriangleMix (2507.21526). Written from descriptions of the algorithms, not from the authors' code
and not from the `lazyllm` package. Tokens live in dictionaries keyed by their position, attention
is computed for one query token at a time (`tests.reference.HandModel`), everything is float64.

Notation as in `tests.reference`: layers are counted from 1; positions, heads and chunks from 0; `n`
prompt tokens. A boundary's key in `selected` is the layer whose attention selected; 0: before layer
1.

Decided here, because the descriptions leave it open:

All methods 1. Ties go to the lower position (chunks: to the lower chunk), as in the LazyLLM
 reference. Max pooling ties neighbours
    exactly, so this rule is used often: a top-k that does not order ties is not enough.
 2. A share is the decimal number it was written as (0.29 of 100 is 29). `int(n * keep)` becomes an
    exact floor, `ceil(keep * chunks)` an exact ceiling: the authors' binary products differ only by
    a rounding error. `keep` as int is a number of tokens, at most all of them; as float it is a
    share in (0, 1]. GemFilter and ASL round a share up (never 0 tokens; LazyLLM's rule). FastKV and
    CLAA round it down (the authors' `int`).
 3. Softmax is float64 here. The authors' float32 is a matter of precision, not of the method. 4.
 Attention probabilities are the model's own: its scale, softcap and sliding window. A key outside a
 layer's window
    has probability 0 for that query. Windows go by positions, also among kept tokens.
 5. `selected` names a boundary even if nothing is dropped there (all positions), if the boundary is
    known before the run. ASL's is not: without a cut its `selected` is empty.
 6. Nothing is dropped in decoding. The first logits come from the last token that was kept,
    whatever its position. Decoding goes on at position n (GemFilter: at the number of kept tokens).
 7. RoPE that depends on the length (dynamic NTK, LongRoPE): the length is n in prefill although
    tokens are dropped (GemFilter's second pass: the number of kept tokens), position + 1 in
    decoding.
 8. Pooling kernels are odd, with stride 1. Average pooling divides by the kernel at the borders too
    (zeros count, PyTorch's default). Max pooling takes the values that exist (probabilities are not
    negative, so zeros are the same).
 9. Prompts of 1 to 3 tokens and windows longer than the prompt are right for every method: tokens
    inside a window or among the first few stay. Arguments are not checked.

GemFilter 10. The score is the raw product after RoPE (and after query/key norms): no scale, no
softcap, no softmax, and no
    sliding window ("with every key").
11. The first pass ends at the keys and the last query of `layer`. It does not happen if `keep >=
    n`: there is nothing to select, and the result is the plain model's. `passes` then holds one
    list.
12. `sound`: token 0 and the last `window` tokens (default 8, FastKV's) stay and count in `keep`. If
    `keep` is smaller than their number, they alone stay. Scores and pooling are unchanged.

FastKV 13. Window scores: probabilities summed over the last `window` queries, then pooled for each
query head, then summed
    over the GQA group. Only tokens outside the window are pooled and ranked: the pooling ends where
    the window begins (SnapKV's rule).
14. The cut keeps `max(floor(keep * n), window)` tokens, so the window stays whatever `keep` is.
    There is no cut if that is n or more. The score is the sum over KV heads of the scores in 13
    (pooled, not raw).
15. SnapKV up to and including `layer`: `max(floor(retain * n), window)` tokens per KV head. In
    later layers, with m entering tokens: `max(floor(m * retain / keep), window)`, at most m; the
    window is the last `window` of them. `retain=1` turns SnapKV off in all layers. Both are shares:
    the constant budgets are not written here.
16. SnapKV may keep tokens that the layer's sliding window hides from decoding. They count and are
never seen.
17. `layer` may be the last one: the cut is then reported and changes no number.

SpecPrefill 18. `lookahead` queries: the last prompt token's and those of the first `lookahead - 1`
greedy tokens of the draft.
    An end token ends the look-ahead: it is not run and gives no query (as in greedy decoding).
19. Softmax over the prompt keys that the query sees in that draft layer (4). If it sees none, all
scores are 0. 20. Chunks begin at position 0. The last may be short; its score is the mean over the
tokens it has.
21. `sound`: the chunks that hold token 0 or one of the last `chunk` tokens are taken first and
    count among the `ceil(keep * chunks)`. If they are more than that, they alone stay. Whole chunks
    keep the method's grid.

CLAA 22. FastKV's window scores (13, per KV head, max pooling as in FastKV's evaluation) of layers
`layer - layers + 1` to
    `layer` (as many as there are), z-normalised for each (layer, KV head) over the tokens outside
    the window, without an epsilon. Dividing the variance by N or N - 1 changes no rank. A row of
    equal values becomes zeros.
23. The cut keeps as many tokens as FastKV's (14).
24. KV: SnapKV as in 15 with `retain = keep` (the same rate for both), each layer by its own scores
    per KV head. So layers after the cut hold all that enters. The first `layers` layers hold all n
    tokens (the authors' "layers < 4" at the default). `retain=1` turns SnapKV off.

ASL 25. Ranks of the tokens outside the window, in each layer from `first` on, by window scores (13,
average pooling,
    summed over heads). The first variance is known after `layers` ranked layers (default 8), at
    layer `first + layers - 1`.
26. Variance: for each token among the `keep` best in at least one of the last `layers` layers, the
    variance of its ranks over these layers; then the mean over these tokens.
27. Cut after the first layer whose variance is less than `threshold` times the first variance, or
    is 0 (ranks no longer change; the ratio could be 0 / 0). The last layer is not tried: nothing
    would be saved.
28. Kept: the `keep` best outside the window by that layer's score, and the window on top of them.
    No ranking and no cut if n <= keep + window.
29. KV: SnapKV with a budget of `retain` tokens per KV head in every layer, the window among them,
    average pooling. `None`: as many as `keep` (the authors: 2048 both). `retain=1` turns SnapKV
    off.

PyramidInfer 30. The recent tokens are the last `max(1, floor(recent * n))` of the prompt, the same
in all layers. They always
    stay, and so do the first `first` (4) tokens, which count among the older ones.
31. After layer l, from 1 to L - 1, `floor(share * o + 1e-9)` of the o older tokens that entered it
    stay, with share = (1 - decay)(cos(pi (l - 1) / L) + 1) / 2 + decay: the authors' index counts
    from 0, so nothing goes after layer 1. Shares multiply ("the last layer sees 20 % of the older
    80 %"). 1e-9 keeps whole products whole.
32. Score: the sum over the recent queries of a weight times the mean over query heads of the
    probability. Weights are spaced evenly from 1 to `weight` (1.2) in the order of positions; a
    single recent query weighs 1.
33. A layer's cache holds all that entered the layer. No pooling.

UniPrefill 36. The release cuts between a layer's attention and its MLP. An MLP sees one token at a
time, so a cut after the layer
    has the same results; `passes` counts the tokens that enter the layer.
37. Layers are those given, also the last one. A layer that at most `first + last` tokens enter cuts
nothing.
38. Ties of blocks go to the later block, as in the release: the one exception from 1. The mass
    before a block is exact (fractions of the float64 sums), so `p=1` keeps everything.
39. With fewer than `window` tokens, all their queries count. The last block may be short; its mass
is not scaled.

PromptDistill 40. Each of `layers` runs whole, for all tokens that reached it. Then the best of
these go on, their hidden states
    at their own positions: `keep` is a number or a share of the n prompt tokens, one for each of
        the layers.
41. The score is the last query's attention logit (the model's scale and softcap), summed over all
    heads; the last token's own sum counts as 0, as in the release. Then it is averaged over
    neighbours among the tokens there, as GemFilter's (10). A key outside the layer's window counts
    as -infinity.
42. The last prompt token always stays, on top of the `keep` best others, as in the release: its
    hidden state gives the first logits.
43. `forget`: what is not selected leaves the caches of the layers before the cut, too. Else each
    layer holds all that entered it.

TriangleMix: all tokens go through all layers and are stored; attention sees fewer keys in prefill
44. Decoding is dense. `passes` holds n for each layer; `pairs` counts, for each layer and
    all its query heads, the (query, key) pairs that prefill attends to. A layer's own sliding
    window also holds.
45. The first `dense` layers are dense (a number, or a share of the depth rounded up). In others a
    query sees the first `sinks` tokens, the last `window` tokens up to itself, and everything if it
    is one of the last `last` tokens.

Sliding windows 48. Where several layers score together (static pruning, CLAA's cut, the
look-ahead), only those without a window do; if
    each of them has one, all do. A single layer that is given as an argument scores whether or not
    it has a window.
49. ASL ranks in the layers from `first` on, without the last layer, by the same rule; `layers`
counts ranked ones.
50. PyramidInfer drops after layers without a window only, if the model has any: there, as many go
    on as 31 gives after this layer, each layer before it with its share.
51. SnapKV (13, 15, 24, 29) goes by a layer's own scores, with a window or without.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from math import cos, floor, pi

import numpy as np
from transformers import PreTrainedModel as Model

from tests.reference import HandModel, Pair, keep_count

Ids = Sequence[int]
Scores = dict[int, float]  # {position: score}
# {position of the query: for each query head, {position of the key: probability}}
Attention = dict[int, list[Scores]]
Cache = dict[int, list[dict[int, Pair]]]  # {layer: for each KV head, {position: key and value}}


@dataclass
class FieldOutput:
    """The result of every method here.

    token_ids: the greedily generated tokens, one per step.
    logits: per step, the logits [V] that chose the token.
    selected: {boundary: sorted positions that stay}.
    scores: {boundary: {position: score}} of the tokens that were ranked. SpecPrefill: of all
        tokens, before chunks.
    passes: prompt tokens that enter each layer in prefill, one list of L numbers for each pass
        through the model.
        GemFilter's first pass has 0 after `layer`; a draft is not counted.
    caches: {layer: for each KV head, sorted prompt positions that the first decoding step finds in
        the cache}.
    stored: keys and values at the end; the last generated token has none.
    decode_from: position of the first generated token.
    lookahead: greedy tokens of the draft (SpecPrefill) that gave a query.
    variances: ASL's, from its first one to the last it computed.
    pairs: {layer: (query, key) pairs that prefill attends to, over all query heads}; sparse
        attention only.
    margin: the smallest score difference above 0 between a kept and a dropped token, over all
        selections (infinite if there was none). A comparison is decisive if this is well above
        rounding errors.
    """

    token_ids: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    selected: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[int, Scores] = field(default_factory=dict)
    passes: list[list[int]] = field(default_factory=list)
    caches: dict[int, list[list[int]]] = field(default_factory=dict)
    stored: Cache = field(default_factory=dict)
    decode_from: int = 0
    lookahead: list[int] = field(default_factory=list)
    variances: list[float] = field(default_factory=list)
    pairs: dict[int, int] = field(default_factory=dict)
    margin: float = float("inf")

    def best(self, scores: Scores, count: int, forced: Iterable[int] = ()) -> list[int]:
        """The positions in `forced` and the best others, `count` in all if there is room; ties
        to the lower.
        """
        kept = set(forced)
        ranking = [p for p in _ranked(scores) if p not in kept]
        room = min(max(count - len(kept), 0), len(ranking))
        if 0 < room < len(ranking):
            gap = scores[ranking[room - 1]] - scores[ranking[room]]
            self.margin = min(self.margin, gap) if gap > 0 else self.margin
        return sorted(kept | set(ranking[:room]))


# --- Small pieces ---


def _ranked(scores: Scores) -> list[int]:
    """Positions from the best to the worst."""
    return sorted(scores, key=lambda p: (-scores[p], p))


def tokens_kept(keep: float, n: int) -> int:
    """`keep` as a number of tokens (int, at most n) or as a share of n, rounded up (float)."""
    return keep_count(keep, n) if isinstance(keep, float) else min(keep, n)


def without_window(hand: HandModel, layers: Iterable[int]) -> list[int]:
    """Those of `layers` that have no sliding window; all of them if each has one (48)."""
    all_layers = list(layers)
    return [layer for layer in all_layers if hand.windows[layer - 1] is None] or all_layers


def pooled(values: Sequence[float], width: int, pooling: str = "average") -> list[float]:
    """Average pooling with counted zeros around the values, or max pooling; stride 1, as many
    values as before.
    """
    around = [list(values[max(0, i - width // 2) : i + width // 2 + 1]) for i in range(len(values))]
    return [max(near) if pooling == "max" else sum(near) / width for near in around]


def run_layer(
    hand: HandModel, layer: int, hidden: Mapping[int, np.ndarray], reach: int
) -> tuple[dict[int, Pair], dict[int, np.ndarray], Attention]:
    """All tokens {position: hidden state} through one layer: their keys and values, hidden
    states, and attention.
    """
    kv = {p: hand.key_value(layer, hidden[p], p, reach) for p in hidden}
    after: dict[int, np.ndarray] = {}
    attention: Attention = {}
    for p in sorted(hidden):
        seen = [other for other in sorted(hidden) if hand.sees(layer, p, other)]
        after[p], rows, _ = hand.layer(layer, hidden[p], p, reach, [kv[other] for other in seen])
        attention[p] = [dict(zip(seen, row.tolist(), strict=True)) for row in rows]
    return kv, after, attention


def _by_head(kv: Mapping[int, Pair], held: Sequence[Collection[int]]) -> list[dict[int, Pair]]:
    """For each KV head g, key and value [d] of the tokens in `held[g]`."""
    return [
        {p: (kv[p][0][g], kv[p][1][g]) for p in sorted(positions)}
        for g, positions in enumerate(held)
    ]


def run_token(
    hand: HandModel, cache: Cache, token: int, position: int, reach: int | None = None
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """One new token through all layers, into the cache: hidden state after the last layer, {layer:
    query [H, d]}.

    reach: as in `tests.reference.rope_frequencies`; by default the token is the last one of the
        text.
    """
    hidden, queries, reach = hand.embed(token), {}, reach or position + 1
    for layer, heads in cache.items():
        queries[layer] = hand.query(layer, hidden, position, reach)
        k, v = hand.key_value(layer, hidden, position, reach)
        for g, held in enumerate(heads):
            held[position] = (k[g], v[g])
        seen = [
            [pair for p, pair in held.items() if hand.sees(layer, position, p)] for held in heads
        ]
        hidden, _, _ = hand.attend_by_head(layer, hidden, position, reach, seen)
    return hidden, queries


def generate(
    hand: HandModel, cache: Cache, newest: np.ndarray, start: int, steps: int, out: FieldOutput
) -> None:
    """Greedy decoding: from the hidden state that gives the first logits, with `start` as the
    first new position.
    """
    out.caches = {layer: [sorted(held) for held in heads] for layer, heads in cache.items()}
    out.stored, out.decode_from = cache, start
    while True:
        out.logits.append(hand.logits(newest))
        out.token_ids.append(int(np.argmax(out.logits[-1])))  # the lowest id wins ties
        if len(out.token_ids) == steps:
            return
        newest, _ = run_token(hand, cache, out.token_ids[-1], start + len(out.token_ids) - 1)


Held = tuple[Iterable[int], Sequence[Collection[int]] | None]  # as `run` says of `after_layer`
AfterLayer = Callable[[int, Attention], Held]


def run(
    hand: HandModel,
    tokens: Mapping[int, int],
    reach: int,
    steps: int,
    out: FieldOutput,
    after_layer: AfterLayer = lambda layer, attention: (attention, None),
) -> FieldOutput:
    """Prefill of tokens {position: token id}, perhaps with cuts between layers, then decoding from
    position `reach`.

    `after_layer` gets a layer and its attention, and returns the positions that enter the next
    layer and those that the layer's cache holds, for each KV head (None: all that entered).
    """
    cache, last = {}, max(tokens)
    hidden = {p: hand.embed(token) for p, token in tokens.items()}
    out.passes.append([])
    for layer in range(1, hand.num_layers + 1):
        out.passes[-1].append(len(hidden))
        kv, hidden, attention = run_layer(hand, layer, hidden, reach)
        kept, held = after_layer(layer, attention)
        cache[layer] = _by_head(kv, [kv] * hand.num_kv_heads if held is None else held)
        hidden = {p: hidden[p] for p in kept}
    generate(hand, cache, hidden[last], reach, steps, out)
    return out


# --- A selection first, then the kept tokens through the whole model ---


def on_the_rest(model: Model, ids: Ids, kept: Ids, steps: int, renumber: bool) -> FieldOutput:
    """The model on the kept tokens (sorted positions) alone: random drop, prompt compression,
    and the baseline.
    """
    out = FieldOutput(selected={0: list(kept)})
    tokens = {new if renumber else p: ids[p] for new, p in enumerate(kept)}
    return run(HandModel(model), tokens, len(kept) if renumber else len(ids), steps, out)


def gemfilter(
    model: Model,
    ids: Ids,
    layer: int,
    keep: float,
    pool: int = 5,
    sound: bool = False,
    window: int = 8,
    steps: int = 4,
) -> FieldOutput:
    """GemFilter: raw products of one layer's last query, averaged over neighbours; the kept ids run
    as a new prompt.

    `window` matters with `sound` only. Caches are given in positions of the prompt, not of the
    second pass.
    """
    hand, out, n = HandModel(model), FieldOutput(), len(ids)
    count = tokens_kept(keep, n)
    kept = list(range(n))
    if count < n:
        hidden = {p: hand.embed(token) for p, token in enumerate(ids)}
        for number in range(1, layer):
            _, hidden, _ = run_layer(hand, number, hidden, n)
        query = hand.query(layer, hidden[n - 1], n - 1, n)  # [H, d]
        keys = [hand.key_value(layer, hidden[p], p, n)[0] for p in range(n)]  # n of [G, d]
        raw = [
            sum(float(query[h] @ key[hand.kv_head(h)]) for h in range(hand.num_heads))
            for key in keys
        ]
        out.scores[layer] = dict(enumerate(pooled(raw, pool)))
        forced = {0, *range(max(0, n - window), n)} if sound else set()
        kept = out.best(out.scores[layer], count, forced)
        out.passes.append([n] * layer + [0] * (hand.num_layers - layer))
    out.selected[layer] = kept
    run(hand, {new: ids[p] for new, p in enumerate(kept)}, len(kept), steps, out)
    out.caches = {
        number: [[kept[new] for new in held] for held in heads]
        for number, heads in out.caches.items()
    }
    return out


def look_ahead(
    hand: HandModel, ids: Ids, num_queries: int, eos_token_ids: Collection[int], width: int
) -> tuple[Scores, list[int]]:
    """SpecPrefill's scores of the prompt tokens by a model's greedy look-ahead, and the tokens that
    gave a query.

    For each query: softmax over the prompt keys, average pooling, maximum over layers (48) and
    heads. Then the mean over the queries: the last prompt token's and the look-ahead's.
    """
    n, tokens = len(ids), []
    cache: Cache = {
        layer: [{} for _ in range(hand.num_kv_heads)] for layer in range(1, hand.num_layers + 1)
    }
    for p, token in enumerate(ids):  # one by one is all at once: attention is causal
        newest, queries = run_token(hand, cache, token, p, n)
    steps = [queries]
    while (
        len(steps) < num_queries
        and (token := int(np.argmax(hand.logits(newest)))) not in eos_token_ids
    ):
        tokens.append(token)
        newest, queries = run_token(hand, cache, token, n - 1 + len(tokens))
        steps.append(queries)

    query_scores = []
    for ahead, queries in enumerate(steps):
        rows = []
        for layer in without_window(hand, queries):
            query = queries[layer]
            seen = [p for p in range(n) if hand.sees(layer, n - 1 + ahead, p)]
            for head in range(hand.num_heads):
                row = [0.0] * n
                if seen:
                    keys = np.stack([cache[layer][hand.kv_head(head)][p][0] for p in seen])
                    logits = hand.attention_logits(query[head], keys)
                    weights = np.exp(logits - logits.max())
                    for p, probability in zip(
                        seen, (weights / weights.sum()).tolist(), strict=True
                    ):
                        row[p] = probability
                rows.append(pooled(row, width))
        query_scores.append([max(row[p] for row in rows) for p in range(n)])
    return {
        p: sum(scores[p] for scores in query_scores) / len(query_scores) for p in range(n)
    }, tokens


def specprefill(
    model: Model,
    draft: Model,
    ids: Ids,
    keep: float,
    lookahead: int = 8,
    chunk: int = 32,
    pool: int = 13,
    sound: bool = False,
    steps: int = 4,
    eos_token_ids: Collection[int] = (),
) -> FieldOutput:
    """SpecPrefill with one tokenizer: the draft's look-ahead scores chunks, the model runs the best
    ones.

    `keep` is a share of the chunks. `eos_token_ids` end the look-ahead, not the generation.
    """
    hand, out, n = HandModel(model), FieldOutput(), len(ids)
    out.scores[0], out.lookahead = look_ahead(HandModel(draft), ids, lookahead, eos_token_ids, pool)
    chunks = [range(start, min(start + chunk, n)) for start in range(0, n, chunk)]
    means = {
        c: sum(out.scores[0][p] for p in members) / len(members) for c, members in enumerate(chunks)
    }
    forced = {0, max(0, n - chunk) // chunk, len(chunks) - 1} if sound else set()
    best = out.best(means, keep_count(keep, len(chunks)), forced)
    out.selected[0] = [p for c in best for p in chunks[c]]
    return run(hand, {p: ids[p] for p in out.selected[0]}, n, steps, out)


# --- Cuts between layers ---


def window_scores(
    hand: HandModel, attention: Attention, window: int, width: int, pooling: str
) -> list[Scores]:
    """For each KV head, scores of the tokens outside the window of the last `window` tokens of a
    layer (13).
    """
    positions = sorted(attention)
    older, recent = positions[:-window], positions[-window:]
    scores = [dict.fromkeys(older, 0.0) for _ in range(hand.num_kv_heads)]
    for head in range(hand.num_heads):
        summed = [sum(attention[query][head].get(p, 0.0) for query in recent) for p in older]
        for p, score in zip(older, pooled(summed, width, pooling), strict=True):
            scores[hand.kv_head(head)][p] += score
    return scores


def total(rows: Sequence[Scores]) -> Scores:
    """The sum over heads."""
    return {p: sum(row[p] for row in rows) for p in rows[0]}


def snapkv(
    out: FieldOutput, attention: Attention, by_head: Sequence[Scores], window: int, budget: int
) -> list[list[int]]:
    """For each KV head, the window and the best others, `budget` in all (never less than the
    window).
    """
    recent = sorted(attention)[-window:]
    return [out.best(scores, budget, recent) for scores in by_head]


def static_pruning(model: Model, ids: Ids, layer: int, keep: float, steps: int = 4) -> FieldOutput:
    """Pruning once, after `layer`, by the importance averaged over layers 1 to `layer`; the
    pruned leave all layers.
    """
    hand, out, n = HandModel(model), FieldOutput(), len(ids)
    score, scoring = dict.fromkeys(range(n), 0.0), without_window(hand, range(1, layer + 1))
    hidden = {p: hand.embed(token) for p, token in enumerate(ids)}
    for number in range(1, layer + 1):
        _, hidden, attention = run_layer(hand, number, hidden, n)
        for p in score if number in scoring else ():
            score[p] += float(np.mean([row.get(p, 0.0) for row in attention[n - 1]])) / len(scoring)
    out.selected[layer] = kept = out.best(score, tokens_kept(keep, n), {n - 1})

    def after_layer(number: int, attention: Attention) -> Held:
        return kept if number == layer else attention, [kept] * hand.num_kv_heads

    return run(hand, dict(enumerate(ids)), n, steps, out, after_layer)


def fastkv(
    model: Model,
    ids: Ids,
    layer: int,
    keep: float = 0.2,
    retain: float = 0.1,
    window: int = 8,
    pool: int = 7,
    pooling: str = "max",
    steps: int = 4,
) -> FieldOutput:
    """FastKV: one cut after `layer`, and SnapKV per KV head in every layer. `keep`, `retain`:
    shares.
    """
    hand, out, n = HandModel(model), FieldOutput(), len(ids)

    def after_layer(number: int, attention: Attention) -> Held:
        m = len(attention)
        by_head = window_scores(hand, attention, window, pool, pooling)
        share = Fraction(str(retain)) / (Fraction(str(keep)) if number > layer else 1)
        held = snapkv(out, attention, by_head, window, m if retain == 1 else floor(m * share))
        if number != layer:
            return attention, held
        out.scores[layer] = total(by_head)
        out.selected[layer] = out.best(
            out.scores[layer], keep_count(keep, n, floor), sorted(attention)[-window:]
        )
        return out.selected[layer], held

    return run(hand, dict(enumerate(ids)), n, steps, out, after_layer)


def z_normalised(row: Scores) -> Scores:
    """(score - mean) / standard deviation over the tokens; zeros if all scores are equal."""
    if len(set(row.values())) < 2:
        return dict.fromkeys(row, 0.0)
    mean, deviation = np.mean(list(row.values())), np.std(list(row.values()))
    return {p: float((score - mean) / deviation) for p, score in row.items()}


def claa(
    model: Model,
    ids: Ids,
    layer: int,
    keep: float,
    layers: int = 4,
    window: int = 8,
    pool: int = 7,
    retain: float | None = None,
    steps: int = 4,
) -> FieldOutput:
    """CLAA: FastKV's cut by the maximum of z-scored scores over the last layers and heads.
    `retain`: see 24.
    """
    hand, out, n = HandModel(model), FieldOutput(), len(ids)
    count, rows = keep_count(keep, n, floor), {}  # {layer: for each KV head, z-scores}
    scoring = without_window(hand, range(max(1, layer - layers + 1), layer + 1))

    def after_layer(number: int, attention: Attention) -> Held:
        if number > layer:
            return attention, None
        by_head = window_scores(hand, attention, window, pool, "max")
        rows[number] = [z_normalised(row) for row in by_head]
        is_whole = retain == 1 or number <= layers
        held = None if is_whole else snapkv(out, attention, by_head, window, count)
        if number < layer:
            return attention, held
        last = [row for other in scoring for row in rows[other]]
        out.scores[layer] = {p: max(row[p] for row in last) for p in last[0]}
        out.selected[layer] = out.best(out.scores[layer], count, sorted(attention)[-window:])
        return out.selected[layer], held

    return run(hand, dict(enumerate(ids)), n, steps, out, after_layer)


def rank_variance(ranked: Sequence[Ids], count: int) -> float:
    """Mean variance of the ranks of the tokens that are among the `count` best of at least one
    ranking.
    """
    union = {p for ranking in ranked for p in ranking[:count]}
    return float(np.mean([np.var([ranking.index(p) for ranking in ranked]) for p in sorted(union)]))


def asl(
    model: Model,
    ids: Ids,
    first: int,
    threshold: float = 0.3,
    keep: float = 2048,
    window: int = 32,
    layers: int = 8,
    pool: int = 7,
    retain: float | None = None,
    steps: int = 4,
) -> FieldOutput:
    """ASL: a cut after the first layer at which the ranks of the best tokens have settled.
    `retain`: see 29.
    """
    hand, out, n = HandModel(model), FieldOutput(), len(ids)
    count = tokens_kept(keep, n)
    budget = n if retain == 1 else tokens_kept(keep if retain is None else retain, n)
    ranking, ranked = without_window(hand, range(first, hand.num_layers)), list[list[int]]()

    def after_layer(number: int, attention: Attention) -> Held:
        by_head = window_scores(hand, attention, window, pool, "average")
        held = snapkv(out, attention, by_head, window, budget)
        if number not in ranking or out.selected or n <= count + window:
            return attention, held
        scores = total(by_head)
        ranked.append(_ranked(scores))
        if len(ranked) < layers:
            return attention, held
        out.variances.append(rank_variance(ranked[-layers:], count))
        if out.variances[-1] > 0 and out.variances[-1] >= threshold * out.variances[0]:
            return attention, held
        out.scores[number] = scores
        out.selected[number] = out.best(scores, count + window, sorted(attention)[-window:])
        return out.selected[number], held

    return run(hand, dict(enumerate(ids)), n, steps, out, after_layer)


def pyramidinfer(
    model: Model,
    ids: Ids,
    recent: float = 0.2,
    decay: float = 0.9,
    weight: float = 1.2,
    first: int = 4,
    steps: int = 4,
) -> FieldOutput:
    """PyramidInfer: after every layer a share of the older tokens stays, by the attention of the
    recent tokens.
    """
    hand, out, n = HandModel(model), FieldOutput(), len(ids)
    num_recent = max(1, keep_count(recent, n, floor))
    weights = dict(
        zip(range(n - num_recent, n), np.linspace(1, weight, num_recent).tolist(), strict=True)
    )
    # older ones, by layer
    dropping, counts = (without_window(hand, range(1, hand.num_layers + 1)), [n - num_recent])
    for number in range(1, hand.num_layers):
        share = (1 - decay) * (cos(pi * (number - 1) / hand.num_layers) + 1) / 2 + decay
        counts.append(max(floor(share * counts[-1] + 1e-9), min(first, n - num_recent)))

    def after_layer(number: int, attention: Attention) -> Held:
        if number == hand.num_layers or number not in dropping:
            return attention, None
        older = [p for p in sorted(attention) if p not in weights]
        score = dict.fromkeys(older, 0.0)
        for query, factor in weights.items():
            for p in older:
                score[p] += factor * float(np.mean([row.get(p, 0.0) for row in attention[query]]))
        stay = out.best(score, counts[number], [p for p in older if p < first])
        out.scores[number], out.selected[number] = score, sorted({*stay, *weights})
        return out.selected[number], None

    return run(hand, dict(enumerate(ids)), n, steps, out, after_layer)


def uniprefill(
    model: Model,
    ids: Ids,
    layers: Collection[int],
    p: float = 0.99,
    window: int = 128,
    block: int = 64,
    first: int = 128,
    last: int = 128,
    steps: int = 4,
) -> FieldOutput:
    """UniPrefill: after each of `layers`, blocks stay that hold the share `p` of the last
    queries' attention.
    """
    hand, out, limit = HandModel(model), FieldOutput(), Fraction(str(p))

    def after_layer(number: int, attention: Attention) -> Held:
        if number not in layers:
            return attention, None
        out.selected[number] = positions = sorted(attention)
        if len(positions) <= first + last:
            return attention, None
        mass = dict.fromkeys(positions, Fraction(0))
        for query in positions[-window:]:
            for row in attention[query]:
                for position, probability in row.items():
                    mass[position] += Fraction(probability)
        blocks = [positions[start : start + block] for start in range(0, len(positions), block)]
        shares = [
            sum(mass[position] for position in members) / sum(mass.values()) for members in blocks
        ]
        ranking = sorted(range(len(blocks)), key=lambda place: (-shares[place], -place))
        before = list(accumulate((shares[place] for place in ranking), initial=Fraction(0)))[:-1]
        kept = [
            place
            for place, mass_before in zip(ranking, before, strict=True)
            if mass_before <= limit
        ]
        gaps = [abs(mass_before - limit) for mass_before in before if p < 1]
        gaps += [shares[kept[-1]] - shares[place] for place in ranking[len(kept) :]]
        out.margin = min([out.margin, *(float(gap) for gap in gaps if gap > 0)])
        stay = {
            *positions[:first],
            *positions[-last:],
            *(position for place in kept for position in blocks[place]),
        }
        out.selected[number] = sorted(stay)
        return out.selected[number], None

    return run(hand, dict(enumerate(ids)), len(ids), steps, out, after_layer)


def promptdistill(
    model: Model,
    ids: Ids,
    layers: Sequence[int],
    keep: Sequence[float],
    pool: int = 5,
    forget: bool = True,
    steps: int = 4,
) -> FieldOutput:
    """PromptDistill: after some layers the tokens go on that the last query attends to most."""
    hand, out, n, cache = HandModel(model), FieldOutput(passes=[[]]), len(ids), {}
    counts = dict(zip(layers, (tokens_kept(value, n) for value in keep), strict=True))
    hidden = {p: hand.embed(token) for p, token in enumerate(ids)}
    for layer in range(1, hand.num_layers + 1):
        out.passes[0].append(len(hidden))
        query = hand.query(layer, hidden[n - 1], n - 1, n)
        kv, hidden, _ = run_layer(hand, layer, hidden, n)
        cache[layer] = _by_head(kv, [kv] * hand.num_kv_heads)
        if layer not in counts:
            continue
        raw = []
        for p in sorted(kv):
            keys = [kv[p][0][hand.kv_head(head)] for head in range(hand.num_heads)]
            logits = [
                float(hand.attention_logits(query[head], keys[head][None])[0])
                for head in range(hand.num_heads)
            ]
            score = 0.0 if p == n - 1 else sum(logits)
            raw.append(score if hand.sees(layer, n - 1, p) else -float("inf"))
        out.scores[layer] = dict(zip(sorted(kv), pooled(raw, pool), strict=True))
        out.selected[layer] = out.best(out.scores[layer], counts[layer] + 1, [n - 1])
        hidden = {p: hidden[p] for p in out.selected[layer]}
        for heads in cache.values() if forget else ():
            heads[:] = [{p: pair for p, pair in held.items() if p in hidden} for held in heads]
    generate(hand, cache, hidden[n - 1], n, steps, out)
    return out


# --- Sparse attention ---


def trianglemix(
    model: Model,
    ids: Ids,
    dense: float = 0.5,
    sinks: int = 8,
    window: int = 512,
    last: int = 128,
    steps: int = 4,
) -> FieldOutput:
    """TriangleMix: in the later layers sinks, a local window, and dense attention of the last
    queries.
    """
    hand, out, cache, n = HandModel(model), FieldOutput(), Cache(), len(ids)
    first = tokens_kept(dense, hand.num_layers)
    hidden = {p: hand.embed(token) for p, token in enumerate(ids)}
    for layer in range(1, hand.num_layers + 1):
        kv = {p: hand.key_value(layer, hidden[p], p, n) for p in hidden}
        after, out.pairs[layer] = {}, 0
        for p in hidden:
            near = (
                range(p + 1)
                if layer <= first or p >= n - last
                else {*range(sinks), *range(p - window + 1, p + 1)}
            )
            seen = [other for other in range(p + 1) if other in near and hand.sees(layer, p, other)]
            out.pairs[layer] += hand.num_heads * len(seen)
            after[p], _, _ = hand.layer(layer, hidden[p], p, n, [kv[other] for other in seen])
        hidden = after
        cache[layer] = _by_head(kv, [kv] * hand.num_kv_heads)
    out.passes.append([n] * hand.num_layers)
    generate(hand, cache, hidden[n - 1], n, steps, out)
    return out
