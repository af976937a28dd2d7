"""Untrusted directories: with links out of them, exchanged during reading, and in the Hub's cache."""

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from slipstream.shared import untrusted_files

SECRET = "aws_secret_access_key = wJalrXUtnFEMI"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def make_secret(directory: Path) -> Path:
    """Write a file of the user's that no result may hold."""
    path = directory / "home/.aws/credentials"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SECRET)
    return path


def replace_by_link(path: Path, target: Path | str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def holds_secret(directory: Path) -> bool:
    """Return True if a file of a directory holds the secret; links count as the files that they lead to."""
    return any(SECRET.encode() in path.read_bytes() for path in directory.rglob("*") if path.is_file())


def exchange_at_open(monkeypatch: pytest.MonkeyPatch, path: Path, target: Path) -> list[str]:
    """Replace ``path`` by a link to ``target`` at the last moment: when it is opened, after every earlier check.
    Returns a list that tells afterwards that it was."""
    exchanged, right = list[str](), untrusted_files.os.open

    def open_exchanged(name: str | Path, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if Path(name).name == path.name and not path.is_symlink():
            replace_by_link(path, target)
            exchanged.append(str(name))
        return right(name, flags, *more, dir_fd=dir_fd)

    monkeypatch.setattr(untrusted_files.os, "open", open_exchanged)
    return exchanged


@contextmanager
def exchanging(path: Path, target: Path) -> Iterator[None]:
    """Let another process replace ``path`` by a link to ``target``, and the link by the file, all the time."""
    code = (
        "import os, sys\n"
        "path, target, content = sys.argv[1], sys.argv[2], open(sys.argv[1], 'rb').read()\n"
        "while True:\n"
        "    os.symlink(target, path + '.new'); os.replace(path + '.new', path)\n"
        "    open(path + '.new', 'wb').write(content); os.replace(path + '.new', path)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path), str(target)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def download_from_hub(files: Path, cache: Path) -> Path:
    """Download the files of a directory with Hugging Face's own client, from a server that answers as the Hub does.
    Returns the snapshot in the client's ``cache``."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.wfile.write(self.answer())

        def answer(self) -> bytes:
            content = (files / self.path.split(f"/resolve/{REVISION}/")[1]).read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return content

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        for path in sorted(files.iterdir()):
            found = hf_hub_download(
                "some/model", path.name, revision=REVISION, cache_dir=cache, endpoint=endpoint, token=False
            )
        server.shutdown()
    snapshot = Path(found).parent
    assert snapshot.name == REVISION and all(path.is_symlink() for path in snapshot.iterdir())
    return snapshot
