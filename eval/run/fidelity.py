"""How close an arm's answer is to the baseline's, by tokens and by probabilities."""

from collections.abc import Sequence
from itertools import takewhile

import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from eval.store.visit import Fidelity
from lazyllm import Generation


def of_generations(baseline: Generation, own: Generation) -> Fidelity:
    """An arm's answer compared with the baseline's."""
    ours, theirs = own.token_ids, baseline.token_ids
    p, q = _log_probabilities(baseline.first_logits), _log_probabilities(own.first_logits)
    return Fidelity(
        kl=mean_kl(p, q),
        top1_agrees=int(p.argmax() == q.argmax()),
        leading_tokens=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))),
        edit_similarity=edit_similarity(ours, theirs),
        same_answer=int(ours == theirs),
    )


def of_forced(baseline: Tensor, method: Tensor, token_ids: Sequence[int]) -> tuple[float, float]:
    """(mean KL per token, log-likelihood per token minus the baseline's) of forced tokens.

    baseline, method: [t, v] logits before each of the t tokens.
    """
    p, q = _log_probabilities(baseline), _log_probabilities(method)
    chosen = torch.tensor(token_ids)[:, None]
    return mean_kl(p, q), float((q.gather(1, chosen) - p.gather(1, chosen)).mean())


def mean_kl(p: Tensor, q: Tensor) -> float:
    """KL(p || q) in nats of log-probabilities [..., v], mean over all but the last axis."""
    terms = torch.where(p == -torch.inf, 0, p.exp() * (p - q))
    return max(0.0, float(terms.sum(-1).mean()))  # rounding can make it negative


def edit_similarity(a: Sequence[int], b: Sequence[int]) -> float:
    """1 - Levenshtein distance of two lists / length of the longer one; 1 if both are empty."""
    return 1 - Levenshtein.distance(a, b) / max(len(a), len(b), 1)


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.cpu().double().log_softmax(-1)
