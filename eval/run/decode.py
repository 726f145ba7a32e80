"""Answers of a model in this process: each arm answers each case alone, or several answers decode together.

An example of several turns is a conversation with each arm in its place; each continues with its own answers.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from eval.run.arms import Arm
from eval.run.case import Case
from eval.run.hidden import answer_hidden
from eval.run.memory import Memory, free
from eval.run.work import WARMUP_TOKENS
from eval.store.visit import Failure
from lazyllm import Generation, generate, start
from lazyllm.engine.batch import Batch
from lazyllm.engine.flops import prefill_flops
from lazyllm.engine.generation import Prefilled, Request, make_request
from lazyllm.engine.sdpa import builds_plans
from lazyllm.measuring import attention_events, attention_kernel
from lazyllm.methods import Method
from lazyllm.methods.support.other_models import HELPERS

log = logging.getLogger(__name__)

Pair = tuple[Case, Arm]
Ended = tuple[Case, Arm, "Generated | Failure"]


@dataclass
class Generated:
    """An arm's answers to a case, turn by turn, and the peak memory in bytes by the end of each.

    turns: as of `lazyllm.start`. packed: other answers of the run decode in the same steps, so times after the first
    token, and the peak, are not stored. prefilled: a copy of the first turn's prompt that has run, for forced answers.
    context: the run before a hidden question, whose cost is in the answer too.
    """

    method: Method
    turns: str
    outs: list[Generation] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)
    packed: bool = False
    prefilled: Prefilled | None = None
    context: Generation | None = None

    def earlier(self, turn: int) -> list[Generation]:
        """The answers of earlier turns (from 0) that this one continues from; none if it runs the whole text."""
        return self.outs[:turn] if self.turns == "continue" else []

    def runs_before(self, turn: int) -> list[Generation]:
        """`earlier`, or the run before a hidden question: runs of which a turn's answer has no selections."""
        return self.earlier(turn) if self.context is None else [self.context]

    def tokens_computed(self, turn: int) -> float:
        """Prompt tokens run for a turn, mean over layers, scoring included."""
        out, earlier = self.outs[turn], self.earlier(turn)
        before = earlier[-1].computed[-1].mean() if earlier else 0
        return float(out.computed[-1].mean() - before + out.scoring_tokens)

    def prefill_flops(self, config: Any, turn: int) -> int:
        """FLOPs of the prompt tokens that a turn computed up to its first token, and of scoring."""
        out, earlier = self.outs[turn], self.runs_before(turn)
        if not earlier:
            return self._flops_of_first(config, out)
        before = earlier[-1].computed[-1].tolist()
        own = prefill_flops(config, out.computed[0].tolist()) - prefill_flops(config, before, logits=0)
        return own if self.context is None else self._flops_of_first(config, self.context) + own

    def _flops_of_first(self, config: Any, out: Generation) -> int:
        """FLOPs of a prompt that nothing precedes."""
        return self.method.first_token_flops(config, out.prompt_tokens, out.computed[0].tolist())


Outcomes = dict[str, Generated | Failure]  # {label of an arm: its answers to a case, or why there are none}


def converse(
    model: PreTrainedModel,
    case: Case,
    method: Method,
    turns: str,
    after_prefill: Callable[[Prefilled], None] | None = None,
) -> Iterator[Generation]:
    """The case's answers, turn by turn, each behind the method's own earlier ones.

    turns: as of `lazyllm.start`. after_prefill: as of `Request`, in the first turn.
    """
    with start(model, case.prompt.as_input(), method, turns=turns) as conversation:
        out = conversation.answer_with(case.sampler(), None, case.max_new_tokens, after_prefill)
        yield out
        for turn in case.prompt.turns:
            more = turn.behind(out.token_ids, case.end_ids)
            out = conversation.answer_with(case.sampler(), more, case.max_new_tokens)
            yield out


@dataclass
class Bench:
    """A model, on which arms answer cases.

    batch_size: answers that decode together. keeps: whether each arm's prefill is kept until its visit ends
    (`fidelity=answer`).
    """

    model: PreTrainedModel
    memory: Memory
    batch_size: int = 1
    keeps: bool = False

    def warm_up(self, cases: Sequence[Case], arms: Sequence[Arm], runs: int) -> str | None:
        """Run each arm `runs` times on the first prompt, so that the first visit is no slower than the others.

        Returns the attention kernel of the first arm's prefill. If memory does not hold the prompt, the shortest one
        takes its place.
        """
        for case in (cases[0], min(cases, key=lambda case: len(case.prompt.token_ids))):
            outcome = self.memory.tried(case, partial(self._warm_up, case, arms, runs))
            if not isinstance(outcome, Failure):
                return outcome
            log.warning("warming up on %s, row %s failed (%s)", *case.key, outcome.reason.partition(";")[0])
        return None

    def _warm_up(self, case: Case, arms: Sequence[Arm], runs: int) -> str | None:
        def answer(method: Method, new_tokens: int = min(WARMUP_TOKENS, case.max_new_tokens)) -> None:
            if case.cut is not None:
                answer_hidden(self.model, replace(case, max_new_tokens=new_tokens, end_ids=()), method)
            else:
                generate(self.model, case.prompt.as_input(), method, new_tokens, ())

        calls = [partial(answer, arm.method(case.dataset.name)) for arm in arms] * runs
        kernel = None
        if calls:  # of a prefill alone, as decoding runs other kernels
            kernel = attention_kernel(attention_events(partial(calls[0], new_tokens=1)))
        for call in calls:
            call()
        return kernel

    def answers(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcomes]]:
        """Each case with its arms' answers, or their failures: out of memory, logits that are not finite, an error.

        Examples of several turns, or with a hidden question, are answered one by one, whatever `batch_size` is. With a
        larger one, the longest prompts come first.
        """
        together = list[Case]()
        for case in cases:
            if self.batch_size > 1 and not case.prompt.turns and case.cut is None:
                together.append(case)
            else:
                yield case, {arm.label: self._alone(case, arm) for arm in case.arms}
                self.memory.kept.clear()
        together.sort(key=lambda case: -len(case.prompt.token_ids))
        outcomes = defaultdict[tuple[str, str], Outcomes](dict)
        for case, arm, outcome in self._together(together):
            own = outcomes[case.key]
            own[arm.label] = outcome
            if len(own) == len(case.arms):
                yield case, outcomes.pop(case.key)
                self.memory.forget([made.prefilled for made in own.values() if isinstance(made, Generated)])

    def _alone(self, case: Case, arm: Arm, packed: bool = False) -> Generated | Failure:
        """An arm's answers, decoded by themselves. packed: whether they belong to a run whose answers are in batches,
        which have no times of steps and no peak."""
        made = Generated(arm.method(case.dataset.name), arm.turns, packed=packed)
        outcome = self.memory.tried(case, partial(self._generate, made, case, arm))
        if isinstance(outcome, Failure):
            self.memory.forget([made.prefilled])
        return outcome

    def _generate(self, made: Generated, case: Case, arm: Arm) -> Generated:
        self._rehearse(case, arm)
        self.memory.begin_peak()
        after = partial(self._keep, made) if self.keeps else None
        if case.cut is not None:
            made.context, out = answer_hidden(self.model, case, made.method, after)
            outs = iter([out])
        elif case.prompt.turns:
            outs = converse(self.model, case, made.method, arm.turns, after)
        else:
            prompt = case.prompt.as_input()
            outs = iter([generate(self.model, prompt, made.method, **case.options, after_prefill=after)])
        for out in outs:
            made.outs.append(out)
            made.peaks.append(None if made.packed else self.memory.peak(made.method))
        return made

    def _keep(self, made: Generated, prefilled: Prefilled) -> None:
        made.prefilled = self.memory.keep(made.method, prefilled)

    def _rehearse(self, case: Case, arm: Arm) -> None:
        """Run what is timed next once before, untimed, if its shapes may be new to a backend that builds plans."""
        device = self.memory.device
        if not any(builds_plans(model, device) for model in (self.model, *HELPERS.loaded.values())):
            return
        method = arm.method(case.dataset.name)
        if case.prompt.turns and arm.turns == "recompute":  # how long later prefills are follows from the answers
            deque(converse(self.model, case, method, arm.turns), maxlen=0)
        elif case.cut is not None:
            answer_hidden(self.model, replace(case, max_new_tokens=1), method)
        else:  # no other prefill
            Batch(self.model, 1).add(self._request(case, Generated(method, arm.turns)))

    def _request(self, case: Case, made: Generated, keeps: bool = False) -> Request:
        after = partial(self._keep, made) if keeps else None
        return make_request(self.model, case.prompt.as_input(), made.method, case.max_new_tokens, case.sampler(), after)

    def _together(self, cases: Sequence[Case]) -> Iterator[Ended]:
        """The arms' answers as they end, several at once. One bad answer loses no other: after an error the visits in
        the batch are answered one arm at a time."""
        waiting = deque((case, arm) for case in cases for arm in case.arms)
        while waiting:
            lost = yield from self._in_a_batch(waiting)
            free(self.memory.device)  # of the batch, which is gone
            for case, arm in lost:
                yield case, arm, self._alone(case, arm, packed=True)

    def _in_a_batch(self, waiting: deque[Pair]) -> Generator[Ended, None, list[Pair]]:
        """Take answers out of `waiting`, and make at most `batch_size` at once. First tokens are made alone and in
        order; a visit's begin when the batch has room for all of them, if it ever has.

        An error ends that. Returns the answers that are then missing: of the visits in the batch.
        """
        batch, running = Batch(self.model, self.batch_size), dict[Request, tuple[Case, Arm, Generated]]()
        while waiting or running:
            room = self.batch_size - len(running)
            if waiting and room >= min(self.batch_size, _arms_to_begin(waiting, running)):
                newest, step = waiting[0][0], partial(self._begin, batch, waiting, running)
            else:
                newest, step = [*running.values()][-1][0], batch.run
            ended = self.memory.tried(newest, step)
            if isinstance(ended, Failure):
                reason = ended.reason.partition(";")[0]
                log.warning("the answers in the batch start again, one arm at a time: %s", reason)
                self.memory.forget([made.prefilled for _, _, made in running.values()])
                missing = [(case, arm) for case, arm, _ in running.values()]
                while waiting and waiting[0][0] is newest:
                    missing.append(waiting.popleft())
                return missing
            for request, out in ended:
                case, arm, made = running.pop(request)
                made.outs, made.peaks = [out], [None]
                yield case, arm, made
        return []

    def _begin(
        self, batch: Batch, waiting: deque[Pair], running: dict[Request, tuple[Case, Arm, Generated]]
    ) -> list[tuple[Request, Generation]]:
        """Move the next answer from `waiting` into the batch. No answer ends by that."""
        case, arm = waiting[0]
        made = Generated(arm.method(case.dataset.name), "continue", packed=True)
        request = self._request(case, made, self.keeps)
        running[request] = (*waiting.popleft(), made)
        self._rehearse(case, arm)
        batch.add(request)
        return []


def _arms_to_begin(waiting: deque[Pair], inside: Mapping[Request, tuple[Case, Arm, Generated]]) -> int:
    """How many answers the next visit in line begins together: 1 if it has begun."""
    newest = waiting[0][0]
    return 1 if any(one is newest for one, _, _ in inside.values()) else sum(one is newest for one, _ in waiting)
