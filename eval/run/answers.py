"""From what a model generated to what a visit stores: records, scores, and distances to the baseline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.prompts import gold_token_ids
from eval.run.arms import Arm
from eval.run.case import Case, scored, visit_of
from eval.run.decode import Bench, Generated, Outcomes
from eval.run.fidelity import of_forced, of_generations
from eval.run.tracing import traces
from eval.store.visit import Answer, Cost, Failure, Fidelity, Times, Trace, Visit, compact_counts
from lazyllm.engine.flops import attention_ceiling
from lazyllm.measuring import utilisation


def answer_of(
    case: Case,
    turn: int,
    made: Generated,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
) -> Answer:
    """What is known of an arm's answer in a turn (from 0) by itself. model: for its shapes and its device's rate."""
    out = made.outs[turn]
    decoded = tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert isinstance(decoded, str)
    times = Times(
        ttft_s=out.ttft_s,
        scoring_s=out.scoring_s,
        total_s=None if made.packed else out.total_s,
        decode_step_s=None if made.packed else out.decode_step_s,
        total_s_so_far=None if made.packed else sum(done.total_s for done in made.outs[: turn + 1]),
    )
    group_starts, computed = compact_counts(out.computed)
    flops = made.prefill_flops(model.config, turn)
    cost = Cost(
        scoring_tokens=out.scoring_tokens,
        pct_prompt_tokens_computed=out.pct_prompt_tokens_computed,
        group_starts=group_starts,
        computed=computed,
        kv_bytes=out.kv_bytes,
        aux_bytes=out.aux_bytes,
        peak_memory_bytes=made.peaks[turn],
        prefill_flops=flops,
        prefill_mfu=utilisation(model, flops, out.ttft_s),
        attention_ceiling=None if turn else attention_ceiling(model.config, out.prompt_tokens),
        tokens_computed=made.tokens_computed(turn),
        revived_tokens=float(out.revived.mean()),
        tokens_computed_so_far=sum(map(made.tokens_computed, range(turn + 1))),
    )
    return Answer(**scored(case, decoded, chat, turn), token_ids=out.token_ids, times=times, cost=cost)


@dataclass(frozen=True)
class Reference:
    """The baseline's answers to a case. forced: {name of fields: the tokens that are fed to each arm, and to it}."""

    made: Generated
    forced: Mapping[str, tuple[int, ...]]

    def fidelity(self, made: Generated) -> list[Fidelity]:
        """An arm's answers beside the baseline's, turn by turn."""
        turns = [of_generations(*pair) for pair in zip(self.made.outs, made.outs, strict=True)]
        for name, ids in self.forced.items():  # in the first turn only: later, the two have different texts before them
            kl, log_likelihood = of_forced(self._logits[name], _forced_logits(made, ids), ids)
            turns[0] = replace(turns[0], **{f"{name}_kl": kl, f"{name}_log_likelihood": log_likelihood})
        return turns

    @cached_property
    def _logits(self) -> dict[str, Tensor]:
        return {name: _forced_logits(self.made, ids) for name, ids in self.forced.items()}


def _forced_logits(made: Generated, token_ids: Sequence[int]) -> Tensor:
    assert made.prefilled is not None  # as `Bench.keeps` says
    return made.prefilled.forced_logits(token_ids)


@dataclass
class Visits:
    """The visits of a run: what its arms answer on its model.

    baseline: the label of its arm; None without one.
    attention_kernel: as of `Visit`; known after `warm_up`.
    """

    bench: Bench
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    arms: Sequence[Arm]
    baseline: str | None
    attention_kernel: str | None = None

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Answer some of these cases, so that the first visit is no slower than the others."""
        self.attention_kernel = self.bench.warm_up(cases, self.arms, runs)

    def visits(self, cases: Sequence[Case]) -> Iterator[Visit]:
        """The visits of the cases, as they are done: the answers of each case's arms, or their failures."""
        for case, outcomes in self.bench.answers(cases):
            yield self._visit(case, outcomes)

    def _visit(self, case: Case, outcomes: Outcomes) -> Visit:
        """The visit of all arms' answers, compared with the baseline's after all were timed."""
        baseline, measured = outcomes.get(self.baseline or ""), dict[str, list[Answer] | Failure]()
        reference = self._reference(case, baseline) if isinstance(baseline, Generated) else None
        for label, made in outcomes.items():
            if isinstance(made, Failure):
                measured[label] = made
            else:
                answers = partial(self._answers, case, made, None if made is baseline else reference)
                measured[label] = self.bench.memory.tried(case, answers)
        return visit_of(case, self.arms, measured, self.attention_kernel)

    def _answers(self, case: Case, made: Generated, reference: Reference | None) -> list[Answer]:
        given = made, self.bench.model, self.tokenizer, self.chat
        own = [answer_of(case, turn, *given) for turn in range(len(made.outs))]
        if reference is None:
            return own
        return [replace(one, fidelity=beside) for one, beside in zip(own, reference.fidelity(made), strict=True)]

    def _reference(self, case: Case, baseline: Generated) -> Reference:
        """With `fidelity=answer`, the baseline's answer is forced, and the gold one."""
        if not self.bench.keeps:
            return Reference(baseline, {})
        gold = gold_token_ids(self.tokenizer, case.prompt.text, case.example.answers[0])[: case.max_new_tokens]
        return Reference(baseline, {"answer": tuple(baseline.outs[0].token_ids), "gold": tuple(gold)})

    def traces(self, case: Case, arms: Sequence[Arm]) -> Iterator[Trace]:
        """What visits leave out, of each arm. Raises RuntimeError or FloatingPointError."""
        return traces(self.bench.model, self.tokenizer, case, arms)
