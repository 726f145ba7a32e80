"""The attention scores of a layer's stored tokens, as methods ask for them (`ScoreSpec`).

Notation:
    h  query heads          g  key heads (g divides h)          d  head width
    m  query tokens         s  stored tokens (slots)            w  last queries
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lazyllm.engine.devices import tf32_products, to_device
from lazyllm.engine.inputs import NO_SCORES, ScoreSpec
from lazyllm.engine.kernels import capped

# Scores that a sum over queries holds at once: on a CPU they fit its caches, else they take 128 MB
SUMMED_ON_CPU, SUMMED = 2**22, 2**25

# (slice of queries, slice of keys) -> [b, k] bool: which of the last k keys each query attends to,
# after all keys before these. None: all attend to all (`AttentionMask.visible_last`)
Visible = Callable[[slice, slice], Tensor | None]


def attention_scores(
    query: Tensor,
    key: Tensor,
    visible: Visible,
    scaling: float,
    softcap: float | None = None,
    spec: ScoreSpec = NO_SCORES,
) -> Tensor:
    """Compute the scores of one layer that `spec` describes; by default Eq. 1.

    query [1, h, m, d] and key [1, g, s, d] after RoPE; the newest token is the last query.
    visible: which keys the last queries attend to.
    softcap: the bound c of attention logits, c * tanh(logits / c), as in Gemma 2.

    Returns [h, w, s], w = min(spec.queries, m), without the dimensions that `ScoreSpec` reduces, in
    float32 (float64 for a float64 model); a probability is 0 if a token is not attended to.
    """
    if spec.summed is not None:
        return _summed_scores(query, key, visible, scaling, softcap, spec)
    m = query.shape[2]
    rows = slice(m - min(spec.queries, m), m)
    logits = _logits(query, key, visible, rows, key.shape[2], scaling, softcap)
    scores = logits if spec.raw else logits.softmax(dim=-1)
    scores = scores if spec.per_head else scores.mean(dim=0)
    return scores.squeeze(-2) if spec.queries == 1 else scores


def _logits(
    query: Tensor,
    key: Tensor,
    visible: Visible,
    rows: slice,
    keys: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Compute [h, w, keys] of the queries in `rows` and the first keys; -inf if not attended to."""
    heads, kv_heads, d = query.shape[1], key.shape[1], query.shape[-1]
    w = rows.stop - rows.start
    # [1, h, w, d] -> [g, h/g * w, d]: heads that share a key head become the rows of one product
    last = query[:, :, rows].reshape(kv_heads, heads // kv_heads * w, d)
    # float16 could overflow here, though not in attention itself; bfloat16 would blur comparisons
    exact = torch.promote_types(query.dtype, torch.float32)
    last, columns = last.to(exact), key[0, :, :keys].to(exact).transpose(-1, -2)
    # scaled after the product: TF32 holds 16-bit inputs exactly, but not their multiples
    with tf32_products(query.is_cuda and query.element_size() == 2):
        # beta=0: adds nothing
        products = torch.baddbmm(last[..., :1], last, columns, beta=0, alpha=scaling)
    logits = capped(products, softcap).view(heads, w, keys)
    attended = to_device(visible(rows, slice(0, keys)), key.device)
    if attended is None:
        return logits
    if attended.shape[-1] == keys:
        return torch.where(attended, logits, _minus_infinity(exact, key.device))
    logits[..., keys - attended.shape[-1] :].masked_fill_(~attended, float("-inf"))
    return logits


@functools.cache
def _minus_infinity(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("-inf"), dtype=dtype, device=device)


def _summed_scores(
    query: Tensor,
    key: Tensor,
    visible: Visible,
    scaling: float,
    softcap: float | None,
    spec: ScoreSpec,
) -> Tensor:
    """Sum over queries, [h, s] or [s]. Blocks of queries run over the keys up to their end."""
    heads, m, s = query.shape[1], query.shape[2], key.shape[2]
    w = min(spec.queries, m)
    exact = torch.promote_types(query.dtype, torch.float32)
    assert spec.summed is not None
    weights = torch.linspace(*spec.summed, w, dtype=exact, device=key.device)
    key = key.to(exact)  # once for all blocks
    sums = weights.new_zeros((heads, s))
    block = max(1, (SUMMED_ON_CPU if key.device.type == "cpu" else SUMMED) // (heads * s))
    if block < w:  # several blocks read it: stored in the order in which their products do
        key = key.transpose(-1, -2).contiguous().transpose(-1, -2)
    for first in range(m - w, m, block):
        rows = slice(first, min(first + block, m))
        keys = s - (m - rows.stop)  # no query of the block attends to later keys
        scores = _logits(query, key, visible, rows, keys, scaling, softcap).softmax(dim=-1)
        sums[:, :keys] += weights[first - (m - w) : rows.stop - (m - w)] @ scores
    return sums if spec.per_head else sums.mean(dim=0)
