"""The error of both packages that a user can fix."""

from __future__ import annotations


class UserError(ValueError):
    """An error the user can fix: the message says what was given, what was expected, and what to do.

    Commands show the message without a traceback.
    """
