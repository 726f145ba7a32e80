"""A chat with a model, whose method prunes each prompt; answers are greedy and are printed as they come."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lazyllm.methods import Method
from lazyllm.models.chat_template import render, text_between_answers, thinking_args, unseen_tokens

if TYPE_CHECKING:
    from lazyllm.engine.generation import Conversation, Generation


@dataclass
class Chat:
    """A chat with a model.

    messages: the chat so far; empty without a chat template.
    conversation: the model's state after these messages; None if the next message needs a new prefill.
    """

    model: Any
    tokenizer: Any
    method: Method
    max_new_tokens: int = 256
    messages: list[dict[str, str]] = field(default_factory=list)
    conversation: Conversation | None = None

    def answer(self, text: str) -> Generation:
        """Print the answer to `text` as it comes, then its cost. Raises ValueError for a text that cannot be asked."""
        import torch
        from transformers import TextStreamer

        from lazyllm.engine.generation import Greedy, end_ids_of, start

        check_text(text)
        tokenizer, end_ids = self.tokenizer, end_ids_of(self.model)
        conversation, self.conversation = self.conversation, None  # kept only if the answer succeeds
        messages, new_ids = [*self.messages, {"role": "user", "content": text}], None
        args = thinking_args(tokenizer) if tokenizer.chat_template else {}
        if conversation is not None:
            after_answer = tokenizer(text_between_answers(tokenizer, text, args), add_special_tokens=False).input_ids
            # no new ids if the template leaves earlier answers out: then the whole chat is a new prompt
            new_ids = unseen_tokens(conversation.token_ids[-1], after_answer, end_ids) or None
        if conversation is None or new_ids is None:
            prompt = render(tokenizer, messages, args) if tokenizer.chat_template else text
            ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
            conversation = start(self.model, ids, self.method)
        streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True)

        class Streaming(Greedy):
            def read(self, sampled: list[float]) -> tuple[int, bool]:
                token_id, is_last = super().read(sampled)
                streamer.put(torch.tensor([token_id]))
                return token_id, is_last

        out = conversation.answer_with(Streaming(end_ids), new_ids, self.max_new_tokens)
        streamer.end()
        if tokenizer.chat_template:
            answer = {"role": "assistant", "content": tokenizer.decode(out.token_ids, skip_special_tokens=True)}
            self.conversation, self.messages = conversation, [*messages, answer]
        print(
            f"[TTFT {out.ttft_s:.3f} s | {out.pct_prompt_tokens_computed:.1f} % of {out.prompt_tokens} prompt tokens "
            f"computed, {out.revived.max()} revived | {len(out.token_ids)} tokens in {out.total_s:.3f} s]",
            file=sys.stderr,
        )
        return out


def check_text(text: str) -> None:
    """Raise ValueError for bytes of the terminal or the command line that are not UTF-8."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("the text is not UTF-8")
