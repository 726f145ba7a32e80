"""Self-information of tokens, -log p(x_t | x_<t), in windows if the text is long.

Notation: n tokens to score, w hidden width, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.engine.flops import prefill_flops

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Decoder

# Positions whose logits are in memory at once: 33 MB in float32 for a vocabulary of 32,000
CHUNK = 256


def windows(length: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first, stop) of windows of at most `size` tokens (2 or more).

    The tokens from `start` to `stop` (excluded) run together, and those from `first` on are scored:
    each token but the sequence's first once. Later windows begin `size // 2` tokens before `first`.
    """
    start, first, stop = 0, 1, min(size, length)
    yield start, first, stop
    while stop < length:
        start, first = stop - size // 2, stop
        stop = min(start + size, length)
        yield start, first, stop


def window_size(config: Any, window: int | None) -> int:
    """Return `window`, or all the model's positions for None. Raises ValueError for more."""
    limit = config.max_position_embeddings
    if window is not None and window > limit:
        raise ValueError(
            f"window={window}: the scoring model sees at most {limit} tokens at once; give that or "
            "less"
        )
    return window or limit


def bos_of(config: Any) -> int | None:
    """Read the model's BOS token, if its config names one."""
    bos = getattr(config, "bos_token_id", None)
    return bos if isinstance(bos, int) and 0 <= bos < config.vocab_size else None


def self_information(
    decoder: Decoder,
    token_ids: Tensor,
    window: int | None = None,
    scorer: PreTrainedModel | None = None,
) -> np.ndarray:
    """Compute [n] self-information in nats, in at least float32; float64 on the host.

    decoder: the open model, which scores layer by layer, with logits of `CHUNK` positions at once.
    window: tokens of a window; None for the scoring model's limit.
    scorer: any causal model of transformers that scores instead, called as `scorer(...)`. The
        logits of a whole window are in memory. Its tokens count in `decoder.tokens_run`.

    The text begins with the scoring model's BOS. Without a BOS, the first token gets log(v), as if
    all tokens were equally likely. Later windows begin in mid-text, without BOS, at position 0.
    Raises ValueError for a window beyond the model's limit.
    """
    import torch
    import torch.nn.functional as F

    from lazyllm.engine.decoder import run_layers

    def logits(run: Tensor, first: int) -> Iterable[Tensor]:
        """Compute those of a run [m] from an index on, in parts [chunk, v]."""
        if scorer is None:
            hidden = decoder.norm(run_layers(decoder, run)[0])[0, first:]  # [n, w]
            return map(decoder.head, hidden.split(CHUNK))
        decoder.tokens_run += len(run)
        return scorer(input_ids=run[None], use_cache=False).logits[0, first:].split(CHUNK)

    model = decoder if scorer is None else scorer
    size, bos = window_size(model.config, window), bos_of(model.config)
    sequence = token_ids if bos is None else torch.cat([token_ids.new_tensor([bos]), token_ids])
    exact, even = torch.promote_types(model.dtype, torch.float32), math.log(model.config.vocab_size)
    info = torch.full(sequence.shape, even, dtype=exact, device=sequence.device)
    for start, first, stop in windows(len(sequence), size):
        if first == stop:  # a sequence of one token, which has no token before it
            continue
        # the last token's logits are not needed
        for part in logits(sequence[start : stop - 1], first - 1 - start):
            scored = slice(first, first + len(part))
            targets = sequence[scored].to(part.device)
            info[scored] = F.cross_entropy(part.to(exact), targets, reduction="none")
            first = scored.stop
    return (info if bos is None else info[1:]).double().cpu().numpy()


def scoring_flops(
    config: Any, n: int, window: int | None = None, matrices: int | None = None
) -> int:
    """Count the FLOPs of scoring n tokens. matrices: as in `prefill_flops`."""
    length = n + (bos_of(config) is not None)
    layers = config.num_hidden_layers
    return sum(
        prefill_flops(config, [stop - 1 - start] * layers, stop - first, matrices)
        for start, first, stop in windows(length, window_size(config, window))
    )


def carried_over(info: np.ndarray, from_spans: np.ndarray, to_spans: np.ndarray) -> np.ndarray:
    """Turn one tokenizer's self-information into another's over the same characters, [n] float64.

    info: [k] of tokens that stand for the half-open character ranges from_spans [k, 2].
    to_spans: [n, 2].
    A token's information is spread evenly over its characters; a character's is shared evenly by
    the tokens that stand for it (several, if a tokenizer writes it in bytes). An empty range counts
    as the next character.
    """
    length = int(max(from_spans.max(initial=0), to_spans.max(initial=0))) + 1
    owner, character = _characters(from_spans)
    share = info / np.bincount(owner, minlength=len(info))
    carried = np.bincount(character, weights=share[owner], minlength=length)
    owner, character = _characters(to_spans)
    readers = np.bincount(character, minlength=length)
    weights = carried[character] / readers[character]
    return np.bincount(owner, weights=weights, minlength=len(to_spans))


def _characters(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List all pairs (token, one of its characters), as two arrays."""
    sizes = np.maximum(spans[:, 1] - spans[:, 0], 1)
    owner = np.repeat(np.arange(len(spans)), sizes)
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return owner, spans[owner, 0] + np.arange(len(owner)) - before
