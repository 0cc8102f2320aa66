"""Reading the bodies of the pool's routes: every field that is wrong is named in one answer (PROTOCOL.md, "Pool").

Existing workers and clients show that answer to their users as it is: `{"message": …, "errors": {field: complaint}}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import orjson

from midstream.codec.text import whole
from midstream.pool.errors import NulByteInPayload

# What is wrong with a value; None where nothing is.
Check = Callable[[Any], str | None]

INVALID: Final = "Input payload validation failed"
MISSING: Final = "Missing required parameter in the JSON body"
# Complaints in one answer, and characters of a value in one: who sends nonsense need not get it back whole.
_MOST_COMPLAINTS = 50
_SHOWN = 40
# How alone a NUL can stand in JSON.
_NUL = rb"\u0000"


class InvalidFields(Exception):
    """A body is not what the route takes: `errors` has a complaint for each field.  400, without an `rc`."""

    status = 400

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__(INVALID)
        self.errors = dict(errors)

    def body(self) -> dict[str, Any]:
        """What is sent."""
        return {"message": INVALID, "errors": self.errors}


class Unparsable(Exception):
    """A body that is no JSON object.  400, with nothing but a `message`."""

    status = 400

    def body(self) -> dict[str, Any]:
        """What is sent."""
        return {"message": str(self)}


def parse(raw: bytes, *, mend: bool = True, nul: bool = True) -> dict[str, Any]:
    """The JSON object in a body.  Raises Unparsable, and, where none is allowed, NulByteInPayload for a NUL in a text.

    JSON may hold half a surrogate pair (RFC 8259, section 8.2): with `mend` it becomes U+FFFD, else it stays, and its
    other half may yet come.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        fields = _parse_halves(raw, str(error), mend)
    if type(fields) is not dict:
        raise Unparsable("The body must be a JSON object")
    if not nul and _NUL in raw and holds_nul(fields):
        raise NulByteInPayload
    return fields


def _parse_halves(raw: bytes, reason: str, mend: bool) -> Any:
    """What the strict parser refuses is read once more, for half a surrogate pair alone."""
    try:
        if mend:
            raw = whole(json.dumps(json.loads(raw, parse_constant=_no_constant), ensure_ascii=False)).encode()
            return orjson.loads(raw)
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Unparsable(f"The body is not JSON: {reason}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Fields:
    """A JSON object that is read field by field; what is wrong with it is gathered until `done`.

    `errors` may be another reader's, so that both complain in one answer; `path` stands before each name.
    """

    __slots__ = ("_given", "_path", "errors")

    def __init__(self, given: Mapping[str, Any], path: str = "", errors: dict[str, str] | None = None) -> None:
        self._given = given
        self._path = path
        self.errors: dict[str, str] = {} if errors is None else errors

    def take(self, name: str, check: Check, default: Any = None, *, required: bool = False) -> Any:
        """The value; the default where it is absent, null or wrong."""
        value = self._given.get(name)
        if value is None:
            if required:
                self.refuse(name, MISSING)
            return default
        complaint = check(value)
        if complaint is None:
            return value
        self.refuse(name, complaint)
        return default

    def inside(self, name: str) -> Fields:
        """A reader of the object in a field; of an empty one where there is none."""
        return Fields(self.take(name, an_object, {}), f"{self._path}{name}.", self.errors)

    def refuse(self, name: str, complaint: str) -> None:
        if len(self.errors) < _MOST_COMPLAINTS:
            self.errors[f"{self._path}{name}"] = complaint

    def done(self) -> None:
        """Raises InvalidFields where anything was wrong."""
        if self.errors:
            raise InvalidFields(self.errors)


# --- checks -----------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A value in a complaint, as an answer can hold it."""
    try:
        text = whole(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "a value nested too deep to be shown"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def an_object(value: Any) -> str | None:
    return None if type(value) is dict else f"{shown(value)} is not of type 'object'"


def a_tree(value: Any) -> str | None:
    """An object that is kept as it is: nested no deeper than it can be written again."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return "nested too deep"
    return an_object(value)


def a_flag(value: Any) -> str | None:
    return None if type(value) is bool else f"{shown(value)} is not of type 'boolean'"


def anything(value: Any) -> str | None:
    return None


def a_whole(least: int, most: int) -> Check:
    """An integer within bounds; `true` and `5.0` are none."""

    def check(value: Any) -> str | None:
        if type(value) is not int:
            return f"{shown(value)} is not of type 'integer'"
        return _within(value, least, most)

    return check


def a_number(least: float, most: float) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not int and type(value) is not float:
            return f"{shown(value)} is not of type 'number'"
        return _within(value, least, most)

    return check


def _within(value: float, least: float, most: float) -> str | None:
    if value < least:
        return f"{shown(value)} is less than the minimum of {least}"
    if value > most:
        return f"{shown(value)} is greater than the maximum of {most}"
    return None


def a_text(most: int, least: int = 0) -> Check:
    """Text of so many characters."""

    def check(value: Any) -> str | None:
        if type(value) is not str:
            return f"{shown(value)} is not of type 'string'"
        if len(value) < least:
            return f"{shown(value)} is too short"
        return f"{shown(value)} is longer than {most} characters" if len(value) > most else None

    return check


def one_of(*names: str) -> Check:
    def check(value: Any) -> str | None:
        return None if value in names else f"{shown(value)} is not one of {list(names)}"

    return check


def a_list(of: Check, most: int, least: int = 0) -> Check:
    """A list of so many; the complaint is about the first item that is wrong."""

    def check(value: Any) -> str | None:
        if type(value) is not list:
            return f"{shown(value)} is not of type 'array'"
        if len(value) < least:
            return f"{shown(value)} should be non-empty"
        if len(value) > most:
            return f"the list has {len(value)} items, more than {most}"
        return next((complaint for item in value if (complaint := of(item)) is not None), None)

    return check


def holds_nul(value: Any) -> bool:
    """Whether a NUL stands in any text of a parsed body, which PostgreSQL could not store."""
    left = [value]  # and no recursion: a body may be nested deeper than Python can follow
    while left:
        inner = left.pop()
        if type(inner) is str:
            if "\0" in inner:
                return True
        elif type(inner) is list:
            left += inner
        elif type(inner) is dict:
            left += inner.keys()
            left += inner.values()
    return False
