"""A real HTTP server on a real queue, with a worker on a tiny random model behind it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import structlog
from headwater.producer.api.server import ApiServer, build_server
from headwater.producer.api.settings import ApiSettings
from headwater.producer.client import Producer
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import keys
from headwater.worker.engine.random_model import write_random_model
from openai import OpenAI

from tests.announced import announce_model

ROOT = Path(__file__).parents[3]
ALIAS = "tiny"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class RunningApi:
    """A server in a thread of this process."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._thread = threading.Thread(target=server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not server.started:
            assert self._thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)  # uvicorn says so in no other way

    @property
    def url(self) -> str:
        """Where it listens."""
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def client(self, key: str = "none") -> OpenAI:
        """Return the official client, without retries: errors are what is looked at."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def stop(self) -> None:
        """End it as SIGTERM does."""
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


StartApi = Callable[..., RunningApi]


@pytest.fixture(scope="package", autouse=True)
def _quiet() -> Iterator[None]:
    """Servers log from threads of their own, which pytest can't tell from its own output."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def queue() -> Iterator[EmbeddedServer]:
    """An own server for the module."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a chat template."""
    directory = write_random_model(tmp_path_factory.mktemp("tiny"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    # A token of two letters lets the worker see what each token's text is; UTF-8 has no byte 0xC0.
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ab"] = vocabulary.pop("\u00c0")
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="module")
def worker(queue: EmbeddedServer, model: Path) -> Iterator["subprocess.Popen[str]"]:
    """A worker process that serves the model as `tiny`."""
    process = start_worker(queue.url, model, "--tool-parser", "json_tools")
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def start_worker(url: str, model: Path, *options: str) -> "subprocess.Popen[str]":
    """Start a worker and wait until it serves; its log is read to the end in the background."""
    command = [sys.executable, "-m", "headwater.producer.cli", "worker", "--redis", url]
    process = subprocess.Popen(
        [*command, "--model", str(model), "--alias", ALIAS, "--cpu-threads", "1", *options],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"HEADWATER_LOG_JSON": "true"},
    )
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                if '"event": "ready"' in line:
                    ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert ready.wait(120)
    assert process.poll() is None
    return process


@pytest.fixture(scope="module")
def start_api(
    queue: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartApi]:
    """Start servers on the module's queue; `start_api(keepalive_s=0.1, ...)` with settings."""
    with ExitStack() as exits:

        def start(**settings: Any) -> RunningApi:
            settings.setdefault("data_dir", tmp_path_factory.mktemp("data"))
            api = RunningApi(build_server(queue.url, ApiSettings(port=0, **settings)))
            exits.callback(api.stop)
            return api

        yield start


@pytest.fixture(scope="module")
def api(start_api: StartApi, worker: "subprocess.Popen[str]") -> RunningApi:
    """A server that anyone may call."""
    return start_api()


@pytest.fixture(scope="module")
def client(api: RunningApi) -> Iterator[OpenAI]:
    """The official client of it."""
    with api.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(api: RunningApi) -> Iterator[httpx2.Client]:
    """A plain client of it."""
    with httpx2.Client(base_url=api.url, timeout=60) as client:
        yield client


@pytest.fixture
def producer(queue: EmbeddedServer) -> Iterator[Producer]:
    """A look at the queue without the server."""
    with Producer(queue.url) as producer:
        yield producer


@pytest.fixture
def idle(producer: Producer, worker: object) -> Iterator[str]:
    """The alias of a model that no worker serves any more: its jobs wait."""
    card = producer.models.card(ALIAS).model_copy(update={"alias": "idle"})
    announce_model(producer.redis, card)
    yield "idle"
    producer.redis.delete(keys.model_card_key("idle"))
    producer.redis.zrem(keys.models_key(), "idle")


class Event(NamedTuple):
    """One server-sent event."""

    id: str | None
    name: str | None
    data: str


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Yield the events of a response's lines; comments are left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Event(fields.get("id"), fields.get("event"), fields["data"])
            fields = {}
