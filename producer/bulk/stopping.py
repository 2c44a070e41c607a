"""Ctrl-C and SIGTERM: the first one is a wish, the second one is obeyed at once."""

import signal
from contextlib import ExitStack
from typing import Any


class StopSignal:
    """Whether someone wants the run to stop; a context manager, on the main thread only."""

    def __init__(self) -> None:
        self.is_set = False
        self._exits = ExitStack()

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._on_signal)
            self._exits.callback(signal.signal, number, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _on_signal(self, *_: Any) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
