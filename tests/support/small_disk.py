"""A really small disk: a tmpfs, mounted in a namespace of the test's own."""

import errno
import subprocess
from pathlib import Path

import pytest

PAGE = 4096
MOUNT = 'mount -t tmpfs -o size="$1" none "$0" && shift && exec "$@"'


def on_a_small_disk(directory: Path, *command: str | Path, size: str = "16m") -> subprocess.CompletedProcess[str]:
    """Run a command that finds so much space at ``directory``, in namespaces of user and mounts that end with it."""
    directory.mkdir()
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, directory, size, *command]
    return subprocess.run(inside, capture_output=True, text=True, timeout=1800)


@pytest.fixture(scope="module")
def small_disks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips the test where none can be mounted; import it into a test module to use it."""
    try:
        tried = on_a_small_disk(tmp_path_factory.mktemp("try") / "disk", "true")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")


def fill(filler: Path, pages: int) -> None:
    """Fill the disk of the file ``filler`` except for ``pages`` pages."""
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(0, file.tell() - pages * PAGE))
