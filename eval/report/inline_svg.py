"""matplotlib's figures as SVG inside a page."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
from markupsafe import Markup

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_IDS = re.compile(r'(\bid="|url\(#|href="#)')


def inline_svg(figure: Any, name: str) -> Markup:
    """The figure as an `<svg>` element; its ids begin with `name`, so that figures share none.

    Letters are drawn as paths, which look the same on every machine.
    """
    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", bbox_inches="tight", metadata=_NO_METADATA)
    text = written.getvalue()
    element = text[text.index("<svg") :]
    attributes = f'<svg role="img" aria-labelledby="{name}-title" '
    return Markup(attributes + _IDS.sub(rf"\g<1>{name}-", element).removeprefix("<svg "))
