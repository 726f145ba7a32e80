"""Measuring: a method and its baseline on the same prompts, in the same process, in alternation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.benchmarks import SUITES
from eval.benchmarks.metrics import rouge_score_f, scored_text
from eval.benchmarks.prompts import Prompt, post_process
from eval.benchmarks.suite import Dataset, Example
from eval.store.record import PROMPT_END, Measurement, Record, compact_counts
from lazyllm import Generation, generate
from lazyllm.engine.devices import devices_of, read_peak, reset_peak
from lazyllm.engine.flops import prefill_flops
from lazyllm.methods import Baseline, Method

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
class Bench:
    """A model to measure methods on; `paired` measures the baseline beside each."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: str
    paired: bool

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
            method, baseline = self._measure(case, case.method), None
        elif baseline_first:
            baseline = self._measure(case, Baseline())
            method = self._measure(case, case.method)
        else:
            method = self._measure(case, case.method)
            baseline = self._measure(case, Baseline())
        return Record(
            dataset=case.dataset.name,
            id=case.example.id,
            prompt_sha256=case.prompt.sha256,
            prompt_tokens=len(case.prompt.token_ids),
            prompt_tokens_before_truncation=case.prompt.tokens_before_truncation,
            method=method,
            baseline=baseline,
            prompt_end=case.prompt.text[-PROMPT_END:],
            answers=list(case.example.answers),
            groups=list(case.example.groups),
        )

    def _measure(self, case: Case, method: Method) -> Measurement:
        devices = devices_of(self.model)
        reset_peak(*devices)
        out = generate_case(self.model, case, method)
        peak = read_peak(*devices)
        decoded = self.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        text = post_process(decoded, self.chat)
        answers, classes = list(case.example.answers), list(case.example.all_classes)
        group_starts, computed = compact_counts(out.computed)
        config = self.model.config
        scoring_flops = method.scoring_flops(config, out.prompt_tokens)
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
            peak_memory_bytes=peak,
            prefill_flops=prefill_flops(config, out.computed[0].tolist()) + scoring_flops,
        )
