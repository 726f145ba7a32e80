"""A tokenizer's chat template with a fixed date, and without thoughts unless they are asked for.

New templates take arguments and write the date into the prompt: fixed, the same conversation is always the same prompt.
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
_ANSWER = "<<the answer>>"  # a placeholder, to find the text of a template after an answer


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
    template = _with_date(tokenizer.get_chat_template(), day)
    settings: dict[str, Any] = {"date_string": day.strftime("%d %b %Y"), **args}
    try:
        return tokenizer.apply_chat_template(  # type: ignore[return-value]  # a text, as it is not tokenised
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **settings,
        )
    except TemplateError as error:
        raise UserError(f"the tokenizer's chat template refuses the messages ({error})") from error


def render_behind(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    args: Mapping[str, Any],
    before: Sequence[Mapping[str, str]] = (),
    today: str = TODAY,
) -> str:
    """What the template writes after an answer if `text` is the next message; "" if it leaves earlier answers out.

    before: messages before the first question. Other arguments, and what is raised: as of `render`.
    """
    roles = (("user", "question"), ("assistant", _ANSWER), ("user", text))
    messages = [*before, *({"role": role, "content": said} for role, said in roles)]
    return render(tokenizer, messages, args, today).partition(_ANSWER)[2]


def tokens_behind(last: int, token_ids: Sequence[int], end_ids: Container[int]) -> Sequence[int]:
    """The tokens of `render_behind` to run after an answer whose last token is `last`, without a second end token."""
    return token_ids[last in end_ids and last in token_ids[:1] :]


def _with_date(template: str, today: date) -> str:
    """The template with a fixed date: its `strftime_now` is replaced by a macro, as templates take no functions."""
    if "strftime_now" not in template:
        return template
    parts = {part: today.strftime(part) for part in sorted(set(re.findall(r"%-?[aAbBdmyYjHIMSp]", template)))}
    replaced = "".join(f"|replace('{part}', '{text}')" for part, text in parts.items())
    # the newline after the block is dropped, so the template still starts at the start of a line
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"
