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
    """What to hand to transformers as `custom_generate` for one row: the session runs only what is new to it.

    session: what it has read is how the row begins. Before its first answer it is the row.
    """

    session: Conversation

    def _run(
        self, model: PreTrainedModel, prompt: Prompt, max_new_tokens: int, choose: Choose, put: Callable | None
    ) -> Generation:
        more = prompt.token_ids[self.session.num_tokens :]
        return self.session.answer_by(choose, more if len(more) else None, max_new_tokens, put)
