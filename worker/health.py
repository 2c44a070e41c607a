"""/metrics, /healthz and /readyz of a worker, on a port of its own."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .errors import StartupError

Check = Callable[[], str | None]
"""Returns what is wrong, or None."""


class HealthServer:
    """Serves the three paths from a daemon thread until close()."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        alive: Check,
        ready: Check,
    ) -> None:
        handler = _handler(registry, {"/healthz": alive, "/readyz": ready})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise StartupError(
                f"can't listen on {host}:{port} for metrics ({error.strerror});"
                " choose another --metrics-port"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use; of interest when 0 was asked for."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(registry: CollectorRegistry, checks: dict[str, Check]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._reply(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path in checks:
                problem = checks[path]()
                body = (problem or "ok") + "\n"
                self._reply(503 if problem else 200, body.encode(), "text/plain; charset=utf-8")
            else:
                self._reply(404, b"not found\n", "text/plain; charset=utf-8")

        def _reply(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Keep quiet: probes every few seconds are no news."""

    return Handler
