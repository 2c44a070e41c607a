"""WakeUp: wakes the main thread, from any thread and by any signal, whatever the moment."""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MANY_BYTES = 65536


class WakeUp:
    """A pipe that the main thread sleeps at.

    Python's own handler of a signal runs when the main thread next runs. One that comes as this
    thread is about to sleep at a lock, or that another thread gets, is heard of only when the
    sleep is over. The interpreter's handler in C writes to the pipe at once, and a pipe forgets
    nothing. It stays open as long as the process: threads may write to it until the end.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)

    @contextmanager
    def by_signals(self, handler: Callable[[], None]) -> Iterator[None]:
        """Let SIGTERM and SIGINT call *handler* and end a wait; for the main thread only.

        Where `wait` has returned for a signal, its *handler* has been called.
        """
        descriptor = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: handler()) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, earlier in before.items():
                signal.signal(number, earlier)
            signal.set_wakeup_fd(descriptor)

    def wake(self) -> None:
        """End the wait under way, or the next one."""
        with suppress(BlockingIOError):  # full: it will wake all the same
            os.write(self._writing, b"\0")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until woken, at most *timeout_s*."""
        select.select([self._reading], [], [], timeout_s)
        with suppress(BlockingIOError):  # nobody has written: the time is up
            os.read(self._reading, _MANY_BYTES)
