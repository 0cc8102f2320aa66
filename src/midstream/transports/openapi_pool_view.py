"""The part of `/openapi.json` that describes the view of the pool."""

from __future__ import annotations

from typing import Any

from midstream.transports.openapi_parts import TEXT, errors, json_of, operation, ref
from midstream.transports.pool_view import PATH

_COUNT = {"type": "integer", "minimum": 0}
_MAYBE = {"type": ["integer", "null"]}
_UNITS = {"type": "integer"}
_FLAG = {"type": "boolean"}
_TIME = {"type": "number", "description": "Seconds since 1970, by the gateway's clock"}
_PART = {"type": "string", "description": "The beginning of the id"}
_MODELS = {
    "models": {"type": "array", "items": TEXT, "maxItems": 20},
    "more_models": {**_COUNT, "description": "How many there are besides"},
}


def _all_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _rows(description: str, **properties: Any) -> dict[str, Any]:
    return {"type": "array", "description": description, "maxItems": 200, "items": _all_of(**properties)}


_WORKERS = _rows(
    "The last seen first",
    name=TEXT,
    owner=TEXT,
    **_MODELS,
    agent=TEXT,
    threads=_COUNT,
    seen_at=_TIME,
    here={**_FLAG, "description": "It has work, or was seen in the last five minutes"},
    finished=_COUNT,
    lost=_COUNT,
    earned=_UNITS,
    running={"type": "array", "items": _all_of(generation=_PART, model=TEXT)},
)
_QUEUE = _rows(
    "In the order in which it is offered",
    request=_PART,
    position={**_COUNT, "description": "How many are before it"},
    owner=TEXT,
    **_MODELS,
    max_length={**_COUNT, "description": "Tokens"},
    streams=_FLAG,
    waiting={**_COUNT, "description": "Generations still to be offered"},
    running={**_COUNT, "description": "Generations that workers have"},
    faults=_COUNT,
    created_at=_TIME,
)
_LEASES = _rows(
    "What workers have, the oldest first; what is null is not known here",
    generation=_PART,
    request=_PART,
    payer={"type": ["string", "null"]},
    worker=TEXT,
    model=TEXT,
    max_length=_MAYBE,
    streams={**_FLAG, "description": "False: it comes whole"},
    began_at={"type": ["number", "null"]},
    cancelled={**_FLAG, "description": "Its worker is told with its next post; shown for some seconds after it"},
    posts=_MAYBE,
    bytes=_MAYBE,
    chars=_MAYBE,
    seconds_left={"type": "number", "minimum": 0},
)
_LEDGER = _all_of(
    sum={"const": 0, "description": "Over all accounts"},
    accounts=_COUNT,
    balances=_rows("The largest first", owner=TEXT, units=_UNITS),
    transfers=_rows(
        "The newest first",
        generation=_PART,
        payer=TEXT,
        payee=TEXT,
        units=_COUNT,
        worker=TEXT,
        model=TEXT,
        at=_TIME,
    ),
)
_TOTALS = _all_of(
    workers={**_COUNT, "description": "Seen in the last five minutes"},
    waiting={**_COUNT, "description": "Requests in the queue"},
    running={**_COUNT, "description": "Generations that workers have"},
    posts={**_COUNT, "description": "This and the rest: since this gateway started"},
    units=_COUNT,
    done=_COUNT,
    faulted=_COUNT,
    cancelled=_COUNT,
)
VIEW_SCHEMAS = {
    "Pool": _all_of(at=_TIME, totals=_TOTALS, workers=_WORKERS, queue=_QUEUE, leases=_LEASES, ledger=_LEDGER)
}


def view_path() -> dict[str, Any]:
    """The route, for keys marked `:admin`."""
    seen = {"200": json_of("The pool at this moment", ref("Pool"))}
    return {PATH: {"get": operation("Workers, queue, leases and ledger, for admins", seen | errors(404))}}
