"""Lines to rows in parallel processes, in order, with a bounded number of bytes on the way."""

import multiprocessing
import queue
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from headwater.schemas import ModelCard, TokenizerFiles

from ..errors import ProducerError
from ..tokenization import Tokenizer
from .lines import Line
from .rows import Row, RowParser, RowSettings

_CHUNK_LINES = 64
_CHUNK_BYTES = 256 * 1024
_CHUNKS_IN_FLIGHT = 24
"""More than a window, so that the next one is there when the workers are done with it."""
_BYTES_IN_FLIGHT = 4 * 1024 * 1024
"""A line's token ids take up to some ten times its bytes."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a process needs to make rows of lines."""

    settings: RowSettings
    card: ModelCard
    tokenizer: TokenizerFiles

    def parser(self) -> RowParser:
        """Return a parser; raises TokenizationError."""
        return RowParser(self.settings, self.card, Tokenizer(self.tokenizer))


def prepare(lines: Iterable[Line], preparation: Preparation, num_processes: int) -> Iterator[Row]:
    """Yield the row of each line, in order; with 0 processes it happens in this one.

    Raises ProducerError when one of them is killed.
    """
    if num_processes == 0:
        parser = preparation.parser()
        yield from map(parser.parse, lines)
        return
    processes = _Processes(preparation, num_processes)
    # A thread for each process waits for it: none of them waits for us.
    pool = ThreadPoolExecutor(num_processes, "bulk-preparation")
    try:
        yield from _in_order(pool, processes, lines)
    finally:
        pool.shutdown(cancel_futures=True)
        processes.close()


def _in_order(
    pool: ThreadPoolExecutor, processes: "_Processes", lines: Iterable[Line]
) -> Iterator[Row]:
    in_flight: deque[tuple[int, Future[list[Row]]]] = deque()
    num_bytes = 0
    for chunk in _chunks(lines):
        size = sum(len(line.data) for line in chunk)
        in_flight.append((size, pool.submit(processes.parse, chunk)))
        num_bytes += size
        while len(in_flight) > (
            # One chunk more than there are processes, so that none waits for us.
            processes.count + 1 if num_bytes > _BYTES_IN_FLIGHT else _CHUNKS_IN_FLIGHT
        ):
            size, done = in_flight.popleft()
            num_bytes -= size
            yield from done.result()
    for _, done in in_flight:
        yield from done.result()


def _chunks(lines: Iterable[Line]) -> Iterator[list[Line]]:
    chunk: list[Line] = []
    num_bytes = 0
    for line in lines:
        chunk.append(line)
        num_bytes += len(line.data)
        if len(chunk) == _CHUNK_LINES or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


class _Processes:
    """Processes that parse. Each has a pipe of its own, which ends with it, however it ends.

    concurrent.futures' pool waits for ever for a result that a killed process had begun to write.
    """

    def __init__(self, preparation: Preparation, count: int) -> None:
        self.count = count
        # A tokenizer that has run does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, preparation), daemon=True)
            process.start()
            theirs.close()
            self._idle.put(ours)
            self._connections.append(ours)
            self._processes.append(process)

    def parse(self, chunk: list[Line]) -> list[Row]:
        """Let one of them parse; any thread may ask. Raises ProducerError when it is gone."""
        connection = self._idle.get()
        try:
            connection.send(chunk)
            rows: list[Row] = connection.recv()
        except (EOFError, OSError) as error:
            raise ProducerError(
                "a process that tokenizes was killed: is there too little memory?"
            ) from error
        finally:
            self._idle.put(connection)
        return rows

    def close(self) -> None:
        """End them; nobody asks any more."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()


def _serve(connection: Connection, preparation: Preparation) -> None:
    """Parse chunks until the other end of the pipe is closed, as it is when its owner is killed."""
    # Ctrl-C is for the run's own process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = preparation.parser()
    # An owner that is gone has no use for the last rows.
    with suppress(EOFError, OSError):
        while True:
            connection.send([parser.parse(line) for line in connection.recv()])
