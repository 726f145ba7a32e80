"""The distance of a method's answer from the full model's: an obvious, slow, independent version, for tests only.

A forced answer is a list of T token ids. It is fed to a model token by token, after the prompt, so that there are T
sets of logits [V]: the first from the prompt's prefill, each later one from a decoding step. The last token is not run.

Decided here, because the issue leaves it open:

 1. Everything is float64: logits are cast before the softmax. KL(baseline || method), in nats, over the whole
    vocabulary. A token that the baseline gives probability 0 adds 0.
 2. Means are over all T tokens, the first one and an end token (if the answer holds one) included.
 3. Log-likelihood less the baseline's: per token of the forced answer; below 0 if the method likes the answer less.
 4. Two answers are compared as lists of generated token ids, end tokens included. Edit similarity is 1 less the
    Levenshtein distance over the longer length; two empty answers are equal.
 5. The lowest id wins ties of the most probable token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from tests.reference import lazy_reference

Logits = Callable[[Sequence[int], Sequence[int]], Sequence[np.ndarray]]  # (prompt, forced answer) -> T times [V]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities [V] in float64."""
    shifted = np.asarray(logits, dtype=np.float64) - np.max(np.asarray(logits, dtype=np.float64))
    return shifted - np.log(np.sum(np.exp(shifted)))


def kl_divergence(baseline: np.ndarray, method: np.ndarray) -> float:
    """KL(baseline || method) of the distributions of two rows of logits [V], in nats."""
    total = 0.0
    for log_p, log_q in zip(log_softmax(baseline).tolist(), log_softmax(method).tolist(), strict=True):
        if np.exp(log_p) > 0:
            total += np.exp(log_p) * (log_p - log_q)
    return float(total)


@dataclass(frozen=True)
class Fidelity:
    """A method's forced answer, compared with its baseline's.

    Attributes:
        first_kl: KL divergence of the first token's distribution, nats.
        top1: whether both find the same first token most probable.
        mean_kl: KL divergence per token, nats.
        log_likelihood: of the answer, per token, less the baseline's; nats.
    """

    first_kl: float
    top1: bool
    mean_kl: float
    log_likelihood: float


def baseline_logits(model: PreTrainedModel) -> Logits:
    """The full model's own logits."""
    return lambda prompt, answer: lazy_reference(model, prompt, {}, len(answer), forced=answer).logits


def fidelity_reference(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], method: Logits
) -> Fidelity:
    """Compare a method's logits with the full model's on a forced answer of at least one token."""
    return compare(baseline_logits(model)(prompt, answer), method(prompt, answer), answer)


def compare(baseline: Sequence[np.ndarray], method: Sequence[np.ndarray], answer: Sequence[int]) -> Fidelity:
    """The same from logits that are there already, T rows [V] each."""
    if not len(baseline) == len(method) == len(answer) > 0:
        raise ValueError(f"{len(baseline)} and {len(method)} rows of logits for {len(answer)} tokens")
    divergences, gains = [], []
    for ours, theirs, token in zip(baseline, method, answer, strict=True):
        divergences.append(kl_divergence(ours, theirs))
        gains.append(float(log_softmax(theirs)[token] - log_softmax(ours)[token]))
    same = int(np.argmax(baseline[0])) == int(np.argmax(method[0]))
    return Fidelity(divergences[0], same, sum(divergences) / len(answer), sum(gains) / len(answer))


def leading_agreement(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens at the start that two answers share."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def edit_distance(left: Sequence[int], right: Sequence[int]) -> int:
    """Fewest insertions, deletions and substitutions (Levenshtein 1966), from the table of all pairs of prefixes."""
    table = {(i, 0): i for i in range(len(left) + 1)} | {(0, j): j for j in range(len(right) + 1)}
    for i, a in enumerate(left, 1):
        for j, b in enumerate(right, 1):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a != b))
    return table[len(left), len(right)]


def edit_similarity(left: Sequence[int], right: Sequence[int]) -> float:
    """1 for equal answers, 0 for answers that share nothing in order."""
    longer = max(len(left), len(right))
    return 1.0 if longer == 0 else 1 - edit_distance(left, right) / longer
