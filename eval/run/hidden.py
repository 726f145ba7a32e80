"""A hidden question: a prompt's context runs before its question is known, the question as a later turn.

The text is exactly the usual prompt. It is cut before the first token of the row's input (`Case.cut`). A method
chooses among the tokens before the cut, and the rest runs as in later turns of a conversation (docs/turns.md).
"""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from eval.run.case import Case
from lazyllm import Generation, start
from lazyllm.engine.generation import Forced, Prefilled
from lazyllm.engine.method import Method


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
        question = conversation.answer_with(case.sampler(), ids[cut + 1 :], case.max_new_tokens, after_prefill)
    return context, _joined(context, question, cut)


def _joined(context: Generation, question: Generation, cut: int) -> Generation:
    """Both as one answer. The question's first token counts as one of the prompt, no longer as an answer to it."""
    layers = question.computed.shape[1]
    ran = [_mark_layers(cut, step, layers) for step in question.selected]
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
    )


def _mark_layers(position: int, selected: dict[int, list[int]], layers: int) -> list[bool]:
    """Tell for each layer whether it computes the token at `position` in a step with these selections."""
    enters, found = True, []
    for layer in range(layers):
        enters = position in selected[layer] if layer in selected else enters
        found.append(enters)
    return found
