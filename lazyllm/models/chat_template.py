"""A tokenizer's chat template with a fixed date, and without thoughts unless they are asked for.

Recent templates write the current date into the prompt. With a fixed date, a conversation always gives the same prompt.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = "2024-07-26"  # the date in Llama 3's templates if they cannot read the clock
_ANSWER = "<<the answer>>"  # a placeholder: what follows it is the template's text after an answer


def thinking_args(tokenizer: PreTrainedTokenizerBase, thinks: bool = False) -> dict[str, Any]:
    """The argument that turns thoughts on or off, if the template has one."""
    return {"enable_thinking": thinks} if "enable_thinking" in tokenizer.get_chat_template() else {}


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    args: Mapping[str, Any],
    today: str = TODAY,
) -> str:
    """The conversation in the tokenizer's chat template, up to the beginning of the next answer.

    args: the template's arguments. today: YYYY-MM-DD. Raises UserError if the template refuses the messages.
    """
    from jinja2 import TemplateError

    day = date.fromisoformat(today)
    settings: dict[str, Any] = {"date_string": day.strftime("%d %b %Y"), **args}
    settings |= {"chat_template": _with_date(tokenizer.get_chat_template(), day), "add_generation_prompt": True}
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **settings)  # type: ignore[return-value]
    except TemplateError as error:
        raise UserError(f"the tokenizer's chat template refuses the messages ({error})") from error


def text_between_answers(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    args: Mapping[str, Any],
    before: Sequence[Mapping[str, str]] = (),
    today: str = TODAY,
) -> str:
    """The text that the template puts between an answer and the next one, if the user's message is `text`.

    It is "" if the template leaves earlier answers out of the prompt. before: messages before the first question.
    The other arguments and errors are those of `render`.
    """
    roles = (("user", "question"), ("assistant", _ANSWER), ("user", text))
    messages = [*before, *({"role": role, "content": said} for role, said in roles)]
    return render(tokenizer, messages, args, today).partition(_ANSWER)[2]


def unseen_tokens(last: int, token_ids: Sequence[int], end_ids: Container[int]) -> Sequence[int]:
    """Which of `token_ids`, those of a text between two answers, the model has not seen.

    last: last token of the answer before. If it is an end token and also begins the text, the text leaves it out.
    """
    has_ended = last in end_ids and last in token_ids[:1]
    return token_ids[1:] if has_ended else token_ids


def _with_date(template: str, today: date) -> str:
    """The template with a fixed date: its `strftime_now` is replaced by a macro, as templates take no functions."""
    if "strftime_now" not in template:
        return template
    parts = {part: today.strftime(part) for part in sorted(set(re.findall(r"%-?[aAbBdmyYjHIMSp]", template)))}
    replaced = "".join(f"|replace('{part}', '{text}')" for part, text in parts.items())
    # Jinja drops the newline after a block, so the template still begins at the start of a line
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"
