"""Chat formats: how a model's prompts are wrapped and its answers cleaned, by LongBench or the
tokenizer's template.

New templates take arguments and write the date into the prompt. Both are fixed here, so that
prompts never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError
from lazyllm.models.chat_template import TODAY, render, thinking_args

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The header of xgen-7b-8k-inst's published prompt format, byte for byte, with both newlines.
_XGEN_HEADER = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions.\n\n"
)

THOUGHT_END = "</think>"


@dataclass(frozen=True)
class ChatFormat:
    """The format of a model's prompts, and the cleaning of its answers.

    before, after: the texts around the prompt.
    from_tokenizer: use the tokenizer's chat template instead. or_none: if it has none, use no
        format.
    args: arguments of the template. `enable_thinking` is False by default in templates that have
        it.
    system: the text of a system message before the prompt.
    today: the date, YYYY-MM-DD, for templates that write one into the prompt.
    thinking_tokens: extra tokens of an answer, which then is the text after THOUGHT_END.
    strip: remove white space around answers.
    delete: then delete every occurrence of this text in answers; "" for none.
    """

    before: str = ""
    after: str = ""
    from_tokenizer: bool = False
    or_none: bool = False
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    system: str | None = None
    today: str = TODAY
    thinking_tokens: int = 0
    strip: bool = False
    delete: str = ""

    def uses_template(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether prompts have the tokenizer's chat template."""
        return self.from_tokenizer and bool(not self.or_none or tokenizer.chat_template)

    def template_args(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the arguments of the tokenizer's template. Raises UserError if it has none."""
        if not tokenizer.chat_template:
            instead = "give model.chat=none, llama2 or xgen"
            raise UserError(f"model.chat=auto: the tokenizer has no chat template: {instead}")
        return thinking_args(tokenizer, self.thinking_tokens > 0) | dict(self.args)

    def reads_clock(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the tokenizer's chat template writes a date into the prompt."""
        if not self.uses_template(tokenizer):
            return False
        other = replace(self, today="2001-02-03")
        return self.wrapped(tokenizer, "") != other.wrapped(tokenizer, "")

    def wrapped(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        """Write the text as a message in the tokenizer's chat template, up to the answer.

        Raises UserError if there is no template, or if it refuses the message.
        """
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages = [*system, {"role": "user", "content": text}]
        try:
            return render(tokenizer, messages, self.template_args(tokenizer), self.today)
        except UserError as error:
            raise UserError(f"{error}: see model.system") from error


CHAT_FORMATS: dict[str, ChatFormat] = {
    "none": ChatFormat(),
    "llama2": ChatFormat(before="[INST]", after="[/INST]"),
    "xgen": ChatFormat(
        before=f"{_XGEN_HEADER} ### Human: ",
        after="\n###",
        strip=True,
        delete="Assistant:",
    ),
    "auto": ChatFormat(from_tokenizer=True),
}


def chat_format(name: str | None, **settings: Any) -> ChatFormat:
    """Return the format of a name; None for the tokenizer's template, or no format if it has none.

    settings: other fields.
    Raises UserError for an unknown name, a bad date, or a template's settings in a format without
        template.
    """
    if name is not None and name not in CHAT_FORMATS:
        raise UserError(f"unknown chat format {name!r}; known are {', '.join(CHAT_FORMATS)}")
    known = ChatFormat(from_tokenizer=True, or_none=True) if name is None else CHAT_FORMATS[name]
    chat = replace(known, **settings)
    if not chat.from_tokenizer and (chat.args or chat.system):
        key = "chat_args" if chat.args else "system"
        instead = "give model.chat=auto too"
        raise UserError(f"model.{key} is for the tokenizer's chat template: {instead}")
    try:
        date.fromisoformat(chat.today)
    except ValueError:
        raise UserError(f"model.today={chat.today}: expected a date, YYYY-MM-DD") from None
    return chat


def post_process(text: str, chat: ChatFormat, chat_wrap: bool = True) -> str:
    """Clean a model's answer as `pred.py` does, by `ChatFormat.strip` and `.delete`: only XGen's.

    With thinking tokens (in prompts with a chat format), only the text after the thought counts: ""
    if the thought did not end.
    """
    if chat.thinking_tokens and chat_wrap:
        text = text.rpartition(THOUGHT_END)[2].lstrip() if THOUGHT_END in text else ""
    text = text.strip() if chat.strip else text
    return text.replace(chat.delete, "") if chat.delete else text
