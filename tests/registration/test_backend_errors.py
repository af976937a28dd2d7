"""Unreachable Flyte, TLS errors and refused logins: one line, and exit code 1."""

import datetime
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flyteidl.core.execution_pb2 import WorkflowExecution
from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from slipstream.operations.proofs.processes import free_port
from tests.support import REPOSITORY
from tests.support.command_line import Ended, invoke
from tests.support.faulty_s3 import FaultyS3
from tests.support.flyte_admin import FlyteAdmin, flyte_admin, write_config

COLLECTIVES = REPOSITORY / "workflows/collectives.py"


def run_remote(directory: Path, endpoint: str, *options: str, verbose: bool = False, **admin: Any) -> Ended:
    config = write_config(directory / "flyte.config.yaml", endpoint, **admin)
    words = ["--config", str(config), "run", "--remote", *options, "--image", "a:b", str(COLLECTIVES), "benchmark"]
    return invoke(pyflyte, directory, ["-v", *words] if verbose else words, {})


def one_line(ended: Ended) -> str:
    """Return the message, which must be the only output besides the command's announcement."""
    assert ended.returncode == 1, ended.stdout
    assert "Traceback" not in ended.stdout and 'File "' not in ended.stdout, ended.stdout
    inside = [line.strip("│ ") for line in ended.stdout.splitlines() if line.startswith("│")]
    assert len(inside) == 1, ended.stdout
    return inside[0]


def self_signed() -> tuple[bytes, bytes]:
    """Return a key and a self-signed certificate for ``localhost``."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    unsigned = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, unsigned.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.fixture
def plain(server: FaultyS3) -> Iterator[FlyteAdmin]:
    with flyte_admin(server) as admin:
        yield admin


@pytest.fixture
def behind_tls(server: FaultyS3) -> Iterator[FlyteAdmin]:
    with flyte_admin(server, certificate=self_signed()) as admin:
        yield admin


@pytest.fixture
def with_login(server: FaultyS3) -> Iterator[FlyteAdmin]:
    with flyte_admin(server, token="new") as admin:
        yield admin


def test_nobody_listens(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    said = one_line(run_remote(tmp_path, endpoint))
    assert said.startswith(f"Flyte at {endpoint} cannot be reached (") and "check `admin.endpoint`" in said


@pytest.mark.prove
def test_a_name_that_does_not_exist(tmp_path: Path) -> None:
    said = one_line(run_remote(tmp_path, "flyte.invalid:443"))
    assert said.startswith("Flyte at flyte.invalid:443 cannot be reached (")


@pytest.mark.prove
def test_an_endpoint_that_never_answers_is_given_up_within_a_minute(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        said = one_line(run_remote(tmp_path, endpoint))
    assert said.startswith(f"Flyte at {endpoint} cannot be reached (")
    assert time.monotonic() - started < 60


@pytest.mark.prove
def test_a_certificate_that_nobody_trusts(behind_tls: FlyteAdmin, tmp_path: Path) -> None:
    said = one_line(run_remote(tmp_path, behind_tls.endpoint, insecure=False))
    assert "has a certificate that is not trusted" in said and "`admin.caCertFilePath`" in said


@pytest.mark.prove
def test_tls_where_none_is_expected(behind_tls: FlyteAdmin, tmp_path: Path) -> None:
    assert "remove `admin.insecure` if it speaks TLS" in one_line(run_remote(tmp_path, behind_tls.endpoint))


@pytest.mark.prove
def test_no_tls_where_it_is_expected(plain: FlyteAdmin, tmp_path: Path) -> None:
    said = one_line(run_remote(tmp_path, plain.endpoint, insecure=False))
    assert "does not speak TLS" in said and "`admin.insecure: true`" in said


def test_a_token_that_has_expired(with_login: FlyteAdmin, tmp_path: Path) -> None:
    login: dict[str, Any] = {"authType": "ExternalCommand", "command": ["echo", "old"]}
    said = one_line(run_remote(tmp_path, with_login.endpoint, **login))
    assert "does not accept the login (token is expired by 17h3m); log in again" in said


@pytest.mark.prove
def test_a_token_that_is_accepted(with_login: FlyteAdmin, tmp_path: Path) -> None:
    login: dict[str, Any] = {"authType": "ExternalCommand", "command": ["echo", "new"]}
    accepted = run_remote(tmp_path, with_login.endpoint, **login)
    assert accepted.returncode == 0 and len(with_login.executions) == 1, accepted.stdout


@pytest.mark.prove
@pytest.mark.parametrize("command", [pytest.param("false", marks=pytest.mark.prove), "no-such-program"])
def test_a_login_that_cannot_be_made(with_login: FlyteAdmin, tmp_path: Path, command: str) -> None:
    said = one_line(run_remote(tmp_path, with_login.endpoint, authType="ExternalCommand", command=[command]))
    assert "wants a login, which failed" in said and command in said


def test_a_store_that_cannot_be_reached_from_here(plain: FlyteAdmin, server: FaultyS3, tmp_path: Path) -> None:
    server.down_until = time.monotonic() + 60
    try:
        said = one_line(run_remote(tmp_path, plain.endpoint))
    finally:
        server.down_until = 0.0
    assert f"the upload to {server.url}/flyte/" in said and "Signature" not in said


@pytest.mark.prove
def test_what_the_backend_refuses_is_told_in_its_words(plain: FlyteAdmin, tmp_path: Path) -> None:
    plain.refused = "Requested CPU limit [2] is greater than current limit set in the platform configuration [1]"
    said = one_line(run_remote(tmp_path, plain.endpoint))
    assert f"refused: {plain.refused}" in said


#: As FlyteAdmin has it of propeller, when a task of this project has failed for good.
FAILED = (
    "[4/4] currentAttempt done. Last Error: USER::data: 's3://b/x' does not exist; expected a file\n\n"
    'Trace:\n\n    Traceback (most recent call last):\n      File "/root/tasks/prepare.py", line 50, in list_data\n'
)


@pytest.mark.prove
def test_a_failed_execution_that_is_waited_for_is_told_by_its_cause(plain: FlyteAdmin, tmp_path: Path) -> None:
    plain.closure.phase = WorkflowExecution.FAILED
    plain.closure.error.message = FAILED
    ended = run_remote(tmp_path, plain.endpoint, "--wait")
    assert one_line(ended) == f"execution {next(iter(plain.executions))} failed: data: 's3://b/x' does not exist; " + (
        "expected a file"
    )
    assert "to see execution in the console" in ended.stdout


@pytest.mark.prove
def test_of_another_projects_failure_flytekit_tells_what_there_is(plain: FlyteAdmin, tmp_path: Path) -> None:
    plain.closure.phase = WorkflowExecution.FAILED
    plain.closure.error.message = "Trace:\n\n    frames\n\nMessage:\n\n    ValueError: mine"
    ended = run_remote(tmp_path, plain.endpoint, "--wait")
    assert ended.returncode != 0 and "ValueError: mine" in ended.stdout


@pytest.mark.prove
def test_an_execution_that_succeeds_is_waited_for(plain: FlyteAdmin, tmp_path: Path) -> None:
    plain.closure.phase = WorkflowExecution.SUCCEEDED
    ended = run_remote(tmp_path, plain.endpoint, "--wait")
    assert ended.returncode == 0 and "has succeeded" in ended.stdout, ended.stdout


@pytest.mark.prove
def test_v_shows_flytekits_traceback(tmp_path: Path) -> None:
    ended = run_remote(tmp_path, f"localhost:{free_port()}", verbose=True)
    assert ended.returncode == 1 and "Traceback" in ended.stdout


def test_the_error_of_a_task_is_not_taken_for_flytes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import requests\nfrom flytekit import task\nimport workflows.collectives\n\n\n"
        "@task\ndef fetch() -> str:\n    raise requests.ConnectionError('my own server')\n"
    )
    ended = invoke(pyflyte, tmp_path, ["run", "mine.py", "fetch"], {})
    assert ended.returncode == 1 and "my own server" in ended.stdout and "Flyte at" not in ended.stdout
