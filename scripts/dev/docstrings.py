"""An extension of Griffe, which reads docstrings for the site: `name: what it is` becomes an item of a list."""

import re
from typing import Any

import griffe

# at the begin of a line, perhaps after other such lines; its further lines are indented
_FIELD = re.compile(r"^(?P<name>\w+): (?P<what>.+(?:\n +\S.*)*)", re.MULTILINE)


def as_list(docstring: str) -> str:
    """The docstring with its runs of `name: text` lines as Markdown lists."""
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(_FIELD.sub(_item, text) if _FIELD.match(text) else text for text in paragraphs)


def _item(match: re.Match[str]) -> str:
    return f"- `{match['name']}`: {' '.join(match['what'].split())}"


class FieldLists(griffe.Extension):
    """Changes the docstring of every object that has one."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
