"""The engine thread: owns MLX, takes messages, steps the loop."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headwater.schemas import CacheClear

from .loop import EventSink, GenerationLoop
from .messages import Admit, Cancel, Drop, Message

_IDLE_WAIT_S = 1.0
_ROOM_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class HandBack:
    """Give every job back to its queue."""

    reason: str


class Wake:
    """Something is there that the loop waits for."""


class Stop:
    """End the thread."""


Control: TypeAlias = Message | HandBack | Wake | Stop


class BoundedSink(EventSink, Protocol):
    """A sink that may fill up."""

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until there is room, at most *timeout_s*; return whether there is."""
        ...

    def forget(self, job_id: str) -> None:
        """Close a job that has been dropped."""
        ...


class EngineThread:
    """Builds the loop on its own thread, since MLX's streams belong to the thread, and runs it.

    When the server is slower than the model, the sink fills up and the steps wait for it.
    """

    def __init__(
        self,
        build: Callable[[], GenerationLoop],
        sink: BoundedSink,
        *,
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._build = build
        self._sink = sink
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Control] = queue.SimpleQueue()
        self._loop: Future[GenerationLoop] = Future()
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; `loop` tells when it is ready."""
        self._thread.start()

    @property
    def loop(self) -> "Future[GenerationLoop]":
        """The loop once it is built, or what went wrong; its figures may be read anywhere."""
        return self._loop

    @property
    def step_s(self) -> float:
        """How long the last step took; 0 before the first one."""
        is_built = self._loop.done() and self._loop.exception() is None
        return self._loop.result().figures.step_s if is_built else 0.0

    def post(self, message: Control) -> None:
        """Let the thread act on *message* before its next step."""
        self._inbox.put(message)

    def stop(self) -> None:
        """End the thread after the messages posted so far."""
        self.post(Stop())
        self._thread.join()

    def run(self) -> None:
        """Do the thread's work on the calling one, until a Stop is posted."""
        try:
            loop = self._build()
        except BaseException as error:  # the starter gets it, whatever it is
            self._loop.set_exception(error)
            return
        self._loop.set_result(loop)
        try:
            while self._take_messages(loop):
                loop.cache_control.refresh()
                if not loop.is_idle and self._sink.wait_for_room(_ROOM_WAIT_S):
                    loop.step()
        except BaseException as error:
            # Nobody would generate any more, so the process must end.
            self._on_death(error)
            raise

    def _take_messages(self, loop: GenerationLoop) -> bool:
        """Act on what has come; wait for something when there is nothing to do."""
        while True:
            try:
                message = self._inbox.get(block=loop.is_idle, timeout=_IDLE_WAIT_S)
            except queue.Empty:
                return True
            if isinstance(message, Stop):
                return False
            self._act(loop, message)

    def _act(self, loop: GenerationLoop, message: Message | HandBack | Wake) -> None:
        if isinstance(message, Admit):
            loop.admit(message.claim)
        elif isinstance(message, Cancel):
            loop.cancel(message.job_id)
        elif isinstance(message, Drop):
            loop.drop(message.job_id)
            self._sink.forget(message.job_id)
        elif isinstance(message, HandBack):
            loop.hand_back(message.reason)
        elif isinstance(message, CacheClear):
            loop.cache_control.clear(message)
