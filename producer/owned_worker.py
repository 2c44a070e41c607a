"""A worker that belongs to another process: it hands its jobs back and ends when its owner dies.

Run as `python -m headwater.producer.owned_worker FD OPTIONS...`: *FD* is the reading end of a
pipe that only the owner holds open; OPTIONS are those of `headwater worker`.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PATIENCE_S = 8.0
"""How long an orphan may take to hand its jobs back."""


class OwnedWorker:
    """A worker process and the pipe that tells it that we live."""

    def __init__(
        self,
        options: Sequence[str],
        log: Path,
        *,
        keep_open: Sequence[int] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it; *options* are those of `headwater worker`, *keep_open* descriptors to inherit.

        What it logs is appended to *log*.
        """
        self.log = log
        reading, self._writing = os.pipe()
        command = [sys.executable, "-m", "headwater.producer.owned_worker", str(reading)]
        with log.open("ab") as file:
            # A session of its own: Ctrl-C reaches it through us, once, when we stop it.
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {})},
                pass_fds=(reading, *keep_open),
                start_new_session=True,
            )
        os.close(reading)

    @property
    def last_words(self) -> str:
        """The last line that it logged."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return lines[-1] if lines else "(it said nothing)"

    def stop(self, timeout_s: float) -> None:
        """Let it finish or hand back what it has, then make sure that it is gone."""
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._writing)


def main() -> None:
    """Watch the pipe, and be a worker."""
    reading, *options = sys.argv[1:]
    threading.Thread(target=_end_with_owner, args=(int(reading),), daemon=True).start()
    from .cli import main as command_line

    command_line(["worker", *options])


def _end_with_owner(reading: int) -> None:
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_PATIENCE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
