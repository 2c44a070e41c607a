"""Signals reach a worker's main thread however many come, and whenever."""

import subprocess
import sys

_SIGNALLED = """
import os, subprocess, sys, threading
from headwater.worker import service
from headwater.worker.settings import WorkerSettings

worker = service.Worker(WorkerSettings(model="x", alias="x", redis="redis://127.0.0.1:1/0"))
sender = f'''
import os, signal, time
for _ in range(20000):
    os.kill({os.getpid()}, signal.SIGTERM)
    os.kill({os.getpid()}, signal.SIGINT)
    time.sleep(0.0001)
'''
with worker._wake_up.by_signals(worker._on_signal):
    process = subprocess.Popen([sys.executable, "-c", sender])
    finish = lambda: worker._engine.loop.set_result(process.wait())
    threading.Thread(target=finish).start()
    while not worker._wait_until_loaded():
        pass
print("alive")
os._exit(0)
"""


def test_a_signal_never_hangs_the_thread_that_waits_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALLED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "alive\n", done.stderr[-2000:]
