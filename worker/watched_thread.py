"""WatchedThread: a thread that cannot die quietly."""

import threading
from collections.abc import Callable

from .errors import WorkerError


class WatchedThread:
    """Runs *body* on a daemon thread; any error that ends it goes to *on_death*, then on.

    A worker that has lost one of its threads looks alive and does nothing, so its process must
    end. *body* returns soon after `stopping` is set.
    """

    def __init__(
        self, name: str, body: Callable[[], None], on_death: Callable[[BaseException], None]
    ) -> None:
        self.stopping = threading.Event()
        self._body = body
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the body return, and wait for it."""
        self.stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._body()
        except WorkerError as error:
            # It says itself what is to be done; where it came from helps nobody.
            self._on_death(error)
        except BaseException as error:
            self._on_death(error)
            raise
