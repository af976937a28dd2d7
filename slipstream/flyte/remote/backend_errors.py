"""Errors in one line for failed calls to a Flyte backend."""

from __future__ import annotations

from collections.abc import Iterator
from traceback import walk_tb

import click
import grpc
import requests
from flytekit.clients.auth.exceptions import AccessTokenNotFoundError, AuthenticationError, AuthenticationPending
from flytekit.clis.sdk_in_container import constants
from flytekit.configuration import Config

from slipstream.shared.errors import UserError

LOGIN = (AccessTokenNotFoundError, AuthenticationError, AuthenticationPending)
FIX_LOGIN = "log in again, or fix `authType` and its settings in the configuration file"

#: Module of flytekit that makes all calls to the backend.
REMOTE = "flytekit.remote.remote"


def explain_remote_error(error: Exception, context: click.Context | None) -> UserError | None:
    """Return a one-line error if a call of ``pyflyte`` to the backend caused ``error``, else None."""
    if not any(frame.f_globals.get("__name__") == REMOTE for frame, _ in walk_tb(error.__traceback__)):
        return None
    file = (context.obj or {}).get(constants.CTX_CONFIG_FILE) if context else None
    return line_about(error, Config.auto(file).platform.endpoint)


def line_about(error: Exception, endpoint: str) -> UserError | None:
    """Return a one-line error for an error of a call to the backend, or None if the cause is elsewhere."""
    for cause in causes(error):
        if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call):
            return UserError(f"Flyte at {endpoint} {said(cause.code(), cause.details() or '')}")
        if isinstance(cause, requests.RequestException):
            url = cause.request.url if cause.request else None
            store = str(url or "its store").partition("?")[0]
            return UserError(
                f"Flyte at {endpoint} is there, but the upload to {store} failed ({type(cause).__name__}); "
                "that address has to be reachable from here"
            )
        if isinstance(cause, (*LOGIN, OSError)):  # an OSError: the program that `admin.command` names
            return UserError(f"Flyte at {endpoint} wants a login, which failed ({cause}); {FIX_LOGIN}")
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def said(code: grpc.StatusCode, details: str) -> str:
    """Return the meaning of the status of a call, and a fix."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"has a certificate that is not trusted ({details}); name its authority in `admin.caCertFilePath`"
    if "WRONG_VERSION_NUMBER" in details:
        return f"does not speak TLS ({details}); if it is a sandbox, set `admin.insecure: true`"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"cannot be reached ({details}); check `admin.endpoint`, and remove `admin.insecure` if it speaks TLS"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"answers, but not as Flyte does ({details}); check `admin.endpoint`"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"does not accept the login ({details}); {FIX_LOGIN}"
    what, another, _ = details.partition(" with different structure already exists")
    if another:  # all differences follow as JSON
        return (
            f"has another {what} under this version, of another profile, other schedules, another image or other code; "
            "leave `--version` out, as it then follows from all of these, or give a new one"
        )
    return f"refused: {details} ({code.name})"
