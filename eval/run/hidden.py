"""A hidden question: a prompt's context runs before its question is known, the question as a later turn.

The text is exactly the usual prompt. It is cut before the first token of the row's input (`question_start`). A method
chooses among the tokens before the cut, and the rest runs as in later turns of a conversation (docs/turns.md).
"""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from eval.benchmarks.prompts import BuiltPrompt
from eval.run.case import Case
from eval.run.evidence import evidence_positions, in_sets
from lazyllm import Generation, start
from lazyllm.engine.generation import Forced, Prefilled
from lazyllm.engine.method import Method
from lazyllm.errors import UserError

HIDDEN = "question=hidden"


def question_start(prompt: BuiltPrompt) -> int:
    """The number of tokens before the question: those before the first token with a part of it. Raises UserError."""
    if prompt.turns:
        raise UserError(f"{HIDDEN} asks one question of each row: give turns=1")
    if prompt.spans is None:
        raise UserError(f"{HIDDEN}: the question's place in the tokens is unknown (no fast tokenizer, or a template)")
    if prompt.question is None:
        raise UserError(f"{HIDDEN}: the prompt's question is empty or cut away: give a larger model.max_prompt_tokens")
    cut = int(evidence_positions(prompt.spans, [(prompt.question, prompt.question + 1)])[0])
    if not 1 <= cut <= len(prompt.token_ids) - 2:  # the question's first token ends one turn, the others are the next
        raise UserError(
            f"{HIDDEN}: {cut} of {len(prompt.token_ids)} tokens precede the question: expected 1 or more, "
            "and 2 or more of the question"
        )
    return cut


def answer_hidden(
    model: PreTrainedModel, case: Case, method: Method, after_prefill: Callable[[Prefilled], None] | None = None
) -> tuple[Generation, Generation]:
    """(the run of the context, the answer to the whole prompt). after_prefill: as of `Request`, once both have run.

    The second is the answer to the question, whose times, counts and bytes are those of both runs.
    """
    ids, cut = case.prompt.token_ids, case.cut
    assert cut is not None
    with start(model, case.prompt.as_input(cut), method) as conversation:
        context = conversation.answer_with(Forced(ids[cut : cut + 1]), None, 1)
        question = conversation.answer_with(
            case.sampler(model, ids), ids[cut + 1 :], case.max_new_tokens, after_prefill
        )
    return context, _joined(context, question, cut)


def _joined(context: Generation, question: Generation, cut: int) -> Generation:
    """Both as one answer. The question's first token counts as one of the prompt, no longer as an answer to it."""
    layers = question.computed.shape[1]
    ran = [in_sets(step, np.array([cut]), layers)[:, 0] for step in question.selected]
    return Generation(
        token_ids=question.token_ids,
        first_logits=question.first_logits,
        ttft_s=context.ttft_s + question.ttft_s,
        scoring_s=context.scoring_s + question.scoring_s,
        total_s=context.total_s + question.total_s,
        decode_step_s=question.decode_step_s,
        computed=question.computed + np.logical_or.accumulate(ran),
        selected=question.selected,
        revived=context.revived + question.revived,
        kv_bytes=question.kv_bytes,
        aux_bytes=question.aux_bytes,
        prompt_tokens=question.prompt_tokens + 1,
        scoring_tokens=context.scoring_tokens + question.scoring_tokens,
        attended=context.attended,
    )
