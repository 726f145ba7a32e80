"""From what a model generated to what a visit stores: scores, cost, and distances to the
baseline's answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.benchmarks.chat_format import ChatFormat, post_process
from eval.benchmarks.metrics import score_example, second_score
from eval.benchmarks.prompts import Prompt
from eval.store.record import Answer, compact_counts
from lazyllm import Generation
from lazyllm.engine.generation import force
from lazyllm.measuring import utilisation
from lazyllm.methods import Method


@dataclass(frozen=True)
class Measured:
    """What an arm did with a prompt.

    peak: bytes of memory; None if unknown. prefilled: a copy of the prompt that has run, for forced
        answers.
    steps_are_shared: whether other answers decoded in the same steps, whose times are then not its
        own.
    """

    method: Method
    generation: Generation
    peak: int | None = None
    prefilled: Generation | None = None
    steps_are_shared: bool = False


def answer_of(
    prompt: Prompt,
    measured: Measured,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    reference: "Reference | None" = None,
) -> Answer:
    """Decode, score and cost a generation, and compare it with the baseline's.

    model: for its shapes and its device's rate. reference: the baseline's answer; None without one
        to compare with.
    """
    out = measured.generation
    decoded = tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert isinstance(decoded, str)
    group_layers, computed = compact_counts(out.computed)
    computed_first = out.computed[0].tolist()
    flops = measured.method.first_token_flops(model.config, out.prompt_tokens, computed_first)
    return Answer(
        **score_of(prompt, decoded, chat),
        token_ids=out.token_ids,
        ttft_s=out.ttft_s,
        scoring_s=out.scoring_s,
        decode_step_s=None if measured.steps_are_shared else out.decode_step_s,
        scoring_tokens=out.scoring_tokens,
        group_layers=group_layers,
        computed=computed,
        revived_tokens=float(out.revived.mean()),
        kv_bytes=out.kv_bytes,
        aux_bytes=out.aux_bytes,
        peak_memory_bytes=measured.peak,
        prefill_flops=flops,
        prefill_mfu=utilisation(model, flops, out.ttft_s),
        **({} if reference is None else reference.compare(measured)),
    )


def score_of(prompt: Prompt, decoded: str, chat: ChatFormat) -> dict[str, Any]:
    """The fields of `Answer` that its text determines."""
    dataset, example = prompt.dataset, prompt.example
    text, gold = post_process(decoded, chat, dataset.chat_wrap), list(example.answers)
    is_scored, classes = dataset.metric != "", list(example.all_classes)
    return {
        "text": text,
        "score": score_example(dataset, text, gold, classes) if is_scored else None,
        "rouge_l": second_score(dataset, text, gold),
    }


@dataclass(frozen=True)
class Reference:
    """The baseline's answer of a visit.

    forced: {`answer` or `gold`: token ids that are fed to every arm and to the baseline}.
    logits: {(prompt that has run, `answer` or `gold`): those of `force`}, as far as they are known.
    """

    measured: Measured
    forced: Mapping[str, tuple[int, ...]]
    logits: dict[tuple[Generation, str], Tensor] = field(default_factory=dict)

    def compare(self, measured: Measured) -> dict[str, Any]:
        """The fields of `Answer` that compare an arm's answer with it."""
        fields = compare_generations(self.measured.generation, measured.generation)
        for name, ids in self.forced.items():
            baseline, method = self._logits(self.measured, name), self._logits(measured, name)
            kl, log_likelihood = compare_forced(baseline, method, ids)
            fields |= {f"{name}_kl": kl, f"{name}_log_likelihood": log_likelihood}
        return fields

    def _logits(self, measured: Measured, name: str) -> Tensor:
        prefilled = measured.prefilled
        assert prefilled is not None  # `Bench` keeps it for forced answers
        if (prefilled, name) not in self.logits:
            [self.logits[prefilled, name]] = force([prefilled], [self.forced[name]])
        return self.logits[prefilled, name]

    def force_together(self, answers: Sequence[Measured], size: int) -> None:
        """Feed every answer to every prompt that has run, up to `size` in each step, for `compare`.

        Logits are those of a prompt alone, up to rounding. Methods that cannot be batched are left
        out: they run alone in `compare`.
        """
        kept = [measured.prefilled for measured in answers if measured.method.can_batch]
        pairs = [(prefilled, name) for name in self.forced for prefilled in kept if prefilled]
        for start in range(0, len(pairs), size):
            chosen = pairs[start : start + size]
            token_ids = [self.forced[name] for _, name in chosen]
            logits = force([prefilled for prefilled, _ in chosen], token_ids)
            self.logits.update(zip(chosen, logits, strict=True))


def compare_generations(baseline: Generation, generation: Generation) -> dict[str, Any]:
    """The fields of `Answer` that compare a generation with the baseline's."""
    ours, theirs = generation.token_ids, baseline.token_ids
    p, q = _log_probabilities(baseline.first_logits), _log_probabilities(generation.first_logits)
    pairs = zip(ours, theirs, strict=False)
    return {
        "kl": mean_kl(p, q),
        "top1_agrees": int(p.argmax() == q.argmax()),
        "leading_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)),
        "edit_similarity": edit_similarity(ours, theirs),
        "same_answer": int(ours == theirs),
    }


def compare_forced(
    baseline: Tensor, method: Tensor, token_ids: Sequence[int]
) -> tuple[float, float]:
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
