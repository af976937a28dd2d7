"""Live decks: their pages, and that no failure of a deck reaches the task."""

import time
from collections.abc import Callable

import pytest
from flytekit import Deck, FlyteContextManager
from flytekit.exceptions.user import FlyteRecoverableException

from slipstream.flyte.watching import live_deck


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is published, every hundredth of a second."""
    published: list[str] = []

    def publish() -> None:
        parameters = FlyteContextManager.current_context().user_space_params
        assert parameters
        published.append(parameters.decks[-1].html)

    monkeypatch.setattr(Deck, "publish", publish)
    monkeypatch.setattr(live_deck, "PERIOD_S", 0.01)
    return published


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_published_from_the_first_page_on_and_once_more_at_the_end(pages: list[str]) -> None:
    shown = ["", "", "a third", "a half"]
    with live_deck.live_deck("Train", lambda running: (shown.pop(0) if shown else "more") if running else "the end"):
        until(lambda: "more" in pages)
    assert pages[:2] == ["a third", "a half"] and pages[-1] == "the end" and pages.count("the end") == 1


def test_a_page_that_cannot_be_made_is_one_warning(pages: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    made: list[bool] = []

    def page(running: bool) -> str:
        made.append(running)
        raise OSError("the disk is full")

    with live_deck.live_deck("Train", page):
        until(lambda: len(made) > 3)
    assert not pages and capfd.readouterr().err.count("the deck 'Train' could not be published (the disk is full)") == 1


@pytest.mark.parametrize(("error", "waits"), [(ValueError("a bug"), True), (FlyteRecoverableException("lost"), False)])
def test_a_task_that_is_tried_again_does_not_wait_for_it(pages: list[str], error: Exception, waits: bool) -> None:
    def page(running: bool) -> str:
        if not running:
            time.sleep(1)
        return "a page"

    started = time.monotonic()
    with pytest.raises(type(error)), live_deck.live_deck("Train", page):
        raise error
    assert (time.monotonic() - started >= 1) == waits


def test_a_store_that_stays_away_holds_nothing_up(pages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_deck, "LAST_S", 0.2)
    started = time.monotonic()
    with live_deck.live_deck("Train", lambda running: time.sleep(20) or ""):  # type: ignore[func-returns-value]
        time.sleep(0.1)
    assert time.monotonic() - started < 10
