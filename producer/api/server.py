"""Running the HTTP server in this process."""

from socket import socket

import structlog
import uvicorn

from ..embedded import state_directory
from .app import build_app
from .batch_runner import BatchRunner
from .services import Services
from .settings import ApiSettings

log = structlog.get_logger()

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ApiServer(uvicorn.Server):
    """uvicorn's server, which at its end lets streams go first: they'd last as long as a job."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for listener in getattr(self, "servers", ()):
            for listening in listener.sockets:
                host, port = listening.getsockname()[:2]
                log.info("listening", host=host, port=port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """End the streams, then wait for the other requests."""
        self._services.stop_streams()
        await super().shutdown(sockets)


def build_server(url: str, settings: ApiSettings) -> ApiServer:
    """Return a server over the Redis at *url*, not yet running; raises ProducerError's kinds."""
    services = Services(url, settings)
    directory = settings.data_dir or state_directory() / "api"
    app = build_app(services, BatchRunner(services, directory))
    if settings.keys_file is None and settings.host not in _LOOPBACK:
        log.warning("no_keys", advice="anyone who reaches this address may submit: --keys-file")
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,  # ours says which job, and never a query
        lifespan="on",
        timeout_graceful_shutdown=round(settings.drain_s),
        server_header=False,
    )
    return ApiServer(config, services)
