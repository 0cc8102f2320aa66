"""Why there was no answer, in words for whoever runs a worker."""

from __future__ import annotations

import os

import aiohttp


def why_silent(error: Exception, patience: float) -> str:
    """What kept an answer from coming, by what aiohttp raised; `patience`: the seconds it had."""
    if isinstance(error, TimeoutError):
        return f"no answer within {patience:g} s"
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        cause = error.os_error
        told = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror or str(cause)
        return f"{error.host}:{error.port} cannot be reached: {told}"
    return " ".join(str(error).split()) or type(error).__name__
