"""A root file system in which a Dockerfile's instructions are executed without Docker.

The base image is this machine's own root, read through an overlay whose changes stay in memory and vanish at the end:
it has the dependencies installed already, so that pip finds all requested packages. Everything else is like
``docker build`` and ``docker run``: files owned by root by default, ``RUN`` as root, and the finished container's
process with the number in ``USER`` and the image's environment and directory.
"""

import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.dockerfile import Instruction, copied

#: Set up in a mount namespace of its own, which ends with the process that holds it.
MOUNT = """
mount -t tmpfs none "$1" && mkdir "$1/upper" "$1/work" "$1/root" &&
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root" &&
mount --rbind /proc "$1/root/proc" && mount --rbind /dev "$1/root/dev" &&
mount -t tmpfs -o mode=1777 none "$1/root/tmp" &&
echo ready && read -r _
"""

#: Of every base image; the interpreter's own directory comes first.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Ended = subprocess.CompletedProcess[str]


def missing() -> str:
    """Why no such root can be made here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, to run RUN as root and the container as another user"
    if Path(sys.prefix).is_relative_to("/tmp"):
        return "needs an interpreter outside of /tmp, which is empty in the image"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True) if shutil.which("unshare") else None
    return "" if tried and tried.returncode == 0 else "needs mount namespaces (unshare --mount)"


class ImageRoot:
    """Partly built image. ``holder`` is the process that owns its mount namespace."""

    def __init__(self, root: Path, holder: int, context: Path) -> None:
        self.root, self.holder, self.context = root, holder, context
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
        }
        # The base has what pip is asked for, the build backend too; nothing comes from a package index.
        self.building = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_BUILD_ISOLATION": "0"}
        self.directory = "/"
        self.user = "0"
        # A container's files may be read by all; the directories above this interpreter perhaps not.
        for home in (sys.prefix, sys.base_prefix, *sys.path):
            for parent in Path(home).parents:
                self.command(["chmod", "a+rx", str(parent)], "0", "/")
        # A base image has no users of its own.
        with suppress(KeyError):
            self.must(["userdel", pwd.getpwuid(1000).pw_name])

    def command(self, words: Sequence[str], user: str, directory: str, **environment: str) -> Ended:
        """Run in the root; ``user`` is a number that /etc/passwd of the root knows."""
        inside = ["chroot", f"--userspec={user}:{user}", str(self.root), "env", f"--chdir={directory}", *words]
        return subprocess.run(
            ["nsenter", f"--mount=/proc/{self.holder}/ns/mnt", *inside],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )

    def build(self, image: Sequence[Instruction], **arguments: str) -> None:
        """Execute the instructions of a Dockerfile; ``arguments`` as for ``--build-arg``. Raises ``AssertionError``
        with what a command said that failed."""
        for name, value in image:
            if name == "WORKDIR":
                self.must(["mkdir", "-p", value])
                self.directory = value
            elif name == "ENV":
                self.environment |= dict(word.split("=", 1) for word in shlex.split(value))
            elif name == "ARG":
                argument, _, default = value.partition("=")
                self.building[argument] = arguments.get(argument, shlex.split(default)[0] if default else "")
            elif name == "COPY":
                self.copy(Instruction(name, value))
            elif name == "RUN":
                self.must(["sh", "-c", value])
            elif name == "USER":
                self.user = value

    def must(self, words: Sequence[str]) -> None:
        ended = self.command(words, "0", self.directory, **self.building)
        assert ended.returncode == 0, f"{shlex.join(words)}: {ended.stdout}"

    def copy(self, instruction: Instruction) -> None:
        """A file goes under its name, of a directory the contents; modes stay, and the owner is root or as given."""
        words = instruction.value.split()
        owner = next((word.partition("=")[2] for word in words if word.startswith("--chown=")), "0")
        target = Path("/", self.directory, words[-1])
        self.must(["mkdir", "-p", str(target)])
        enter = ["nsenter", f"--mount=/proc/{self.holder}/ns/mnt", "chroot", str(self.root)]
        for source in (self.context / name for name in copied(instruction)):
            parent, name = (source, ".") if source.is_dir() else (source.parent, source.name)
            owned = [f"--owner={owner}", f"--group={owner}", "--numeric-owner"]
            pack = ["tar", "--create", "--exclude=__pycache__", *owned, f"--directory={parent}", name]
            packed = subprocess.run(pack, capture_output=True, check=True).stdout
            subprocess.run([*enter, "tar", "--extract", f"--directory={target}"], input=packed, check=True)

    def start(self, words: Sequence[str], **environment: str) -> Ended:
        """Run the container's command to its end."""
        return self.command(words, self.user, self.directory, **environment)


@contextmanager
def image_root(directory: Path, context: Path) -> Iterator[ImageRoot]:
    """A root over this machine's, mounted at the empty ``directory``; ``context`` is what ``COPY`` copies from."""
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", MOUNT, "sh", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdin and holder.stdout
        assert holder.stdout.readline() == "ready\n", "the overlay cannot be mounted"
        yield ImageRoot(directory / "root", holder.pid, context)
        holder.stdin.close()
