"""Old files and batches go; what somebody still needs stays."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import openai
import pytest
from headwater.producer.api.batch import Batch, BatchStatus
from headwater.producer.api.batch_runner import BatchRunner
from headwater.producer.api.file_store import StoredFile
from headwater.producer.api.retention import Retention
from headwater.producer.api.services import Services
from headwater.producer.api.settings import ApiSettings
from headwater.producer.embedded import EmbeddedServer
from headwater.producer.openai_protocol.caller import ANYONE

from .conftest import StartApi

DAY_S = 24 * 3600


class Store:
    """A server's directory without the server, and a clock that the test moves."""

    def __init__(self, services: Services, directory: Path) -> None:
        self.later_s = 0.0
        self._services = services
        self._directory = directory
        self._open()

    def _open(self) -> None:
        self.batches = BatchRunner(self._services, self._directory)
        self.retention = Retention(self.batches, DAY_S, clock=lambda: time.time() + self.later_s)

    async def leave_unfinished(self, note: StoredFile) -> str:
        """Leave a batch as a server does that is stopped; nothing goes on with it here."""
        batch = Batch.new("/v1/completions", note.id, ANYONE, int(time.time()), None)
        running = batch.now_in(BatchStatus.IN_PROGRESS, batch.created_at)
        (self._directory / f"batches/{batch.id}.json").write_bytes(running.encode())
        await self.batches.stop()
        self._open()
        return batch.id

    def upload(self, text: str) -> StoredFile:
        source = BytesIO(text.encode())
        return self.batches.files.add(source, filename="f", purpose="batch", namespace="default")

    async def run_batch(self, note: StoredFile) -> str:
        batch = self.batches.create("/v1/completions", note.id, ANYONE, None)
        while not self.batches.get(batch.id, None).has_ended:
            await asyncio.sleep(0.01)  # a client would ask again, too
        return batch.id

    async def sweep(self, after_s: float) -> int:
        self.later_s = after_s
        return await self.retention.sweep(DAY_S)

    @property
    def file_ids(self) -> set[str]:
        return {note.id for note in self.batches.files.all(None)}

    @property
    def batch_ids(self) -> set[str]:
        return {batch.id for batch in self.batches.all(None)}


@pytest.fixture
def in_store(queue: EmbeddedServer, tmp_path: Path) -> Callable[..., None]:
    """Run a coroutine function over a store on the module's queue."""

    def run(act: Callable[[Store], object]) -> None:
        async def acting() -> None:
            services = Services(queue.url, ApiSettings(data_dir=tmp_path))
            store = Store(services, tmp_path)
            try:
                await act(store)  # type: ignore[misc]
            finally:
                await store.batches.stop()
                await services.close()

        asyncio.run(acting())

    return run


def test_files_that_are_old_go_and_young_ones_stay(in_store: Callable[..., None]) -> None:
    """Also those that no batch ever read."""

    async def act(store: Store) -> None:
        note = store.upload("x")
        assert await store.sweep(DAY_S - 60) == 0
        assert store.file_ids == {note.id}

        assert await store.sweep(DAY_S + 60) == 1
        assert store.file_ids == set()
        assert not store.batches.files.path(note).exists()

    in_store(act)


def test_a_batch_that_ended_goes_with_its_files(in_store: Callable[..., None]) -> None:
    """A server that forgot nothing would fill its memory, too."""

    async def act(store: Store) -> None:
        batch_id = await store.run_batch(store.upload("not a row"))
        await store.sweep(DAY_S - 60)
        assert store.batch_ids == {batch_id}

        await store.sweep(DAY_S + 60)

        assert store.batch_ids == store.file_ids == set()

    in_store(act)


def test_what_an_unfinished_batch_reads_stays_however_old_it_is(
    in_store: Callable[..., None],
) -> None:
    """Its rows are read as they are run."""

    async def act(store: Store) -> None:
        note = store.upload("x")
        batch_id = await store.leave_unfinished(note)

        assert await store.sweep(100 * DAY_S) == 0

        assert store.file_ids == {note.id}
        assert store.batch_ids == {batch_id}

    in_store(act)


def test_what_a_crash_left_goes_too_and_an_upload_under_way_stays(
    in_store: Callable[..., None],
) -> None:
    """Content without a note is either of the two: its age tells."""

    async def act(store: Store) -> None:
        files = store.batches.files.path(store.upload("x")).parent
        (files / "file-torn.data").write_text("half")
        (files / "file-under-way.data").write_text("half")
        old_s = time.time() - 2 * DAY_S
        os.utime(files / "file-torn.data", (old_s, old_s))

        assert await store.sweep(0) == 1

        assert not (files / "file-torn.data").exists()
        assert (files / "file-under-way.data").exists()
        assert len(store.file_ids) == 1

    in_store(act)


def test_a_server_sweeps_as_it_starts_and_tells_when_files_go(
    start_api: StartApi, tmp_path: Path
) -> None:
    """The whole of it, with the setting and OpenAI's own field."""
    first = start_api(data_dir=tmp_path, retention_days=2)
    client = first.client()
    young, old = (client.files.create(file=("f", b"x"), purpose="batch") for _ in range(2))
    assert young.expires_at == young.created_at + 2 * DAY_S
    first.stop()
    note = tmp_path / "files" / f"{old.id}.json"
    fields = json.loads(note.read_text())
    note.write_text(json.dumps({**fields, "created_at": fields["created_at"] - 3 * DAY_S}))

    client = start_api(data_dir=tmp_path, retention_days=2).client()
    deadline = time.monotonic() + 60
    while old.id in (listed := {each.id for each in client.files.list()}):
        assert time.monotonic() < deadline

    assert listed == {young.id}
    with pytest.raises(openai.NotFoundError):
        client.files.content(old.id)


def test_without_a_retention_everything_stays(start_api: StartApi, tmp_path: Path) -> None:
    """0 days are no end, not an immediate one."""
    client = start_api(data_dir=tmp_path, retention_days=0).client()
    note = client.files.create(file=("f", b"x"), purpose="batch")

    assert note.expires_at is None
    assert [each.id for each in client.files.list()] == [note.id]
