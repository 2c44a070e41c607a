import threading

import pytest
from headwater.worker.watched_thread import WatchedThread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_death_is_told() -> None:
    deaths: list[BaseException] = []

    def body() -> None:
        raise OSError("gone")

    thread = WatchedThread("t", body, deaths.append)
    thread.start()
    thread.stop()

    assert [str(death) for death in deaths] == ["gone"]


def test_stopping_is_no_death() -> None:
    deaths: list[BaseException] = []
    running = threading.Event()

    def body() -> None:
        running.set()
        thread.stopping.wait()

    thread = WatchedThread("t", body, deaths.append)
    thread.start()
    assert running.wait(10)
    thread.stop()

    assert deaths == []
