"""Fields of a Responses request, checked: whatever is wrong is refused by the name of the field, as the vendor does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from midstream.errors import BadRequest

_KINDS: dict[type, str] = {
    bool: "a boolean",
    str: "a string",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def typed(value: Any, param: str, *kinds: type) -> Any:
    """The value, if it is of one of these types as JSON knows them.  Raises BadRequest."""
    if type(value) not in kinds:
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        raise BadRequest(
            f"Invalid type for '{param}': expected {wanted}, but got {_KINDS[type(value)]} instead.",
            param=param,
            reason="invalid_type",
        )
    return value


def given(fields: Mapping[str, Any], name: str, within: str, *kinds: type) -> Any:
    """A field that must be there, of one of these types.  Raises BadRequest."""
    param = f"{within}.{name}" if within else name
    if fields.get(name) is None:
        raise BadRequest(f"Missing required parameter: '{param}'.", param=param, reason="missing_required_parameter")
    return typed(fields[name], param, *kinds)


def number(value: Any, param: str, least: float, most: float) -> float:
    """A number within bounds.  Raises BadRequest."""
    told: float = typed(value, param, int, float)
    if not least <= told <= most:
        raise invalid(param, f"expected a number from {least:g} to {most:g}, but got {told:g} instead.")
    return told


def whole_number(value: Any, param: str, least: int, most: int = 2**31 - 1) -> int:
    """An integer within bounds.  Raises BadRequest."""
    told: int = typed(value, param, int)
    if not least <= told <= most:
        raise invalid(param, f"expected an integer from {least} to {most}, but got {told} instead.")
    return told


def one_of(value: Any, param: str, values: Sequence[str]) -> str:
    """One of these texts.  Raises BadRequest."""
    told: str = typed(value, param, str)
    if told not in values:
        known = ", ".join(f"'{known}'" for known in values)
        raise invalid(param, f"'{told[:80]}' is none of {known}.")
    return told


def only(fields: Mapping[str, Any], within: str, names: Sequence[str]) -> None:
    """Nothing but these says something.  Raises BadRequest for what would be passed over."""
    for name, value in fields.items():
        if name not in names and value:
            refuse(f"{within}.{name}" if within else name)


def invalid(param: str, what: str) -> BadRequest:
    """The error for a value of the right type that is no good."""
    return BadRequest(f"Invalid value for '{param}': {what}", param=param, reason="invalid_value")


def refuse(param: str, why: str = "this gateway cannot honour it.") -> NoReturn:
    """Say no to a field by its name: left out in silence it would change what the answer is."""
    raise BadRequest(f"Unsupported parameter: '{param}': {why}", param=param, reason="unsupported_parameter")
