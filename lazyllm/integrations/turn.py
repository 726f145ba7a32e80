"""A turn of a session inside transformers' own `model.generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from lazyllm.engine.declaration import Prompt
from lazyllm.engine.generation import Choose, Conversation, Generation
from lazyllm.integrations.transformers_generate import GenerateWith


@dataclass(frozen=True, kw_only=True)
class TurnOf(GenerateWith):
    """A `custom_generate` for one row that continues a session: only tokens after the session's text run.

    session: the row begins with its text; before its first answer, the row is its prompt.
    """

    session: Conversation

    def _run(
        self, model: PreTrainedModel, prompt: Prompt, max_new_tokens: int, choose: Choose, put: Callable | None
    ) -> Generation:
        more = prompt.token_ids[self.session.num_tokens :]
        return self.session.answer_by(choose, more if len(more) else None, max_new_tokens, put)
