"""Measuring: a method and its baseline on the same prompts, in the same process, in alternation.

An example of several turns is a session of each, one after the other; each continues with its own answers.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import ChatFormat, post_process
from eval.benchmarks.metrics import second_score
from eval.benchmarks.prompts import BuiltPrompt, gold_token_ids
from eval.benchmarks.suite import Dataset, Example
from eval.store.record import PROMPT_END, Failure, LaterTurn, Measurement, Record, Trace, compact_counts
from lazyllm import Generation, Prompt, generate, start
from lazyllm.engine.decoder import importance_of_layers
from lazyllm.engine.devices import devices_of, read_clock
from lazyllm.engine.flops import prefill_flops
from lazyllm.engine.generation import Greedy
from lazyllm.engine.pack import Pack, Row, row_of
from lazyllm.errors import UserError, reason_of
from lazyllm.measuring import (
    attention_events,
    attention_kernel,
    read_peak,
    release_memory,
    reset_peak,
    utilisation,
)
from lazyllm.methods import Baseline, Method
from lazyllm.methods.support.other_models import park

log = logging.getLogger(__name__)

WARMUP_TOKENS = 4  # for a prefill, a decoding step that revives, and a step after it


@dataclass(frozen=True)
class Case:
    """One example with its prompt and method, ready to be measured. turns: of the method, as in `lazyllm.start`."""

    dataset: Dataset
    example: Example
    prompt: BuiltPrompt
    method: Method
    max_new_tokens: int
    end_ids: tuple[int, ...]
    turns: str = "continue"

    def turns_of(self, method: Method) -> str:
        """What later turns do: the baseline that the method is compared with continues."""
        return self.turns if method is self.method else "continue"

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset.name, self.example.id

    @property
    def answering(self) -> dict[str, Any]:
        """The options of `lazyllm.generate`."""
        least = 1 if self.dataset.newline_ends else 0
        return {"max_new_tokens": self.max_new_tokens, "eos_token_ids": self.end_ids, "min_new_tokens": least}


def converse(model: PreTrainedModel, case: Case, method: Method) -> Iterator[Generation]:
    """The case's answers, turn by turn. Every turn follows the method's own answers, as in a real conversation."""
    with start(model, case.prompt.as_input(), method, turns=case.turns_of(method)) as conversation:
        out = conversation.answer(None, **case.answering)
        yield out
        for turn in case.prompt.turns:
            out = conversation.answer(turn.behind(out.token_ids, case.end_ids), **case.answering)
            yield out


@dataclass(frozen=True)
class _Run:
    """A method's answers, turn by turn, and the peak memory in bytes by the end of each. turns: as of `Case`.

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
        flops = prefill_flops(config, out.computed[0].tolist())
        if earlier:
            return flops - prefill_flops(config, earlier[-1].computed[-1].tolist(), logits=0)
        return flops + self.method.scoring_flops(config, out.prompt_tokens)


@dataclass
class Bench:
    """A model in this process, to measure methods on.

    paired: also measure the baseline on each example, "ttft" only up to its first token. forced: then also feed the
    baseline's and gold answers to both. evidence: record the evidence that each layer computes. rows: answers that
    decode together, two of a paired example, after their first tokens. attention_kernel: as of `Record`; known after
    `warm_up`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    paired: bool | str
    forced: bool = False
    evidence: bool = True
    rows: int = 1
    attention_kernel: str | None = None

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Run the method, and the baseline if paired, `runs` times on the first prompt; the first run is profiled.

        So the first record is no slower than the others. If that prompt does not fit into memory, the shortest one
        takes its place; measuring the first records the failure.
        """
        for case in (cases[0], min(cases, key=lambda case: len(case.prompt.token_ids))):
            try:
                self._warm_up_on(case, runs)
                return
            except UserError:
                raise
            except Exception as error:
                log.warning("warming up on %s, row %s failed (%s)", *case.key, reason_of(error))
            free(*devices_of(self.model))

    def _warm_up_on(self, case: Case, runs: int) -> None:
        options = {"max_new_tokens": min(WARMUP_TOKENS, case.max_new_tokens), "eos_token_ids": ()}
        methods = [Baseline(), case.method] if self.paired else [case.method]
        calls = [partial(generate, self.model, case.prompt.as_input(), method, **options) for method in methods] * runs
        if calls:
            self.attention_kernel = attention_kernel(attention_events(calls[0]))
        for call in calls[1:]:
            call()

    def measure(self, cases: Sequence[Case]) -> Iterator[Record | Failure]:
        """Each example's record, or a failure: out of memory, logits that are not finite, an error in a method.

        The order of the two generations alternates, so that neither profits from it. Examples of several turns are
        measured one by one, whatever `rows` is.
        """
        alone = [case for case in cases if self.rows == 1 or case.prompt.turns]
        for number, case in enumerate(alone):
            outcome = _outcome(case, partial(self.record, case, baseline_first=number % 2 == 0))
            yield outcome
            if isinstance(outcome, Failure):
                free(*devices_of(self.model))
        if self.rows > 1:
            at_once = max(1, self.rows // (1 + (self.paired is True)))
            yield from self._measure_together([case for case in cases if not case.prompt.turns], at_once)

    def _measure_together(self, cases: Sequence[Case], most: int) -> Iterator[Record | Failure]:
        """As `measure`, the longest prompts first, at most `most` examples at once.

        After an error, the examples in the pack start again, half as many at once until all of them have ended; a lone
        example's is its failure.
        """
        waiting, number = sorted(cases, key=lambda case: len(case.prompt.token_ids)), 0
        pack, inside = Pack(self.model, self.rows), list[tuple[Case, dict[str, Row]]]()
        done = dict[Row, Generation]()
        while waiting or inside:
            failure = None
            try:
                if waiting and len(inside) < most:
                    case, rows = waiting.pop(), dict[str, Row]()
                    inside.append((case, rows))
                    for side, method, its_case in self._sides(case, baseline_first=number % 2 == 0):
                        prompt, choose = case.prompt.as_input(), Greedy(case.end_ids, case.answering["min_new_tokens"])
                        rows[side] = row_of(self.model, prompt, method, its_case.max_new_tokens, choose)
                        pack.join(rows[side])
                    number += 1
                else:
                    done |= pack.run()
            except UserError:
                raise  # all other examples would fail too
            except Exception as error:
                failure = _failure(inside[0][0], error)
            if failure is not None:  # not in the handler, as the error's frames hold memory
                lost = [case for case, _ in inside]
                pack, inside, done = Pack(self.model, self.rows), [], {}
                free(*devices_of(self.model))
                if len(lost) == 1:
                    yield failure
                    continue
                reason = failure.reason.partition(";")[0]
                log.warning("%d examples at once until %d have ended: %s", len(lost) // 2, len(lost), reason)
                yield from self._measure_together(lost, len(lost) // 2)
            for example in [one for one in inside if done.keys() >= {*one[1].values()}]:
                inside.remove(example)
                case, rows = example
                runs = {side: _Run(row.method, "continue", [done.pop(row)], [None], True) for side, row in rows.items()}
                yield _outcome(case, partial(self.record_of, case, runs["method"], runs.get("baseline")))

    def _sides(self, case: Case, baseline_first: bool) -> Iterator[tuple[str, Method, Case]]:
        """(side, method, its case) in order. A draft or scorer counts only in its own method's memory."""
        sides = {"method": case.method} | ({"baseline": Baseline()} if self.paired else {})
        for side in reversed(sides) if baseline_first else sides:
            if not sides[side].models():
                park()
            only_first = self.paired == "ttft" and side == "baseline"
            yield side, sides[side], replace(case, max_new_tokens=1) if only_first else case

    def record(self, case: Case, baseline_first: bool) -> Record:
        """The record of one example."""
        runs = {side: self._run(its_case, method) for side, method, its_case in self._sides(case, baseline_first)}
        return self.record_of(case, runs["method"], runs.get("baseline"))

    def record_of(self, case: Case, method: _Run, baseline: _Run | None) -> Record:
        """The record of a case's answers."""
        turns = list[tuple[Measurement, Measurement | None]]()
        for turn in range(len(method.outs)):
            beside = self._fidelity(case, turn, baseline, method) if baseline is not None else {}
            whole = self._measurement(case, turn, baseline) if baseline is not None and self.paired is True else None
            turns.append((replace(self._measurement(case, turn, method), **beside), whole))
        ttft_s = baseline.outs[0].ttft_s if baseline is not None and self.paired == "ttft" else None
        return record_of(case, turns, baseline_ttft_s=ttft_s, attention_kernel=self.attention_kernel)

    def trace(self, case: Case) -> Trace:
        """Generate once more, and keep what records leave out. Raises RuntimeError or FloatingPointError."""
        out = generate(self.model, case.prompt.as_input(), case.method, **case.answering)
        importance = importance_of_layers(self.model, case.prompt.token_ids)
        group_starts, computed = compact_counts(out.computed)
        return Trace(
            dataset=case.dataset.name,
            id=case.example.id,
            tokens=_texts_of_prompt(self.tokenizer, case.prompt),
            generated=_texts_of_answer(self.tokenizer, out.token_ids),
            importance=[[float(f"{value:.4g}") for value in row] for row in importance.tolist()],
            selected=selections_that_ran(out),
            group_starts=group_starts,
            computed=computed,
        )

    def _run(self, case: Case, method: Method) -> _Run:
        devices = devices_of(self.model)
        reset_peak(*devices)
        run = _Run(method, case.turns_of(method), [], [])
        if case.prompt.turns:
            answers = converse(self.model, case, method)
        else:
            answers = [generate(self.model, case.prompt.as_input(), method, **case.answering)]
        for out in answers:
            run.outs.append(out)
            run.peaks.append(read_peak(*devices))
        return run

    def _fidelity(self, case: Case, turn: int, baseline: _Run, own: _Run) -> dict[str, Any]:
        """The fields of `Measurement` that compare a method with its baseline, after both were timed.

        Answers are forced in the first turn only: in later turns, the two have different texts before them.
        """
        if self.paired == "ttft":
            return of_first_tokens(baseline.outs[turn], own.outs[turn])
        found = of_generations(baseline.outs[turn], own.outs[turn])
        if not self.forced or turn:
            return found
        gold = gold_token_ids(self.tokenizer, case.prompt.text, case.example.answers[0])[: case.max_new_tokens]
        for name, token_ids in (("answer", baseline.outs[0].token_ids), ("gold", gold)):
            theirs, ours = (
                forced_logits(self.model, case.prompt.as_input(), method, token_ids)
                for method in (Baseline(), case.method)
            )
            found[f"{name}_kl"], found[f"{name}_log_likelihood"] = of_forced(theirs, ours, token_ids)
        return found

    def _measurement(self, case: Case, turn: int, run: _Run) -> Measurement:
        out = run.outs[turn]
        decoded = self.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        group_starts, computed = compact_counts(out.computed)
        flops = run.prefill_flops(self.model.config, turn)
        return Measurement(
            **scored(case, decoded, self.chat, turn),
            token_ids=out.token_ids,
            ttft_s=out.ttft_s,
            scoring_s=out.scoring_s,
            scoring_tokens=out.scoring_tokens,
            total_s=None if run.packed else out.total_s,
            decode_step_s=None if run.packed else out.decode_step_s,
            pct_prompt_tokens_computed=out.pct_prompt_tokens_computed,
            group_starts=group_starts,
            computed=computed,
            kv_bytes=out.kv_bytes,
            aux_bytes=out.aux_bytes,
            peak_memory_bytes=run.peaks[turn],
            prefill_flops=flops,
            prefill_mfu=utilisation(self.model, flops, out.ttft_s),
            tokens_computed=run.tokens_computed(turn),
            revived_tokens=float(out.revived.mean()),
            tokens_computed_so_far=sum(map(run.tokens_computed, range(turn + 1))),
            total_s_so_far=None if run.packed else sum(done.total_s for done in run.outs[: turn + 1]),
            **(_evidence(case.prompt, turn, run) if self.evidence else {}),
        )


def record_of(case: Case, turns: Sequence[tuple[Measurement, Measurement | None]], **others: Any) -> Record:
    """The record of a case's answers. turns: the method's and the baseline's, in order. others: fields of `Record`."""
    messages, asked = (case.prompt, *case.prompt.turns), (case.example, *case.example.turns)
    first, *later = (
        {
            "prompt_sha256": message.sha256,
            "prompt_tokens": len(message.token_ids),
            "method": method,
            "baseline": baseline,
            "prompt_end": message.text[-PROMPT_END:],
            "answers": list(question.answers),
        }
        for message, question, (method, baseline) in zip(messages, asked, turns, strict=True)
    )
    return Record(
        dataset=case.dataset.name,
        id=case.example.id,
        prompt_tokens_before_truncation=case.prompt.tokens_before_truncation,
        groups=list(case.example.groups),
        later=[LaterTurn(**turn) for turn in later] or None,
        **first,
        **others,
    )


def scored(case: Case, decoded: str, chat: ChatFormat, turn: int = 0) -> dict[str, Any]:
    """The fields of `Measurement` that an answer's text determines."""
    text = post_process(decoded, chat, case.dataset.chat_wrap)
    answers = list((case.example, *case.example.turns)[turn].answers)
    return {
        "text": text,
        "score": SUITES[case.dataset.suite].score(case.dataset, text, answers, list(case.example.all_classes)),
        "rouge_l": second_score(case.dataset, text, answers),
    }


def _evidence(prompt: BuiltPrompt, turn: int, run: _Run) -> dict[str, Any]:
    """The fields of `Measurement` about the evidence of a turn's question; none if it is unknown."""
    positions = evidence_positions(replace(prompt, evidence=(prompt, *prompt.turns)[turn].evidence))
    if not len(positions):
        return {}
    in_prefill, revived = evidence_computed(run.outs[turn], positions, run.earlier(turn))
    return {
        "evidence_tokens": len(positions),
        "evidence_recall": float(in_prefill[-1]),
        "evidence_prefill": in_prefill.tolist(),
        "evidence_revived": revived.tolist(),
    }


def of_first_tokens(baseline: Generation, method: Generation) -> dict[str, Any]:
    """The fields of `Measurement` that compare the first tokens of two generations."""
    p, q = _log_probabilities(baseline.first_logits), _log_probabilities(method.first_logits)
    return {"kl": mean_kl(p, q), "top1_agrees": int(p.argmax() == q.argmax())}


def of_generations(baseline: Generation, method: Generation) -> dict[str, Any]:
    """The fields of `Measurement` that compare two finished generations."""
    ours, theirs = method.token_ids, baseline.token_ids
    return of_first_tokens(baseline, method) | {
        "leading_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))),
        "edit_similarity": edit_similarity(ours, theirs),
        "same_answer": int(ours == theirs),
    }


def of_forced(baseline: Tensor, method: Tensor, token_ids: Sequence[int]) -> tuple[float, float]:
    """(mean KL per token, log-likelihood per token minus the baseline's) of forced tokens.

    baseline, method: [t, v] logits before each of the t tokens.
    """
    p, q = _log_probabilities(baseline), _log_probabilities(method)
    chosen = torch.tensor(token_ids)[:, None]
    return mean_kl(p, q), float((q.gather(1, chosen) - p.gather(1, chosen)).mean())


def forced_logits(model: PreTrainedModel, prompt: Prompt, method: Method, token_ids: Sequence[int]) -> Tensor:
    """[t, v] the method's logits before each of t tokens, if its answer is forced to be these tokens.

    Each token but the last is run as a decoding step of the method. The logits are on the host.
    """
    waiting, seen = iter(token_ids), []

    def choose(logits: Tensor) -> tuple[int, bool]:
        seen.append(logits.cpu())
        return next(waiting), False

    with start(model, prompt, method) as conversation:
        conversation.answer_by(choose, None, len(token_ids))
    return torch.stack(seen)


def mean_kl(p: Tensor, q: Tensor) -> float:
    """KL(p || q) in nats of log-probabilities [..., v], mean over all but the last axis."""
    terms = torch.where(p == -torch.inf, 0, p.exp() * (p - q))
    return max(0.0, float(terms.sum(-1).mean()))  # rounding can make it negative


def edit_similarity(a: Sequence[int], b: Sequence[int]) -> float:
    """1 - Levenshtein distance of two lists / length of the longer one; 1 if both are empty."""
    above = list(range(len(b) + 1))
    for i, token in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (token != other)))
        above = row
    return 1 - above[-1] / max(len(a), len(b), 1)


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.cpu().double().log_softmax(-1)


def evidence_positions(prompt: BuiltPrompt) -> np.ndarray:
    """Ascending positions of the tokens that overlap the evidence; none if it is not known."""
    if prompt.spans is None:
        return np.empty(0, dtype=int)
    starts, stops = prompt.spans.T
    inside = np.zeros(len(starts), dtype=bool)
    for first, last in prompt.evidence:
        inside |= (starts < last) & (stops > first) & (starts < stops)
    return np.flatnonzero(inside)


def evidence_computed(
    out: Generation, positions: np.ndarray, earlier: Sequence[Generation] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """([layers], [layers]) the shares of the tokens at `positions` that are computed in prefill, and revived later.

    earlier: the conversation's answers before this one. What they have computed counts as prefill.
    """
    steps = [step for answer in (*earlier, out) for step in selections_that_ran(answer)]
    prefill = len(steps) - len(out.selected)  # the number of this answer's first step
    layers = out.computed.shape[1]
    # without a selection, the very first step computes the whole prompt, and every later one nothing of it
    ran = [(number, _in_sets(step, positions, layers)) for number, step in enumerate(steps) if step or number == 0]
    in_prefill = np.any([sets for number, sets in ran if number <= prefill], axis=0)
    computed = np.any([sets for _, sets in ran], axis=0)
    return in_prefill.mean(axis=1), (computed & ~in_prefill).mean(axis=1)


def selections_that_ran(out: Generation) -> list[dict[int, list[int]]]:
    """The selections with key 0 for tokens that were chosen before the prefill: they enter layer 1."""
    first, *later = out.selected
    is_selected_before = bool(first) and int(out.computed[0, 0]) < out.prompt_tokens
    return [{0: next(iter(first.values()))} if is_selected_before else first, *later]


def _in_sets(selected: dict[int, list[int]], positions: np.ndarray, layers: int) -> np.ndarray:
    """[layers, positions] bool: whether the token is in a step's set for the layer; all are before the first cut."""
    sets = []
    present = np.ones(len(positions), dtype=bool)
    for layer in range(layers):
        present = np.isin(positions, selected[layer]) if layer in selected else present
        sets.append(present)
    return np.array(sets)


def _outcome(case: Case, record: Callable[[], Record]) -> Record | Failure:
    """The case's record, or its failure. Raises UserError: all other examples would fail too."""
    try:
        return record()
    except UserError:
        raise
    except Exception as error:
        return _failure(case, error)


def _failure(case: Case, error: Exception) -> Failure:
    advice = ""
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):  # of a device, or of the host
        advice = (
            f"; out of memory at {len(case.prompt.token_ids)} prompt tokens: lower model.max_prompt_tokens, or "
            "give model.quantise=int8, model.device_map=auto, or method.aux_device=cpu (lazy)"
        )
    return Failure(*case.key, reason_of(error) + advice, traceback.format_exc())


def free(*devices: torch.device) -> None:
    """Free the memory that a failed example left. Raises UserError if a device has failed."""
    try:
        release_memory(*devices)
        read_clock(*devices)  # waits for them
    except RuntimeError as error:
        raise UserError(
            f"{', '.join(map(str, devices))} does not recover from the last failure ({' '.join(str(error).split())}), "
            "so all other examples would fail. Finished ones are safe: give the same command again"
        ) from error


@contextmanager
def released(devices: tuple[torch.device, ...]) -> Iterator[None]:
    """Free the devices' memory when the block ends, before another run gets the devices."""
    try:
        yield
    finally:
        try:
            release_memory(*devices)
        except RuntimeError as error:  # only logged: the run's own error is raised
            log.warning("%s: its memory could not be freed (%s)", ", ".join(map(str, devices)), error)


def _texts_of_prompt(tokenizer: PreTrainedTokenizerBase, prompt: BuiltPrompt) -> list[str]:
    """Each token's text: its span of the prompt if known, as decoding a single token loses the space before a word."""
    names: Any = tokenizer.convert_ids_to_tokens(list(prompt.token_ids))
    if prompt.spans is None:
        return [str(tokenizer.decode([token_id])) for token_id in prompt.token_ids]
    texts, done = [], 0
    for name, (first, stop) in zip(names, prompt.spans.tolist(), strict=True):
        texts.append(prompt.text[done:stop] if stop > first else str(name))
        done = max(done, stop)
    return texts


def _texts_of_answer(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    """The text that each token adds to the answer; a letter of several tokens belongs to the last."""
    shown, texts = "", []
    for end in range(1, len(token_ids) + 1):
        whole = str(tokenizer.decode(token_ids[:end]))
        unfinished = whole.endswith("\ufffd") and end < len(token_ids)
        texts.append("" if unfinished else whole[len(shown) :])
        shown = shown if unfinished else whole
    return texts
