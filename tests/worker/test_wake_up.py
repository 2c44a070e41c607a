import os
import signal
import threading
from collections.abc import Iterator

import pytest
from headwater.worker.wake_up import WakeUp


@pytest.fixture
def deaf() -> Iterator[None]:
    """The main thread gets no SIGTERM itself: another one does, and no wait is interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_signal_that_another_thread_gets_ends_the_wait(deaf: None) -> None:
    wake_up = WakeUp()
    heard: list[int] = []

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    with wake_up.by_signals(lambda: heard.append(1)):
        sender = threading.Thread(target=send)
        sender.start()
        wake_up.wait()
        assert heard == [1]
        sender.join()


def test_a_signal_before_the_wait_ends_it() -> None:
    wake_up = WakeUp()
    heard: list[int] = []
    with wake_up.by_signals(lambda: heard.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
        wake_up.wait()
    assert heard == [1]


def test_a_wake_from_a_thread_ends_one_wait() -> None:
    wake_up = WakeUp()
    thread = threading.Thread(target=wake_up.wake)
    thread.start()
    wake_up.wait()
    thread.join()
    wake_up.wait(0.0)  # nobody: it returns as its time is up


def test_the_handlers_before_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with WakeUp().by_signals(lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    descriptor = signal.set_wakeup_fd(-1)
    assert descriptor == -1
