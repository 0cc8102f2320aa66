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
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the certificate of {error.host}:{error.port} is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"{error.host}:{error.port} speaks no TLS as it should ({error.os_error}); is it http://?"
    if isinstance(error, aiohttp.ClientResponseError) and error.message.startswith("Bad status line"):
        return f"what listens at {error.request_info.url.authority} does not speak HTTP/1.1; is it a gRPC port?"
    return " ".join(str(error).split()) or type(error).__name__
