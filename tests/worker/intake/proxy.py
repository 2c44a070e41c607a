"""A TCP proxy before the server that loses replies, and cuts connections in mid-word."""

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class LossyProxy:
    """Forwards to a port; a share of what passes cuts its connection instead.

    A lost reply: the command was carried out, and nobody heard. A cut: either side may have got
    a part of a command, of a pipeline, or of a reply.
    """

    def __init__(self, port: int, *, seed: int) -> None:
        self._target = port
        self._dice = random.Random(seed)
        self.loss = 0.0
        self.num_lost = 0
        self.cut = 0.0
        self.num_cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Cut everything."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            _cut(sock)
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            ways = ((client, server, self._cut_some), (server, client, self._lose_or_cut_some))
            for source, sink, fault in ways:
                thread = threading.Thread(target=_pump, args=(source, sink, fault), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _lose_or_cut_some(self, data: bytes) -> bytes:
        if self._dice.random() < self.loss:
            self.num_lost += 1
            return b""
        return self._cut_some(data)

    def _cut_some(self, data: bytes) -> bytes:
        if self._dice.random() < self.cut:
            self.num_cut += 1
            return data[: self._dice.randrange(len(data))]
        return data


def _pump(source: socket.socket, sink: socket.socket, fault: Callable[[bytes], bytes]) -> None:
    try:
        while data := source.recv(65536):
            passed = fault(data)
            sink.sendall(passed)
            if len(passed) < len(data):
                break
    except OSError:
        pass  # the other direction cut both
    _cut(source)
    _cut(sink)


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):  # it may be cut already
        sock.shutdown(socket.SHUT_RDWR)
