"""Charts are drawn once for their data: a report of reused stages loads no plotting library."""

from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import Markup

from slipstream.pipeline.report.pages import report_page
from slipstream.pipeline.report.pages.report_page import FILE, KIND, stored_charts
from slipstream.shared.artifacts.workspaces import ArtifactStore
from tests.support.report_runs import results


def nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "draw_charts", lambda _: pytest.fail("drawn again"))


def test_what_was_kept_is_what_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, store = results(tmp_path / "in", ["no", "yes"]), ArtifactStore(tmp_path / "store")
    drawn = stored_charts(found, None)
    assert stored_charts(found, store) == drawn and isinstance(drawn["loss"], Markup) and drawn["scatter"] is None
    nothing_is_drawn(monkeypatch)
    kept = stored_charts(found, store)
    assert kept == drawn and isinstance(kept["loss"], Markup)
    # Nothing of what is shown is left out of the key.
    assert len(found.fingerprints) == 5
    for changed in range(5):
        others = [f"{one}0" if index == changed else one for index, one in enumerate(found.fingerprints)]
        with pytest.raises(pytest.fail.Exception, match="drawn again"):
            stored_charts(replace(found, fingerprints=others), store)


def test_damaged_charts_are_drawn_again(tmp_path: Path) -> None:
    found, store = results(tmp_path / "in", ["no", "yes"]), ArtifactStore(tmp_path / "store")
    drawn = stored_charts(found, store)
    (file,) = (store.root / KIND).rglob(FILE)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"svg", b"gvs"))
    assert stored_charts(found, store) == drawn
    assert file.read_bytes() == whole
