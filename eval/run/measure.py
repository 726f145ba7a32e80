"""Measuring: a method and its baseline on the same prompts, in the same process, in alternation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import ChatFormat, post_process
from eval.benchmarks.metrics import rouge_score_f, scored_text
from eval.benchmarks.prompts import Prompt, gold_token_ids
from eval.benchmarks.suite import Dataset, Example
from eval.run.evidence import evidence_computed, evidence_positions
from eval.run.fidelity import forced_logits, of_forced, of_generations
from eval.store.record import PROMPT_END, Measurement, Record, compact_counts
from lazyllm import Generation, generate
from lazyllm.engine.devices import devices_of, read_peak, reset_peak
from lazyllm.engine.flops import prefill_flops
from lazyllm.methods import Baseline, Method
from lazyllm.methods.beside import park

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WARMUP_TOKENS = 4  # enough to have run prefill, a decoding step that revives, and one that follows it


@dataclass(frozen=True)
class Case:
    """One example, ready to be measured by the method."""

    dataset: Dataset
    example: Example
    prompt: Prompt
    method: Method
    max_new_tokens: int
    end_ids: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset.name, self.example.id


def generate_case(model: PreTrainedModel, case: Case, method: Method) -> Generation:
    """The case's answer by the method, as the dataset wants it generated."""
    return generate(
        model,
        case.prompt.as_input(),
        method,
        max_new_tokens=case.max_new_tokens,
        eos_token_ids=case.end_ids,
        min_new_tokens=1 if case.dataset.newline_ends else 0,
    )


@dataclass(frozen=True)
class _Run:
    """A generation by a method, and the peak memory in bytes during it."""

    method: Method
    out: Generation
    peak: int | None


@dataclass(frozen=True)
class Bench:
    """A model to measure methods on.

    paired: measure the baseline beside each. forced: then also feed the baseline's and the gold answer to both.
    evidence: note which of the evidence each layer computes.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    paired: bool
    forced: bool = False
    evidence: bool = True

    def warm_up(self, case: Case, runs: int) -> None:
        """Run the method, and the baseline if paired, `runs` times on one prompt without keeping anything."""
        for _ in range(runs):
            for method in (Baseline(), case.method) if self.paired else (case.method,):
                generate(
                    self.model,
                    case.prompt.as_input(),
                    method,
                    max_new_tokens=min(WARMUP_TOKENS, case.max_new_tokens),
                    eos_token_ids=(),
                )

    def measure(self, case: Case, baseline_first: bool) -> Record:
        """Both generations of one example; which runs first alternates, so that neither profits from the order."""
        if not self.paired:
            method, baseline = self._run(case, case.method), None
        elif baseline_first:
            baseline = self._run(case, Baseline())
            method = self._run(case, case.method)
        else:
            method = self._run(case, case.method)
            baseline = self._run(case, Baseline())
        beside = self._fidelity(case, baseline.out, method.out) if baseline is not None else {}
        return Record(
            dataset=case.dataset.name,
            id=case.example.id,
            prompt_sha256=case.prompt.sha256,
            prompt_tokens=len(case.prompt.token_ids),
            prompt_tokens_before_truncation=case.prompt.tokens_before_truncation,
            method=replace(self._measurement(case, method), **beside),
            baseline=None if baseline is None else self._measurement(case, baseline),
            prompt_end=case.prompt.text[-PROMPT_END:],
            answers=list(case.example.answers),
            groups=list(case.example.groups),
        )

    def _run(self, case: Case, method: Method) -> _Run:
        if not method.models():  # a draft or a scorer counts in the memory of its own method only
            park()
        devices = devices_of(self.model)
        reset_peak(*devices)
        out = generate_case(self.model, case, method)
        return _Run(method, out, read_peak(*devices))

    def _fidelity(self, case: Case, baseline: Generation, own: Generation) -> dict[str, Any]:
        """The fields of `Measurement` that compare a method with its baseline. Both have run, and been timed."""
        found = of_generations(baseline, own)
        if not self.forced:
            return found
        gold = gold_token_ids(self.tokenizer, case.prompt.text, case.example.answers[0])[: case.max_new_tokens]
        for name, token_ids in (("answer", baseline.token_ids), ("gold", gold)):
            theirs, ours = (
                forced_logits(self.model, case.prompt.as_input(), method, token_ids)
                for method in (Baseline(), case.method)
            )
            found[f"{name}_kl"], found[f"{name}_log_likelihood"] = of_forced(theirs, ours, token_ids)
        return found

    def _measurement(self, case: Case, run: _Run) -> Measurement:
        out, config = run.out, self.model.config
        decoded = self.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        text = post_process(decoded, self.chat, case.dataset.chat_wrap)
        answers, classes = list(case.example.answers), list(case.example.all_classes)
        group_starts, computed = compact_counts(out.computed)
        flops = prefill_flops(config, out.computed[0].tolist()) + run.method.scoring_flops(config, out.prompt_tokens)
        return Measurement(
            text=text,
            token_ids=out.token_ids,
            score=SUITES[case.dataset.suite].score(case.dataset, text, answers, classes),
            rouge_l=rouge_score_f(scored_text(case.dataset, text), answers) if case.dataset.metric == "rouge" else None,
            ttft_s=out.ttft_s,
            scoring_s=out.scoring_s,
            scoring_tokens=out.scoring_tokens,
            total_s=out.total_s,
            decode_step_s=out.decode_step_s,
            pct_prompt_tokens_computed=out.pct_prompt_tokens_computed,
            group_starts=group_starts,
            computed=computed,
            kv_bytes=out.kv_bytes,
            aux_bytes=out.aux_bytes,
            peak_memory_bytes=run.peak,
            prefill_flops=flops,
            **(_evidence(case.prompt, out) if self.evidence else {}),
        )


def _evidence(prompt: Prompt, out: Generation) -> dict[str, Any]:
    """The fields of `Measurement` about evidence; none if the prompt knows of none."""
    positions = evidence_positions(prompt)
    if not len(positions):
        return {}
    in_prefill, revived = evidence_computed(out, positions)
    return {
        "evidence_tokens": len(positions),
        "evidence_recall": float(in_prefill[-1]),
        "evidence_prefill": in_prefill.tolist(),
        "evidence_revived": revived.tolist(),
    }
