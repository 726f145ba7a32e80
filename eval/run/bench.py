"""The loaded model of a run, which answers each prompt with every arm in rotation: a visit."""

import logging
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from eval.arms import Arm
from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.prompts import Prompt, gold_token_ids
from eval.run.answer import Measured, Reference, answer_of
from eval.run.device import failure_of, held_and_released, recover
from eval.run.prepare import Run
from eval.run.work import WARMUP_TOKENS
from eval.store.record import PROMPT_END, Answer, Failure, Visit
from lazyllm import Generation, generate
from lazyllm.engine.devices import cpu_time
from lazyllm.engine.flops import attention_ceiling
from lazyllm.engine.generation import Batch, Greedy
from lazyllm.engine.sdpa import builds_plans
from lazyllm.errors import UserError
from lazyllm.measuring import (
    attention_events,
    attention_kernel,
    read_peak,
    release_memory,
    reset_peak,
)
from lazyllm.methods import Method
from lazyllm.methods.support.other_models import HELPERS
from lazyllm.models.config import as_device, unapplied_settings
from lazyllm.models.load import load_weights

log = logging.getLogger(__name__)

FORCED = 4  # answers that are forced in each step, untimed, at least

T = TypeVar("T")
PlannedVisit = tuple[Prompt, Sequence[Arm]]  # a prompt, and the arms that answer it, in order
Pair = tuple[Prompt, Arm]
Load = Callable[[], PreTrainedModel]
Ended = tuple[Prompt, Arm, Measured | Failure]
# {label of an arm: what it did with a prompt, or why it failed}
Outcomes = dict[str, Measured | Failure]


@dataclass
class Bench:
    """A model and the arms of a run.

    arms: in the order of tables; methods: {(label, name of a dataset): the arm's method for it}.
    baseline: the label of the arm to compare with; None without one.
    batch_size: answers that decode together, after each first token was timed alone.
    forces_answers: whether answers are forced after each visit (`fidelity=answer`), so that each
        arm's prefill is kept until then.
    kernel: the attention kernel of the first arm's prefill; known after `warm_up`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    arms: Sequence[Arm]
    methods: Mapping[tuple[str, str], Method]
    baseline: str | None
    batch_size: int = 1
    forces_answers: bool = False
    kernel: str | None = None
    _kept: list[Generation] = field(default_factory=list)
    _peak_so_far: int | None = None  # bytes, before the last reset

    def warm_up(self, prompts: Sequence[Prompt], runs: int) -> None:
        """Run each arm `runs` times on the first prompt, so that the first visit is no slower than
        the others.

        If memory does not hold the prompt, the shortest one takes its place.
        """
        for prompt in (prompts[0], min(prompts, key=lambda prompt: len(prompt.token_ids))):
            outcome = self._attempt(prompt, partial(self._warm_up, prompt, runs))
            if not isinstance(outcome, Failure):
                self.kernel = outcome
                return
            reason = outcome.error.partition(";")[0]
            log.warning("warming up on %s, row %s failed (%s)", *prompt.key, reason)

    def _warm_up(self, prompt: Prompt, runs: int) -> str | None:
        def answer(
            method: Method, new_tokens: int = min(WARMUP_TOKENS, prompt.max_new_tokens)
        ) -> None:
            generate(self.model, prompt.as_input(), method, new_tokens, ())

        calls = [partial(answer, self._method(prompt, arm)) for arm in self.arms] * runs
        kernel = None
        if calls:  # of a prefill alone, as decoding runs other kernels
            kernel = attention_kernel(attention_events(partial(calls[0], new_tokens=1)))
        for call in calls:
            call()
        return kernel

    def _method(self, prompt: Prompt, arm: Arm) -> Method:
        return self.methods[arm.label, prompt.dataset.name]

    def visits(self, planned: Sequence[PlannedVisit]) -> Iterator[Visit]:
        """The visits as they are done, in which an arm may have failed: it lacked memory, for
        example.

        With a batch size above 1 the longest prompts come first.
        """
        if self.batch_size == 1:
            for prompt, arms in planned:
                outcomes = {arm.label: self._answer_alone(prompt, arm) for arm in arms}
                yield self._visit(prompt, arms, outcomes)
            return
        unfinished = defaultdict[tuple[str, str], Outcomes](dict)
        longest_first = sorted(planned, key=lambda pair: -len(pair[0].token_ids))
        arms_of = {prompt.key: arms for prompt, arms in planned}
        for prompt, arm, outcome in self._answer_together(longest_first):
            outcomes = unfinished[prompt.key]
            outcomes[arm.label] = outcome
            if len(outcomes) == len(arms_of[prompt.key]):
                yield self._visit(prompt, arms_of[prompt.key], unfinished.pop(prompt.key))

    def _visit(self, prompt: Prompt, order: Sequence[Arm], outcomes: Outcomes) -> Visit:
        """The visit of all arms' answers, compared with the baseline's after all were timed."""
        baseline, arms = outcomes.get(self.baseline or ""), dict[str, Answer | Failure]()
        reference = self._reference(prompt, baseline) if isinstance(baseline, Measured) else None
        measured = [outcome for outcome in outcomes.values() if isinstance(outcome, Measured)]
        prefilled = [outcome.prefilled for outcome in measured if outcome.prefilled is not None]
        if reference is not None and prefilled:
            force = partial(reference.force_together, measured, max(self.batch_size, FORCED))
            if isinstance(failed := self._attempt(prompt, force), Failure):
                log.warning("forced answers run again, one at a time: %s", failed.error)
        for arm in self.arms:
            outcome = outcomes.get(arm.label)
            if isinstance(outcome, Measured):
                compared = None if outcome is baseline else reference
                about = prompt, outcome, self.model, self.tokenizer, self.chat, compared
                arms[arm.label] = self._attempt(prompt, partial(answer_of, *about))
            elif outcome is not None:
                arms[arm.label] = outcome
        self._forget(prefilled)
        outcomes.clear()
        if self.model.device.type == "cpu":
            release_memory(self.model.device)  # of earlier visits; malloc would keep it
        ceiling = attention_ceiling(self.model.config, len(prompt.token_ids))
        return Visit(
            dataset=prompt.dataset.name,
            id=prompt.example.id,
            groups=list(prompt.example.groups),
            gold=list(prompt.example.answers),
            prompt_sha256=prompt.sha256,
            prompt_tokens=len(prompt.token_ids),
            uncut_tokens=prompt.uncut_tokens,
            prompt_end=prompt.text[-PROMPT_END:],
            order=[arm.label for arm in order],
            kernel=self.kernel,
            attention_ceiling=ceiling,
            arms=arms,
        )

    def _reference(self, prompt: Prompt, baseline: Measured) -> Reference:
        """The baseline's answer; with `fidelity=answer`, it and the gold answer are forced."""
        if not self.forces_answers:
            return Reference(baseline, {})
        gold = gold_token_ids(self.tokenizer, prompt.text, prompt.example.answers[0])
        answer = tuple(baseline.generation.token_ids)
        return Reference(baseline, {"answer": answer, "gold": tuple(gold[: prompt.max_new_tokens])})

    def _answer_alone(self, prompt: Prompt, arm: Arm) -> Measured | Failure:
        """An arm's answer, decoded by itself."""
        kept = list[Generation]()
        outcome = self._attempt(prompt, partial(self._generate, prompt, arm, kept))
        if isinstance(outcome, Failure):
            self._forget(kept)
        return outcome

    def _generate(self, prompt: Prompt, arm: Arm, kept: list[Generation]) -> Measured:
        method = self._method(prompt, arm)
        self._rehearse(prompt, method)
        self._peak_so_far = None
        reset_peak(self.model.device)
        after = partial(self._keep, method, kept) if self.forces_answers else None
        generation = generate(
            self.model, prompt.as_input(), method, **prompt.options, after_prefill=after
        )
        is_shared = self.batch_size > 1  # of a run whose other answers are in batches
        peak = None if is_shared else self._peak(method)
        return Measured(method, generation, peak, kept[0] if kept else None, is_shared)

    def _rehearse(self, prompt: Prompt, method: Method) -> None:
        """Run the prefill once, untimed, if its shapes may be new to a backend that builds
        plans.
        """
        models = (self.model, *HELPERS.loaded.values())
        if any(builds_plans(model, self.model.device) for model in models):
            Batch(self.model, 1).add(self._start(prompt, method))

    def _start(
        self, prompt: Prompt, method: Method, after: Callable[[Generation], None] | None = None
    ) -> Generation:
        sampler = Greedy(prompt.end_ids, prompt.options["min_new_tokens"])
        return Generation(
            self.model, prompt.as_input(), method, prompt.max_new_tokens, sampler, after
        )

    def _keep(self, method: Method, kept: list[Generation], prefilled: Generation) -> None:
        """Keep a copy of a prompt that has run, which counts in no peak, until `_forget`."""
        self._peak_so_far = self._peak(method)
        kept.append(prefilled.fork())
        self._kept += kept
        reset_peak(self.model.device)

    def _forget(self, prefills: Collection[Generation | None]) -> None:
        self._kept = [
            kept for kept in self._kept if not any(kept is prefill for prefill in prefills)
        ]

    def _peak(self, method: Method) -> int | None:
        """The answer's peak memory in bytes so far, without other arms' models and kept
        prefills; None if unknown.
        """
        peak = read_peak(self.model.device)
        if peak is None:
            return None
        other_models = HELPERS.nbytes(method.models(), self.model.device)
        now = peak - other_models - sum(prefilled.nbytes for prefilled in self._kept)
        return now if self._peak_so_far is None else max(now, self._peak_so_far)

    def _attempt(self, prompt: Prompt, do: Callable[[], T]) -> T | Failure:
        """What a call returns, or its failure. A UserError is raised, as every example would
        meet it.
        """
        try:
            return do()
        except UserError:
            raise
        except Exception as error:
            failure = failure_of(error, len(prompt.token_ids))
        recover(self.model.device)  # not in the handler, as the error's frames hold memory
        return failure

    def _answer_together(self, planned: Sequence[PlannedVisit]) -> Iterator[Ended]:
        """Yield the arms' answers as they end, several decoding at once.

        After any error but a UserError, such as out of memory, every unfinished visit of the batch
        runs again, one arm at a time.
        """
        waiting = deque((prompt, arm) for prompt, arms in planned for arm in arms)
        while waiting:
            lost = yield from self._fill_batches(waiting)
            recover(self.model.device)  # the batch is gone
            for prompt, arm in lost:
                yield prompt, arm, self._answer_alone(prompt, arm)

    def _fill_batches(self, waiting: deque[Pair]) -> Generator[Ended, None, list[Pair]]:
        """Take pairs out of `waiting` and answer at most `batch_size` at once. First tokens are
        made alone and in order; a visit's begin when the batch has room for all of them, if it ever
        has.

        An error ends that. Returns the pairs that then lack an answer: of the visits in the batch.
        """
        batch, running = Batch(self.model, self.batch_size), dict[Generation, Running]()
        while waiting or running:
            room = self.batch_size - len(running)
            if waiting and room >= min(self.batch_size, _arms_to_begin(waiting, running)):
                newest, step = waiting[0][0], partial(self._begin, batch, waiting, running)
            else:
                newest, step = [*running.values()][-1].prompt, batch.run
            ended = self._attempt(newest, step)
            if isinstance(ended, Failure):
                reason = ended.error.partition(";")[0]
                log.warning("the answers in the batch start again, one arm at a time: %s", reason)
                self._forget([kept for answer in running.values() for kept in answer.kept])
                lost = [(answer.prompt, answer.arm) for answer in running.values()]
                while waiting and waiting[0][0] is newest:
                    lost.append(waiting.popleft())
                return lost
            for generation in ended:
                answer = running.pop(generation)
                prefilled = answer.kept[0] if answer.kept else None
                yield (
                    answer.prompt,
                    answer.arm,
                    Measured(generation.method, generation, None, prefilled, True),
                )
        return []

    def _begin(
        self, batch: Batch, waiting: deque[Pair], running: dict[Generation, "Running"]
    ) -> list[Generation]:
        """Move the next pair from `waiting` into the batch. No answer ends by that."""
        prompt, arm = waiting[0]
        method, kept = self._method(prompt, arm), list[Generation]()
        after = partial(self._keep, method, kept) if self.forces_answers else None
        generation = self._start(prompt, method, after)
        running[generation] = Running(*waiting.popleft(), kept)
        self._rehearse(prompt, method)
        batch.add(generation)
        return []


@dataclass(frozen=True)
class Running:
    """An answer in a batch. kept: a copy of its prompt that has run, for forced answers."""

    prompt: Prompt
    arm: Arm
    kept: list[Generation]


def _arms_to_begin(waiting: deque[Pair], running: Mapping[Generation, Running]) -> int:
    """How many answers the next visit in line begins together: 1 if it has begun."""
    newest = waiting[0][0]
    has_begun = any(answer.prompt is newest for answer in running.values())
    return 1 if has_begun else sum(prompt is newest for prompt, _ in waiting)


@contextmanager
def open_bench(run: Run, load: Load | None = None) -> Iterator[Bench]:
    """The run's model, ready to answer until the block ends. load: gives the model, if several
    runs share it.
    """
    with held_and_released(as_device(run.spec.device)), cpu_time(run.counts_cpu_time):
        yield Bench(
            model=(load or (lambda: load_model(run)))(),
            tokenizer=run.tokenizer,
            chat=run.chat,
            arms=run.arms,
            methods=run.methods,
            baseline=run.baseline,
            batch_size=run.batch_size,
            forces_answers=run.config.fidelity is not None,
        )


def load_model(run: Run) -> PreTrainedModel:
    """The run's model. Raises as `lazyllm.load_model`."""
    log.info("loading %s in %s: %s", run.spec.name, run.spec.dtype, run.dtype_reason)
    if unapplied := unapplied_settings(run.spec):
        settings = ", ".join(f"{key}={value}" for key, value in unapplied.items())
        log.info(
            "answers are greedy: of the model's generation_config.json these have no effect: %s",
            settings,
        )
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    return load_weights(run.spec)
