"""What a Flyte that cannot be reached, or that refuses, means to whoever registers or runs: one line, no traceback.

pyflyte prints every exception in one function; it is wrapped. With ``-v`` the traceback is printed as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from traceback import walk_tb

import click
import grpc
import requests
from flytekit.clients.auth.exceptions import AccessTokenNotFoundError, AuthenticationError, AuthenticationPending
from flytekit.clis.sdk_in_container import constants, utils
from flytekit.configuration import Config

from slipstream.errors import UserError

#: The module of flytekit through which every call of the backend goes.
REMOTE = "flytekit.remote.remote"
LOGIN = (AccessTokenNotFoundError, AuthenticationError, AuthenticationPending)
MEND_LOGIN = "log in again, or mend `authType` and what belongs to it in the configuration file"


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, the latest first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def explain(error: Exception, endpoint: str) -> UserError | None:
    """The one line, if a call of the backend at ``endpoint`` is behind the error; a task's own error is none."""
    if not any(frame.f_globals.get("__name__") == REMOTE for frame, _ in walk_tb(error.__traceback__)):
        return None
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
            return UserError(f"Flyte at {endpoint} wants a login, which failed ({cause}); {MEND_LOGIN}")
    return None


def said(code: grpc.StatusCode, details: str) -> str:
    """What the status of a call means, and what mends it."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"has a certificate that is not trusted ({details}); name its authority in `admin.caCertFilePath`"
    if "WRONG_VERSION_NUMBER" in details:
        return f"does not speak TLS ({details}); if it is a sandbox, set `admin.insecure: true`"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"cannot be reached ({details}); check `admin.endpoint`, and remove `admin.insecure` if it speaks TLS"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"does not accept the login ({details}); {MEND_LOGIN}"
    return f"refused: {details} ({code.name})"


def endpoint_of(context: click.Context | None) -> str:
    """Where this command line finds Flyte."""
    file = (context.obj or {}).get(constants.CTX_CONFIG_FILE) if context else None
    return Config.auto(file).platform.endpoint


flytekits_printer = utils.pretty_print_exception


def print_exception(error: Exception, verbosity: int = 1) -> None:
    """Raises ``UserError`` for what :func:`explain` knows, and leaves the rest to flytekit."""
    if verbosity == 0 and not isinstance(error, click.ClickException):
        explained = explain(error, endpoint_of(click.get_current_context(silent=True)))
        if explained:
            raise explained from error
    flytekits_printer(error, verbosity)


def explain_backend_errors() -> None:
    """Let ``pyflyte`` explain them; calling it again changes nothing."""
    utils.pretty_print_exception = print_exception
