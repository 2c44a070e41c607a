"""A TCP proxy before the server that loses replies: the command was carried out, nobody heard."""

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class LossyProxy:
    """Forwards to a port; a share of the server's replies cut their connection instead."""

    def __init__(self, port: int, *, seed: int) -> None:
        self._target = port
        self._dice = random.Random(seed)
        self.loss = 0.0
        self.num_lost = 0
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
            for source, sink, loses in ((client, server, _never), (server, client, self._loses)):
                thread = threading.Thread(target=_pump, args=(source, sink, loses), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _loses(self) -> bool:
        is_lost = self._dice.random() < self.loss
        self.num_lost += is_lost
        return is_lost


def _never() -> bool:
    return False


def _pump(source: socket.socket, sink: socket.socket, loses: Callable[[], bool]) -> None:
    try:
        while (data := source.recv(65536)) and not loses():
            sink.sendall(data)
    except OSError:
        pass  # the other direction cut both
    _cut(source)
    _cut(sink)


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):  # it may be cut already
        sock.shutdown(socket.SHUT_RDWR)
