"""The base of all settings, and the types that they share."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """Settings: exact types, no unknown keys, never changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _as_text(value: Any) -> Any:
    """A number that Hydra read where a text was meant: out=2024."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Text = Annotated[str, BeforeValidator(_as_text)]
PathText = Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]


def check_different(values: list[int]) -> list[int]:
    """Refuse a list that is empty or holds a number twice. Raises ValueError."""
    if not values or len(set(values)) < len(values):
        raise ValueError("a list of different numbers")
    return values
