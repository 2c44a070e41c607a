"""Lines to rows in parallel processes, in order, with a bounded number of bytes on the way."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from headwater.schemas import ModelCard, TokenizerFiles

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


def prepare(lines: Iterable[Line], preparation: Preparation, processes: int) -> Iterator[Row]:
    """Yield the row of each line, in order; with 0 processes it happens in this one."""
    if processes == 0:
        parser = preparation.parser()
        yield from map(parser.parse, lines)
        return
    # A tokenizer that has run does not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(preparation,))
    try:
        yield from _in_order(pool, lines, processes)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, lines: Iterable[Line], processes: int) -> Iterator[Row]:
    in_flight: deque[tuple[int, Future[list[Row]]]] = deque()
    num_bytes = 0
    for chunk in _chunks(lines):
        size = sum(len(line.data) for line in chunk)
        in_flight.append((size, pool.submit(_parse, chunk)))
        num_bytes += size
        while len(in_flight) > (
            # One chunk more than there are processes, so that none waits for us.
            processes + 1 if num_bytes > _BYTES_IN_FLIGHT else _CHUNKS_IN_FLIGHT
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


# In a process of the pool.

_parser: RowParser


def _start(preparation: Preparation) -> None:
    global _parser
    # Ctrl-C is for the run's own process, which shuts the pool down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _parser = preparation.parser()


def _end_with_parent() -> None:
    # A parent that was killed closes no queue: the pool's processes would wait for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _parse(chunk: list[Line]) -> list[Row]:
    return [_parser.parse(line) for line in chunk]
