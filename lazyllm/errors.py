"""The commands of both packages share errors that a user can fix, and a parser."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path
from traceback import extract_tb
from typing import Any


class UserError(ValueError):
    """The user can fix this error: it says what was given, what was expected, and what to do.

    Commands show the message without a traceback, and end with `exit_code`.
    """

    exit_code = 2


class FailedExamplesError(UserError):
    """A run has ended, but some of its examples could not be measured."""

    exit_code = 3


def reason_of(error: Exception) -> str:
    """Write an error's kind and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def place_of(error: Exception, file: str = "") -> str:
    """Find an error's place, such as `my_method.py:12`.

    It is the innermost line in `file`, else outside installed packages.
    """
    frames = extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file]
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (inside or ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def require(holds: bool, key: str, value: Any, expected: str) -> None:
    """Raise UserError unless a setting has an allowed value."""
    if not holds:
        raise UserError(f"{key}={value}: expected {expected}")


def nearest(name: str, known: Iterable[str], all_in: str = "lazyllm-bench run --list") -> str:
    """Write the known names, the nearest first; of more than eight, five and where all are."""

    def distance(other: str) -> float:
        return -SequenceMatcher(None, name.lower(), other.lower()).ratio()

    names = sorted(known, key=distance)
    if len(names) <= 8:
        return f"expected one of {', '.join(names)}"
    return f"the nearest names are {', '.join(names[:5])}; {all_in} shows all"


def parser_of(command: str, description: str | None) -> ArgumentParser:
    """Make the parser of `lazyllm-bench COMMAND`; its help shows the description as written."""
    return ArgumentParser(
        prog=f"lazyllm-bench {command}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )
