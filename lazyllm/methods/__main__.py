"""The command `methods`: all methods, installed packages' included, with their hyperparameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from typing import Any

from lazyllm.errors import UserError, parser_of
from lazyllm.methods import by_name, code_of, known, settings_of


def lines() -> Iterator[str]:
    """Yield two lines per method: name and summary, then `hyperparameter=default` or `=?`."""
    for name in known():
        try:
            kind, package = by_name(name), code_of(name)
        except UserError as error:
            yield f"{name}: cannot be used: {error}"
            continue
        does = (kind.__doc__ or "").partition("\n")[0]
        yield f"{name}: {does}" + (f" ({package.rpartition(' ')[0]})" if package else "")
        settings = settings_of(kind).items()
        yield "    " + (" ".join(f"{key}={_as_written(value)}" for key, value in settings) or "-")


def _as_written(default: Any) -> str:
    """Write a default in the command line's syntax."""
    if default is MISSING:
        return "?"
    return json.dumps(default) if default is None or isinstance(default, bool) else str(default)


def main(arguments: Sequence[str]) -> int:
    """Run the command `methods`. Returns the exit code."""
    parser_of("methods", __doc__).parse_args(arguments)
    print("\n".join(lines()))
    return 0
