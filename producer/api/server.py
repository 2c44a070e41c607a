"""Running the HTTP server in this process."""

from socket import AF_INET, AF_INET6, create_server, socket
from types import FrameType

import structlog
import uvicorn

from ..embedded import state_directory
from ..errors import ProducerError
from .app import build_app
from .batch_runner import BatchRunner
from .services import Services
from .settings import ApiSettings

log = structlog.get_logger()

_BACKLOG = 2048
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class CannotListen(ProducerError):
    """The address is taken, forbidden, or not this machine's."""


class ApiServer(uvicorn.Server):
    """uvicorn's server, which at its end lets streams go first: they'd last as long as a job."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    def run(self, sockets: list[socket] | None = None) -> None:
        """Serve until a signal; raises CannotListen."""
        super().run(sockets or [listen(self.config.host, self.config.port)])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, leave at the second.

        uvicorn's own way also dies of the signal in the end: supervisors would see no exit code 0.
        """
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True

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
        if self.force_exit:
            # uvicorn would drop the application's own end, and print where it was.
            await self.lifespan.shutdown()


def listen(host: str, port: int) -> socket:
    """Return a socket that listens on an address; raises CannotListen."""
    family = AF_INET6 if ":" in host else AF_INET
    try:
        return create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # Python adds the address, which we name already.
        reason = str(error.strerror).partition(" (while")[0]
        raise CannotListen(
            f"can't listen on {host}:{port} ({reason}); choose another --host or --port"
        ) from error


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
