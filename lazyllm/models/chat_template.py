"""A tokenizer's chat template with a fixed date, and without thoughts unless they are wanted.

Recent templates write the current date into the prompt. With a fixed date, the same messages always
give the same prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = "2024-07-26"  # the date in Llama 3's templates if they cannot read the clock


def thinking_args(tokenizer: PreTrainedTokenizerBase, thinks: bool = False) -> dict[str, Any]:
    """Make the argument that turns thoughts on or off, if the template has one."""
    has_key = "enable_thinking" in tokenizer.get_chat_template()
    return {"enable_thinking": thinks} if has_key else {}


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    args: Mapping[str, Any],
    today: str = TODAY,
) -> str:
    """Write the messages in the tokenizer's chat template, up to the beginning of the next answer.

    args: the template's arguments. today: YYYY-MM-DD.
    Raises UserError if the template refuses the messages.
    """
    from jinja2 import TemplateError

    day = date.fromisoformat(today)
    settings: dict[str, Any] = {"date_string": day.strftime("%d %b %Y"), **args}
    settings["chat_template"] = _with_date(tokenizer.get_chat_template(), day)
    settings["add_generation_prompt"] = True
    copies = [dict(message) for message in messages]
    try:
        text: Any = tokenizer.apply_chat_template(copies, tokenize=False, **settings)
    except TemplateError as error:
        raise UserError(f"the tokenizer's chat template refuses the messages ({error})") from error
    return text


def _with_date(template: str, today: date) -> str:
    """Fix the date: a macro replaces `strftime_now`, as templates take no functions."""
    if "strftime_now" not in template:
        return template
    parts = sorted(set(re.findall(r"%-?[aAbBdmyYjHIMSp]", template)))
    replaced = "".join(f"|replace('{part}', '{today.strftime(part)}')" for part in parts)
    # Jinja drops the newline after a block, so the template still begins at the start of a line
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}"
    return f"{macro}\n{template}"
