"""A deck that is published while its task goes on, by a thread of the pod's agent: in workers ``Deck.publish`` does
nothing. It never fails the task and does not hold it up."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flytekit import Deck
from flytekit.exceptions.user import FlyteRecoverableException

from slipstream.logs import logger

PERIOD_S = 30.0
#: How long the end of the task waits for the last page.
LAST_S = 5.0
LOG = logger("flyte")
#: Makes the page, which is empty as long as there is nothing to show. Told whether the task is still going on.
Page = Callable[[bool], str]


class LiveDeck(Deck):
    """A deck whose page is replaced."""

    page = ""

    @property
    def html(self) -> str:
        return self.page


@contextmanager
def live_deck(title: str, page: Page) -> Iterator[None]:
    """Publish the deck while the block runs, and once when it has ended."""
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
                    LOG.warning("the deck %r is not published: %s", title, error)
                said = True

    # Flyte's context, which says where decks go, belongs to the thread that runs the task.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(publish_periodically,), name="deck", daemon=True)
    thread.start()
    try:
        yield
    except FlyteRecoverableException:
        ended.set()  # this pod may be about to be taken away: nothing waits, and the next attempt's deck says why
        raise
    finally:
        if not ended.is_set():
            ended.set()
            thread.join(LAST_S)
