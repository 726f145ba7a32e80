"""Several generations that decode together: each step runs their tokens through the layers as one sequence.

Rows are packed, not padded: norms, projections and MLPs run [1, sum of m, w], so a step reads the weights once. Each
row attends to its own KV cache. A prompt is prefilled alone. If a row ends, the next prompt takes its place.

Notation:
    r  rows      m  tokens that a row computes in a group in this step      w  hidden width      v  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.checks import check_once
from lazyllm.engine.decoder import Decoder, open_decoder, ropes_put_back
from lazyllm.engine.devices import read_clock
from lazyllm.engine.generation import (
    Answer,
    Chooser,
    Generation,
    Greedy,
    as_prompt,
    check_fits,
    check_length,
    end_ids_of,
)
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.method import Method
from lazyllm.engine.session import Session, positions_of
from lazyllm.errors import UserError

ROWS = 8  # that decode together by default


def generate_many(
    model: PreTrainedModel,
    prompts: Sequence[Tensor | Sequence[int] | Prompt],
    method: Method,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    min_new_tokens: int = 0,
    rows: int = ROWS,
) -> Iterator[tuple[int, Generation]]:
    """Continue prompts greedily, `rows` at a time: (index in `prompts`, its `Generation`) as they end, in any order.

    Answers, selections, counts and bytes are those of `generate`, up to rounding: products of several rows may round
    otherwise than those of one. A step reads the weights once for all rows, so they decode faster than one by one.
    Prompts are prefilled one by one, the longest first, while the other rows wait. So `ttft_s` is a row's own, but
    `decode_step_s` and `total_s` are those of all rows together, with the prefills of later prompts.

    rows: 1 or more; memory is the sum of the rows' own. Other arguments, and errors, as of `generate`; also UserError
    for a method whose rows cannot decode together, unless `rows` is 1. Between two results, the model is as it was.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows={rows!r}: give a whole number of 1 or more")
    end_ids = end_ids_of(model) if eos_token_ids is None else eos_token_ids
    return answers(
        model, [row_of(model, ids, method, max_new_tokens, Greedy(end_ids, min_new_tokens)) for ids in prompts], rows
    )


@dataclass(frozen=True, eq=False)
class Row:
    """A prompt to answer, after `as_prompt`, `check_fits` and `check_length`. choose: a new one for each row."""

    prompt: Prompt
    method: Method
    max_new_tokens: int
    choose: Chooser


def row_of(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int] | Prompt,
    method: Method,
    max_new_tokens: int,
    choose: Chooser,
) -> Row:
    """A `Row`. Other arguments and errors as of `generate`."""
    prompt = as_prompt(model, input_ids)
    check_fits(model, method, prompt)
    check_length(model, len(prompt), max_new_tokens)
    return Row(prompt, method, max_new_tokens, choose)


def answers(model: PreTrainedModel, rows: Sequence[Row], most: int) -> Iterator[tuple[int, Generation]]:
    """(index, Generation) of the rows as they end, at most `most` at a time; one by one in their order.

    Raises as `generate`, and whatever a chooser raises.
    """
    waiting = sorted(rows, key=lambda row: -len(row.prompt)) if most > 1 else [*rows]
    pack = Pack(model, most)
    while waiting or pack.answers:
        while waiting and len(pack.answers) < most:
            pack.join(waiting.pop(0))
        for row, generation in pack.run():
            yield rows.index(row), generation


class Pack:
    """The rows that decode together, at most `most` of them, with their answers so far.

    Between two calls the model is as it was. After an error its answers cannot go on.
    """

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        self.answers: dict[Row, Answer] = {}
        self._model = model
        self._most = most

    @torch.inference_mode()
    def join(self, row: Row) -> None:
        """Prefill a row's prompt alone and choose its first token. Raises as `generate`."""
        method, choose = row.method, row.choose
        if self._most > 1 and not method.packs:
            raise UserError(f"{method.label} decodes in a way of its own, so its rows cannot be packed: give rows=1")
        check_once(self._model)
        method.prepare(self._model)
        with open_decoder(self._model) as decoder:
            start = read_clock(*decoder.devices)
            session = method.start(decoder, row.prompt, row.max_new_tokens)
            try:
                logits = session.prefill(row.prompt.token_ids.to(decoder.device))
            except Exception:
                session.read_selections()  # as in `run`
                raise
            self.answers[row] = answer = Answer(session, logits, row.max_new_tokens, start)
            picked, now = choose.pick(logits).tolist(), read_clock(*decoder.devices)
            answer.add(*choose.read(picked), now)

    @torch.inference_mode()
    def run(self) -> list[tuple[Row, Generation]]:
        """Decode until rows are done; these leave the pack. Raises as `generate`."""
        with open_decoder(self._model) as decoder:
            for answer in self.answers.values():
                answer.session.decoder = decoder.beside()
            try:
                while not any(answer.is_done for answer in self.answers.values()):
                    self._step(decoder)
            except Exception:
                for answer in self.answers.values():
                    answer.session.read_selections()  # one that breaks a rule may be the cause
                raise
        done = [row for row, answer in self.answers.items() if answer.is_done]
        return [(row, self.answers.pop(row).generation(len(row.prompt))) for row in done]

    def _step(self, decoder: Decoder) -> None:
        """Generate one token in each row."""
        sessions = [answer.session for answer in self.answers.values()]
        newest = [answer.token_ids[-1] for answer in self.answers.values()]
        logits = sessions[0].step(newest[0])[None] if self._most == 1 else step_together(decoder, sessions, newest)
        picks = [row.choose.pick(of_row) for row, of_row in zip(self.answers, logits, strict=True)]
        picked = iter(torch.cat(picks).tolist())  # one transfer for all rows
        now = read_clock(*decoder.devices)
        for (row, answer), pick in zip(self.answers.items(), picks, strict=True):
            answer.add(*row.choose.read([*islice(picked, len(pick))]), now)


def step_together(decoder: Decoder, sessions: Sequence[Session], token_ids: Sequence[int]) -> Tensor:
    """Run one generated token in each session: the logits [r, v] after them.

    decoder: the open one; each session has one `beside` it. Waits for the device at most once per boundary.
    """
    batches, probes = [], [session.decoder.probe for session in sessions]
    for session, token_id in zip(sessions, token_ids, strict=True):
        with ropes_put_back(decoder.model):  # a RoPE that grows with the text starts anew for each row
            batches.append(session.begin_step(torch.full((1,), token_id, device=decoder.device)))
    # the groups of two rows may end at different layers: all rows run together up to the next end of any row's group
    at, stop = [0] * len(sessions), 0  # the group that each row is in; the layers that have run
    crossing: Sequence[int] = range(len(sessions))  # rows at the start of a group
    while stop < len(decoder.layers):
        for row in crossing:
            sessions[row].enter(at[row], batches[row])
        ends = [session.groups[index].layers.stop for session, index in zip(sessions, at, strict=True)]
        start, stop = stop, min(ends)
        batches = decoder.run_packed(probes, batches, range(start, stop))
        crossing = [row for row, end in enumerate(ends) if end == stop]
        questions = ((row, sessions[row].ask(at[row], batches[row])) for row in crossing)
        asked = {row: question for row, question in questions if question is not None}
        found = dict(zip(asked, positions_of([*asked.values()]), strict=True))
        for row in crossing:
            batches[row] = sessions[row].cross_in_step(at[row], batches[row], found.get(row))
            at[row] += 1
    for session in sessions:
        session.end_step()
    return decoder.last_logits([batch.hidden for batch in batches])
