"""Deck that is updated while its task runs.

A thread of the pod's agent publishes it, since ``Deck.publish`` does nothing in workers. Its errors never fail the
task.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flytekit import Deck
from flytekit.exceptions.user import FlyteRecoverableException

from slipstream.shared.logs import logger

PERIOD_S = 30.0
#: Longest wait in seconds for the last update at the end of the task.
LAST_S = 5.0
LOG = logger("flyte")
#: Returns the HTML of the page, or "" if there is nothing to show. The argument is True while the task runs.
Page = Callable[[bool], str]


class LiveDeck(Deck):
    """Deck whose ``page`` can be replaced."""

    page = ""

    @property
    def html(self) -> str:
        return self.page


@contextmanager
def live_deck(title: str, page: Page) -> Iterator[None]:
    """Publish the deck periodically while the block runs, and once at its end."""
    ended = threading.Event()

    def publish_periodically() -> None:
        deck, over, said = None, False, False
        while not over:
            over = ended.wait(PERIOD_S)
            try:
                if html := page(not over):
                    deck = deck or LiveDeck(title)
                    deck.page = html
                    Deck.publish()
            except Exception as error:
                if not said:
                    LOG.warning("the deck %r could not be published (%s)", title, error)
                said = True

    # Flyte's context, with the address of decks, belongs to the thread that runs the task.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(publish_periodically,), name="deck", daemon=True)
    thread.start()
    try:
        yield
    except FlyteRecoverableException:
        ended.set()  # this pod may be preempted soon: do not wait; the next attempt's deck gives the reason
        raise
    finally:
        if not ended.is_set():
            ended.set()
            thread.join(LAST_S)
