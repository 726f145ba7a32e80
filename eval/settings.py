"""All settings share this base and these types, and explain a wrong value in one line."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """Settings take exact types and no unknown keys, and never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _as_text(value: Any) -> Any:
    """Turn a number that Hydra read into the text that was meant: out=2024."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Text = Annotated[str, BeforeValidator(_as_text)]
PathText = Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]


def check_different(values: list[int]) -> list[int]:
    """Refuse a list that is empty or holds a number twice. Raises ValueError."""
    if not values or len(set(values)) < len(values):
        raise ValueError("a list of different numbers")
    return values


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_exact_type": "a mapping",
    "missing": "a value",
    "too_short": "at least one value",
    "string_too_short": "a text that is not empty",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}


@dataclass(frozen=True)
class Fault:
    """A fault says what is wrong with settings.

    place: the parts of the key; empty for a rule of several keys, which `expected` then names.
    """

    place: tuple[str | int, ...]
    kind: str
    given: str
    expected: str


def first_fault(error: ValidationError) -> Fault:
    """Read pydantic's error, for a message of one line."""
    errors: Any = error.errors()
    first = errors[0]
    kind, raised = first["type"], first.get("ctx", {}).get("error")
    given = "null" if kind == "missing" else short(first["input"])
    return Fault(first["loc"], kind, given, _expected(first) if raised is None else str(raised))


def _expected(fault: Any) -> str:
    if fault["type"] == "literal_error":
        return fault["ctx"]["expected"].replace("'", "").replace(", ", " or ")
    text = _EXPECTED.get(fault["type"])
    return fault["msg"] if text is None else text.format(**fault.get("ctx", {}))


def short(value: Any) -> str:
    """Write a value for a message, with at most 80 characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
