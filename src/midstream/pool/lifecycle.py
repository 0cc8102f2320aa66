"""The laws of a request's life.  Pure: the request before, what happens, the request after.

    waiting ──► done         every generation asked for has been handed in
            ├─► failed       three were lost, or it waited for too long
            └─► cancelled    by its requester

While it waits, open_slots + leased + finished is what was asked for.  When it has ended no slot is open; generations
that workers still have come in one by one, which changes nothing but their number.
"""

from __future__ import annotations

from dataclasses import replace

from midstream.pool.shapes import Request, RequestStatus
from midstream.wire import POOL_LEASE_TERM, POOL_MOST_FAULTS, POOL_REQUEST_TERM

# Seconds after which a worker that is not seen is forgotten, and its name free for others.
FORGOTTEN = 30 * 86_400
# SQL is told of a lease's renewals at most once per third of its term, so it may know of an end that much too early.
NOMINATED = POOL_LEASE_TERM + POOL_LEASE_TERM / 3


def taken(request: Request, count: int, now: float) -> Request:
    """A worker has popped `count` of its slots."""
    return replace(
        request,
        open_slots=request.open_slots - count,
        leased=request.leased + count,
        expires_at=max(request.expires_at, now + POOL_REQUEST_TERM),
    )


def handed_in(request: Request, now: float) -> Request:
    """A worker has submitted one."""
    request = replace(request, leased=request.leased - 1)
    if request.status != "waiting":
        return request
    return _over(replace(request, finished=request.finished + 1), now)


def lost(request: Request, now: float, reason: str) -> Request:
    """A leased one will not come.  It is offered again, but not for ever."""
    request = replace(request, leased=request.leased - 1)
    if request.status != "waiting":
        return request
    request = replace(request, faults=request.faults + 1)
    if request.faults >= POOL_MOST_FAULTS:
        return _end(request, "failed", now, f"{POOL_MOST_FAULTS} workers failed: {reason}")
    return replace(request, open_slots=request.open_slots + 1)


def released(request: Request, now: float, *, reoffer: bool) -> Request:
    """A leased one has ended through nobody's fault: offered again, or given up."""
    request = replace(request, leased=request.leased - 1)
    if request.status != "waiting":
        return request
    if reoffer:
        return replace(request, open_slots=request.open_slots + 1)
    return _over(request, now)


def cancelled(request: Request, now: float) -> Request:
    """Its requester wants no more of it.  One that has ended stays as it is."""
    return _end(request, "cancelled", now, "") if request.status == "waiting" else request


def expired(request: Request, now: float) -> Request:
    """It has waited for too long."""
    return _end(request, "failed", now, "no worker took it in time")


def _over(request: Request, now: float) -> Request:
    if request.open_slots or request.leased:
        return request
    if request.finished:
        return _end(request, "done", now, "")
    return _end(request, "failed", now, "its generation was given up")


def _end(request: Request, status: RequestStatus, now: float, reason: str) -> Request:
    return replace(request, status=status, open_slots=0, ended_at=now, reason=reason)
