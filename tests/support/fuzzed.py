"""Inputs that are changed at random: a case is a number, the seed of its changes."""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from slipstream.pipeline.export.package.files import DIGEST, BadPackage, digest_line
from slipstream.shared.artifacts.format import BLOCK_BYTES, MANIFEST, hash_file
from slipstream.shared.errors import UserError
from slipstream.shared.one_line import MOST_CHARACTERS
from tests.support.hostile_names import outside, target_among_others
from tests.support.limited import limited
from tests.support.mutations import changed_archive, changed_arrays, changed_bytes, changed_json, changed_text

#: Of each kind in ``make prove``; with ``tests/fuzz/test_tables.py`` they take 15 minutes.
SECONDS = 30.0
#: Of each kind in ``make test``.
CASES = 10
#: How each kind is made, and how it is read.
Kinds = Mapping[str, tuple[Callable[[Path], None], Callable[[Path], None]]]
#: Other libraries read them, and need not see what was changed if the manifest vouches for it. Nor does a training: who
#: writes to the home of its checkpoints is trusted.
BINARY = {".parquet", ".bin"}
#: How files are changed by what they hold; others by their bytes.
CHANGES = {
    ".json": changed_json,
    ".npz": changed_arrays,
    ".tar": changed_archive,
    **dict.fromkeys((".toml", ".csv", ".yaml"), changed_text),
}


def one_line(error: UserError | BadPackage) -> None:
    text = str(error)
    assert text and text.isprintable(), f"not one line to read: {text!r}"
    assert len(text) <= MOST_CHARACTERS + 3, f"{len(text)} characters: {text[:200]!r}"


def spoil(draw: random.Random, kind: str, place: Path) -> None:
    """Change a file. As often as not the artifact vouches for it, as that of a hostile or another version's would."""
    path = draw.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    path.write_bytes(CHANGES.get(path.suffix, changed_bytes)(draw, path.read_bytes()))
    vouched = path.suffix not in BINARY and kind != "checkpoints"
    if vouched and draw.random() < 0.5:
        vouch(path)


def vouch(path: Path) -> None:
    manifest = next((up / MANIFEST for up in path.parents if (up / MANIFEST).is_file()), None)
    if manifest is None:
        return
    if path != manifest:
        tree = json.loads(manifest.read_bytes())
        name = path.relative_to(manifest.parent).as_posix()
        block_bytes = tree["files"][name]["block_bytes"] if name in tree["files"] else BLOCK_BYTES
        tree["files"][name] = vars(hash_file(path, block_bytes))
        manifest.write_text(json.dumps(tree))
    digest = manifest.with_name(DIGEST)
    if digest.is_file():
        digest.write_text(digest_line(manifest.read_bytes()))


class Whole:
    """What is read, each made once."""

    def __init__(self, directory: Callable[[], Path], kinds: Kinds) -> None:
        self._directory, self._kinds = directory, kinds
        self._made: dict[str, Path] = {}

    def of(self, kind: str) -> Path:
        if kind not in self._made:
            make, read = self._kinds[kind]
            made = self._directory() / "made"
            make(made)
            read(Path(shutil.copytree(made, made.with_name("copy"))))
            self._made[kind] = made
        return self._made[kind]

    def try_case(self, kind: str, seed: int) -> str:
        """Return what came of it: "taken" or "refused"."""
        whole = self.of(kind)
        with target_among_others() as (place, target):
            shutil.copytree(whole, target, dirs_exist_ok=True)
            spoil(random.Random(seed), kind, target)
            others = outside(place, target)
            try:
                with limited():
                    self._kinds[kind][1](target)
            except (UserError, BadPackage) as error:
                assert not isinstance(error.__cause__, MemoryError), f"took more than its memory: {error}"
                one_line(error)
                found = "refused"
            else:
                found = "taken"
            assert outside(place, target) == others, "wrote outside of its target"
        return found

    def try_cases(self, kind: str, seeds: Iterable[int], until: float = float("inf")) -> Counter[str]:
        found: Counter[str] = Counter()
        for seed in seeds:
            if time.monotonic() > until:
                break
            try:
                found[self.try_case(kind, seed)] += 1
            except Exception as error:
                raise AssertionError(f"{kind}, case {seed}: {type(error).__name__}: {error}") from error
        return found

    def try_few(self, kind: str) -> None:
        found = self.try_cases(kind, range(CASES))
        assert found["refused"] > CASES / 4, found

    def try_many(self, kind: str) -> None:
        first = time.time_ns() // 1000
        self.of(kind)
        found = self.try_cases(kind, range(first, first + 10**9), time.monotonic() + SECONDS)
        print(f"\n{kind}: {dict(found)}, from case {first} on")
        assert found["refused"] > found.total() / 4
