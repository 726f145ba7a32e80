"""Measuring: the arms of a run answer each example one after the other, in the same process: a visit.

An example of several turns is a conversation with each arm in its place; each continues with its own answers.
"""

import logging
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.benchmarks.chat_format import ChatFormat, post_process
from eval.benchmarks.metrics import score_example, second_score
from eval.benchmarks.prompts import gold_token_ids
from eval.run.arms import Arm
from eval.run.cases import Case
from eval.run.evidence import of_evidence
from eval.run.fidelity import forced_logits, of_forced, of_generations
from eval.run.run import Run
from eval.store.visit import PROMPT_END, Answer, Cost, Failure, Times, Turn, Visit, compact_counts
from lazyllm import Generation, generate, start
from lazyllm.engine.batch import Batch
from lazyllm.engine.devices import devices_of, read_clock
from lazyllm.engine.flops import attention_ceiling, prefill_flops
from lazyllm.engine.generation import Greedy, Request, make_request
from lazyllm.engine.sdpa import builds_plans
from lazyllm.errors import UserError, place_of, reason_of
from lazyllm.measuring import attention_events, attention_kernel, read_peak, release_memory, reset_peak, utilisation
from lazyllm.methods import Baseline, Method, Sparse
from lazyllm.methods.support.other_models import bytes_beside, models_beside, park, unload
from lazyllm.spec import ModelSpec

log = logging.getLogger(__name__)

WARMUP_TOKENS = 4  # for a prefill, a decoding step that revives, and a step after it


def in_turn(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    """The arms in the order of a run's visit with this number, from 0.

    It rotates with every second visit, and every other visit reverses it: in 2 visits each arm comes before any other
    once and after it once, and in 2 k visits of k arms each arm has each place twice.
    """
    first = number // 2 % len(arms)
    order = (*arms[first:], *arms[:first])
    return order[::-1] if number % 2 else order


def converse(model: PreTrainedModel, case: Case, method: Method, turns: str) -> Iterator[Generation]:
    """The case's answers, turn by turn, each behind the method's own earlier ones. turns: as of `lazyllm.start`."""
    with start(model, case.prompt.as_input(), method, turns=turns) as conversation:
        out = conversation.answer(None, **case.answering)
        yield out
        for turn in case.prompt.turns:
            out = conversation.answer(turn.behind(out.token_ids, case.end_ids), **case.answering)
            yield out


@dataclass(frozen=True)
class _Answers:
    """An arm's answers, turn by turn, and the peak memory in bytes by the end of each. turns: as of `lazyllm.start`.

    packed: other answers decoded in the same steps, so times after the first token, and the peak, are not its own.
    """

    method: Method
    turns: str
    outs: list[Generation]
    peaks: list[int | None]
    packed: bool = False

    def earlier(self, turn: int) -> list[Generation]:
        """The answers of earlier turns (from 0) that this one continues from; none if it runs the whole text."""
        return self.outs[:turn] if self.turns == "continue" else []

    def tokens_computed(self, turn: int) -> float:
        """Prompt tokens run for a turn, mean over layers, scoring included."""
        out, earlier = self.outs[turn], self.earlier(turn)
        before = earlier[-1].computed[-1].mean() if earlier else 0
        return float(out.computed[-1].mean() - before + out.scoring_tokens)

    def prefill_flops(self, config: Any, turn: int) -> int:
        """FLOPs of the prompt tokens that a turn computed up to its first token, and of scoring."""
        out, earlier = self.outs[turn], self.earlier(turn)
        computed = out.computed[0].tolist()
        if earlier:
            return prefill_flops(config, computed) - prefill_flops(config, earlier[-1].computed[-1].tolist(), logits=0)
        if isinstance(self.method, Sparse):
            return self.method.first_token_flops(config, out.prompt_tokens, computed, out.attended)
        return self.method.first_token_flops(config, out.prompt_tokens, computed)


@dataclass
class Bench:
    """A model in this process, to measure the arms of a run on.

    attention_kernel: as of `Visit`; known after `warm_up`. parks: whether other arms' models move to the host while an
    arm is measured, as memory does not hold all.
    """

    run: Run
    model: PreTrainedModel
    attention_kernel: str | None = None
    parks: bool = False

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Run each arm `runs` times on the first prompt, so that the first visit is no slower than the others.

        Before that, a prefill of the first arm tells its attention kernel. If memory does not hold the prompt, the
        shortest one takes its place.
        """
        for case in (cases[0], min(cases, key=lambda case: len(case.prompt.token_ids))):
            failure, lacks_memory = self._tried(case, partial(self._warm_up, case, runs))
            if failure is None:
                return
            log.warning("warming up on %s, row %s failed (%s)", *case.key, failure.reason.partition(";")[0])
            if lacks_memory:
                self._make_room()

    def _warm_up(self, case: Case, runs: int) -> None:
        options = {"max_new_tokens": min(WARMUP_TOKENS, case.max_new_tokens), "eos_token_ids": ()}
        answer = partial(generate, self.model, case.prompt.as_input(), **options)
        calls = [partial(answer, arm.method(case.dataset.name)) for arm in self.run.arms] * runs
        if calls:  # of a prefill alone, as decoding runs other kernels
            self.attention_kernel = attention_kernel(attention_events(partial(calls[0], max_new_tokens=1)))
        for call in calls:
            call()

    def measure(self, cases: Sequence[Case]) -> Iterator[Visit]:
        """The visits: each arm's answers, or its failure: out of memory, logits that are not finite, an error in it.

        Examples of several turns are measured one by one, whatever `batch_size` is. With a larger one, the longest
        prompts come first.
        """
        together = list[Case]()
        for case in cases:
            if self.run.batch_size > 1 and not case.prompt.turns:
                together.append(case)
            else:
                yield self._visit(case, {arm.label: self._answers_or_failure(case, arm) for arm in case.arms})
        together.sort(key=lambda case: -len(case.prompt.token_ids))
        outcomes = defaultdict[tuple[str, str], dict[str, _Answers | Failure]](dict)
        waiting = deque((case, arm) for case in together for arm in case.arms)
        for case, arm, outcome in self._decode(waiting, self.run.batch_size):
            outcomes[case.key][arm.label] = outcome
            if len(outcomes[case.key]) == len(case.arms):
                yield self._visit(case, outcomes.pop(case.key))

    def _tried(self, case: Case, do: Callable[[], Any]) -> tuple[Any, bool]:
        """What a call returns, or its failure, and whether memory lacked. A UserError is raised: all would fail."""
        try:
            return do(), False
        except UserError:
            raise
        except Exception as error:
            failure, lacks_memory = _failure(case, error), is_out_of_memory(error)
        free(*devices_of(self.model))  # not in the handler, as the error's frames hold memory
        return failure, lacks_memory

    def _answers_or_failure(self, case: Case, arm: Arm) -> _Answers | Failure:
        """An arm's answers in a visit of its own place."""
        outcome, lacks_memory = self._tried(case, partial(self._answers, case, arm))
        while lacks_memory and self._make_room(arm.method(case.dataset.name).models()):
            outcome, lacks_memory = self._tried(case, partial(self._answers, case, arm))
        return outcome

    def _answers(self, case: Case, arm: Arm) -> _Answers:
        method, devices = arm.method(case.dataset.name), devices_of(self.model)
        if self.parks:
            park(method.models())
        self._rehearse(case, arm)
        answers = _Answers(method, arm.turns, [], [])
        reset_peak(*devices)
        alone = [] if case.prompt.turns else [generate(self.model, case.prompt.as_input(), method, **case.answering)]
        for out in alone or converse(self.model, case, method, arm.turns):
            answers.outs.append(out)
            peak = read_peak(*devices)
            others = sum(bytes_beside(method.models(), device) for device in devices)
            answers.peaks.append(None if peak is None else peak - others)
        return answers

    def _rehearse(self, case: Case, arm: Arm) -> None:
        """Run what is timed next once before, untimed, if its shapes may be new to a backend that builds plans."""
        devices = devices_of(self.model)
        if not any(builds_plans(model, devices) for model in (self.model, *models_beside())):
            return
        method = arm.method(case.dataset.name)
        if case.prompt.turns and arm.turns == "recompute":  # how long later prefills are follows from the answers
            deque(converse(self.model, case, method, arm.turns), maxlen=0)
        else:  # no other prefill
            Batch(self.model, 1).add(self._request(case, method))

    def _request(self, case: Case, method: Method) -> Request:
        sampler = Greedy(case.end_ids, case.answering["min_new_tokens"])
        return make_request(self.model, case.prompt.as_input(), method, case.max_new_tokens, sampler)

    def _make_room(self, used: Sequence[ModelSpec] = ()) -> bool:
        """Move the other arms' models to the host, from now on before each arm. Returns whether that freed memory."""
        freed = park(used)
        if freed and not self.parks:
            log.warning("memory does not hold the other models of all arms: from now on they move to the host and back")
        self.parks |= freed
        return freed

    def _decode(self, waiting: deque[tuple[Case, Arm]], size: int) -> Iterator[tuple[Case, Arm, _Answers | Failure]]:
        """The arms' answers as they end, at most `size` at once. First tokens are made alone and in order; a visit's
        begin when the batch has room for all of them, if it ever has.

        After an error, the answers in the batch start again, half as many at once until all of them have ended; a lone
        one's is its failure.
        """
        batch, inside = Batch(self.model, size), dict[Request, tuple[Case, Arm]]()
        while waiting or inside:
            failure, lacks_memory = None, False
            begun, lost = list[tuple[Case, Arm]](), list[tuple[Case, Arm]]()  # begun: not in the batch yet
            done: list[tuple[Request, Generation]] = []
            try:
                if waiting and size - len(inside) >= min(size, _arms_to_begin(waiting, inside)):
                    begun = [waiting.popleft()]
                    case, arm = begun[0]
                    request = self._request(case, arm.method(case.dataset.name))
                    if self.parks:
                        park(request.method.models())
                    self._rehearse(case, arm)
                    batch.add(request)
                    inside[request] = begun.pop()
                else:
                    done = batch.run()
            except UserError:
                raise
            except Exception as error:
                lost = [*inside.values(), *begun]
                failure, lacks_memory = _failure(lost[0][0], error), is_out_of_memory(error)
            if failure is not None:  # not in the handler, as the error's frames hold memory
                batch, inside = Batch(self.model, size), {}
                free(*devices_of(self.model))
                freed = lacks_memory and self._make_room()
                if len(lost) == 1 and not freed:
                    yield (*lost[0], failure)
                    continue
                fewer = size if freed else len(lost) // 2
                reason = failure.reason.partition(";")[0]
                log.warning("%d answers at once until %d have ended: %s", fewer, len(lost), reason)
                yield from self._decode(deque(lost), fewer)
            for request, out in done:
                case, arm = inside.pop(request)
                yield case, arm, _Answers(request.method, "continue", [out], [None], packed=True)

    def _visit(self, case: Case, outcomes: Mapping[str, _Answers | Failure]) -> Visit:
        """The visit of all arms' answers, compared with the baseline's after all were timed."""
        baseline, measured = outcomes.get(self.run.baseline or ""), dict[str, list[Answer] | Failure]()
        logits = partial(forced_logits, self.model, case.prompt.as_input())
        of_baseline = cache(partial(logits, Baseline()))

        def measurements(own: _Answers) -> list[Answer]:
            turns = [self._measurement(case, turn, own) for turn in range(len(own.outs))]
            if own is baseline or not isinstance(baseline, _Answers):
                return turns
            compared = [of_generations(*pair) for pair in zip(baseline.outs, own.outs, strict=True)]
            # forced in the first turn only: in later turns, the two have different texts before them
            for name, ids in self._answers_to_force(case, baseline).items():
                kl, log_likelihood = of_forced(of_baseline(ids), logits(own.method, ids), ids)
                compared[0] = replace(compared[0], **{f"{name}_kl": kl, f"{name}_log_likelihood": log_likelihood})
            return [replace(turn, fidelity=fidelity) for turn, fidelity in zip(turns, compared, strict=True)]

        for label, own in outcomes.items():
            is_failure = isinstance(own, Failure)
            measured[label] = own if is_failure else self._tried(case, partial(measurements, own))[0]
        return visit_of(case, self.run.arms, measured, self.attention_kernel)

    def _answers_to_force(self, case: Case, baseline: _Answers) -> dict[str, tuple[int, ...]]:
        """The tokens of the baseline's answer and of the gold one; none unless `fidelity=answer`."""
        if self.run.config.fidelity is None:
            return {}
        gold = gold_token_ids(self.run.tokenizer, case.prompt.text, case.example.answers[0])[: case.max_new_tokens]
        return {"answer": tuple(baseline.outs[0].token_ids), "gold": tuple(gold)}

    def _measurement(self, case: Case, turn: int, answers: _Answers) -> Answer:
        out = answers.outs[turn]
        decoded = self.run.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        group_starts, computed = compact_counts(out.computed)
        flops = answers.prefill_flops(self.model.config, turn)
        is_timed, is_alone = answers.method.timed, answers.method.timed and not answers.packed
        times = Times(
            ttft_s=out.ttft_s if is_timed else None,
            scoring_s=out.scoring_s if is_timed else None,
            total_s=out.total_s if is_alone else None,
            decode_step_s=None if answers.packed else out.decode_step_s,
            total_s_so_far=sum(done.total_s for done in answers.outs[: turn + 1]) if is_alone else None,
        )
        cost = Cost(
            scoring_tokens=out.scoring_tokens,
            pct_prompt_tokens_computed=out.pct_prompt_tokens_computed,
            group_starts=group_starts,
            computed=computed,
            kv_bytes=out.kv_bytes,
            aux_bytes=out.aux_bytes,
            peak_memory_bytes=answers.peaks[turn],
            prefill_flops=flops,
            prefill_mfu=utilisation(self.model, flops, out.ttft_s) if is_timed else None,
            attention_ceiling=None if turn else attention_ceiling(self.model.config, out.prompt_tokens),
            tokens_computed=answers.tokens_computed(turn),
            revived_tokens=float(out.revived.mean()),
            tokens_computed_so_far=sum(map(answers.tokens_computed, range(turn + 1))),
        )
        return Answer(
            **scored(case, decoded, self.run.chat, turn),
            token_ids=out.token_ids,
            times=times,
            cost=cost,
            evidence=of_evidence(case.prompt, turn, out, answers.earlier(turn)) if self.run.config.evidence else None,
        )


def _arms_to_begin(waiting: deque[tuple[Case, Arm]], inside: Mapping[Request, tuple[Case, Arm]]) -> int:
    """How many answers the next visit in line begins together: 1 if it has begun."""
    newest = waiting[0][0]
    return 1 if any(one is newest for one, _ in inside.values()) else sum(one is newest for one, _ in waiting)


def visit_of(
    case: Case, arms: Sequence[Arm], outcomes: Mapping[str, list[Answer] | Failure], kernel: str | None = None
) -> Visit:
    """The visit of a case. arms: the run's, in order. outcomes: by arm. kernel: of attention."""
    turns = [
        Turn(
            sha256=message.sha256,
            tokens=len(message.token_ids),
            tokens_before_truncation=getattr(message, "tokens_before_truncation", len(message.token_ids)),
            end=message.text[-PROMPT_END:],
            answers=list(question.answers),
        )
        for message, question in zip(case.prompts, (case.example, *case.example.turns), strict=True)
    ]
    return Visit(
        dataset=case.dataset.name,
        id=case.example.id,
        groups=list(case.example.groups),
        turns=turns,
        order=[arm.label for arm in case.arms],
        answers={arm.label: own for arm in arms if isinstance(own := outcomes.get(arm.label), list)},
        failures={label: own for label, own in outcomes.items() if isinstance(own, Failure)},
        attention_kernel=kernel,
    )


def scored(case: Case, decoded: str, chat: ChatFormat, turn: int = 0) -> dict[str, Any]:
    """The fields of `Answer` that an answer's text determines."""
    text = post_process(decoded, chat, case.dataset.chat_wrap)
    answers = list((case.example, *case.example.turns)[turn].answers)
    return {
        "text": text,
        "score": score_example(case.dataset, text, answers, list(case.example.all_classes)),
        "rouge_l": second_score(case.dataset, text, answers),
    }


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host lacks memory. cuBLAS has its own words for it."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def _failure(case: Case, error: Exception) -> Failure:
    advice = f" ({place_of(error)})"
    if is_out_of_memory(error):
        tokens, more = len(case.prompt.token_ids), "give model.quantise=int8 or model.device_map=auto"
        advice = f"; out of memory at {tokens} prompt tokens: lower model.max_prompt_tokens, or {more}"
    return Failure(reason=reason_of(error) + advice, traceback=traceback.format_exc())


def free(*devices: torch.device) -> None:
    """Free the memory that a failed example left. Raises UserError if a device has failed."""
    try:
        release_memory(*devices)
        read_clock(*devices)  # waits for them
    except RuntimeError as error:
        names, why = ", ".join(map(str, devices)), " ".join(str(error).split())
        raise UserError(
            f"{names} does not recover from the last failure ({why}). Finished examples are safe: give the same "
            "command again"
        ) from error


@contextmanager
def released(devices: tuple[torch.device, ...]) -> Iterator[None]:
    """Free the devices' memory when the block ends, before another run gets the devices."""
    try:
        yield
    finally:
        unload()
        try:
            release_memory(*devices)
        except RuntimeError as error:  # only logged: the run's own error is raised
            log.warning("%s: its memory could not be freed (%s)", ", ".join(map(str, devices)), error)
