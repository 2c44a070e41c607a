"""The runbook: every alert has its section, and what it tells to do can be done."""

import re
import runpy
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from headwater.producer.api.settings import ApiSettings
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.client_queue import job_key, read_payload
from headwater.producer.embedded import EmbeddedServer
from headwater.producer.result import collect
from headwater.schemas import Finished, ModelCard, keys
from headwater.worker.engine.random_model import write_random_model
from headwater.worker.settings import WorkerSettings
from redis import Redis
from redis.exceptions import ResponseError

from tests.documents import blocks, read, sections
from tests.faults.conftest import job, types_of, worker_starter
from tests.ops.conftest import OPS, ROOT, GuardedServer
from tests.ops.settings import check_command

DOCUMENT = "ops/RUNBOOK.md"
TEXT = read(DOCUMENT)
SHELL = [line for block in blocks(DOCUMENT, "sh") for line in block.text.splitlines()]
INLINE = re.findall(r"`([^`\n]+)`", TEXT)
SERVER_COMMANDS = ("ACL", "BGREWRITEAOF", "CONFIG", "INFO", "LATENCY", "REPLICAOF", "SLOWLOG")


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    """Whoever is woken looks for the alert's name."""
    groups = yaml.safe_load((OPS / "prometheus/alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    described = [name for name in sections(TEXT) if name.startswith("Headwater")]

    assert described == alerts
    assert all(len(sections(TEXT)[name].split()) > 15 for name in alerts)


def test_every_failure_code_is_explained() -> None:
    """A code on the dashboard that nobody explains is no help."""
    sources = "".join(
        path.read_text("utf-8")
        for folder in ("worker", "producer")
        for path in (ROOT / folder).rglob("*.py")
    )
    codes = set(re.findall(r'\bJobRejected\(\s*"(\w+)"', sources))
    codes |= set(re.findall(r'\bFailed\(\s*code="(\w+)"', sources))

    assert {"poisoned", "engine_error", "tokenizer_mismatch"} <= codes
    assert codes <= set(INLINE)


def test_links_lead_somewhere() -> None:
    """To a heading of this document, or to a file beside it."""
    anchors = {name.lower().replace(" ", "-") for name in sections(TEXT)}

    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            assert target[1:] in anchors
        else:
            assert (OPS / target).exists()


def test_settings_that_it_names_exist() -> None:
    """A variable of another name would be ignored in silence."""
    known = {f"HEADWATER_{name.upper()}" for name in WorkerSettings.model_fields}
    known |= {f"HEADWATER_API_{name.upper()}" for name in ApiSettings.model_fields}

    assert set(re.findall(r"HEADWATER_[A-Z_]+", TEXT)) <= known


def test_commands_that_it_names_exist() -> None:
    """With the flags that they have."""
    found = [re.search(r"\bheadwater ([a-z][^>]*)", line) for line in [*SHELL, *INLINE]]
    commands = [match[1] for match in found if match]

    assert len(commands) > 5
    for command in commands:
        check_command(shlex.split(command))


def test_services_and_files_of_its_commands_exist() -> None:
    """Names are those of compose.yaml."""
    services = yaml.safe_load((OPS / "compose.yaml").read_text())["services"]
    for line in SHELL:
        words = line.split()
        if words[:2] == ["docker", "compose"] and words[2] in ("exec", "logs", "stop"):
            assert set(words) & set(services), line
        elif words[0].startswith("./"):
            assert (OPS / words[0]).is_file()


def test_users_may_do_what_they_are_told_to(guarded: GuardedServer) -> None:
    """The server itself says whether it would let them."""
    told = [("headwater-admin", text) for text in INLINE if text.split()[0] in SERVER_COMMANDS]
    calls = re.findall(r'^redis-cli --user (\S+) -a "\$PASSWORD" (.+)$', TEXT, re.MULTILINE)
    told += calls

    assert {user for user, _ in told} == {"headwater-admin", "headwater-ops"}
    assert calls
    with guarded.client("admin") as admin:
        refused = [each for each in told if "permission" in _verdict(admin, *each)]
    assert refused == []


def _verdict(admin: Redis, user: str, command: str) -> str:
    """Return what the server would say; half a command has the wrong number of arguments."""
    try:
        return str(admin.execute_command("ACL", "DRYRUN", user, *command.split()))
    except ResponseError as error:
        return str(error)


def test_ended_jobs_are_submitted_again(
    redis: Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program in the document, as it stands there."""
    (block,) = blocks(DOCUMENT, "python")
    script = tmp_path / "resubmit.py"
    script.write_text(block.text)
    producer = Producer(redis, SubmitSettings(check_model=False))
    old_id = producer.submit(new_job("demo", [1, 2, 3], max_tokens=5, expires_at=1.0))
    card = ModelCard(
        alias="demo",
        source="demo",
        vocab_size=100,
        context_length=100,
        tokenizer_fingerprint="f",
    )
    redis.set(keys.model_card_key("demo"), card.encode())
    monkeypatch.setattr(sys, "argv", ["resubmit.py", redis_url, old_id, "gone"])

    runpy.run_path(str(script), run_name="__main__")

    first, second = capsys.readouterr().out.splitlines()
    assert second == "gone: its record has expired, or can't be read"
    new_id = first.removeprefix(f"{old_id} -> ")
    old, new = (read_payload(redis.hget(job_key(each), "data")) for each in (old_id, new_id))
    assert old is not None
    changed = {"job_id": new_id, "expires_at": None, "tokenizer_fingerprint": "f"}
    assert new == old.model_copy(update=changed)
    assert redis.lrange("rq:queue:demo.normal.default", 0, -1)[-1] == new_id.encode()


@pytest.mark.long
def test_a_move_to_another_server_loses_nothing(tmp_path: Path) -> None:
    """The runbook's steps with real servers and workers: each text is whole, and told once."""
    (tmp_path / "model").mkdir()
    model = write_random_model(tmp_path / "model")
    with (
        EmbeddedServer(data_dir=_folder(tmp_path, "old")) as old,
        EmbeddedServer(data_dir=_folder(tmp_path, "new")) as new,
        worker_starter(old.url, model) as start,
        Producer(old.url, SubmitSettings(check_model=False)) as before,
        Producer(new.url, SubmitSettings(check_model=False)) as after,
    ):
        worker = start("--max-batch", "4", "--drain-s", "0")
        reference = before.result(before.submit(job(max_tokens=400)))
        ids = before.submit_many([job(max_tokens=400) for _ in range(12)])
        while len(types_of(before, ids[0])) < 10:
            pass

        after.redis.replicaof(*old.url.removeprefix("redis://").split("/")[0].split(":"))
        _wait(lambda: after.redis.info("replication")["master_link_status"] == "up")
        # Behind those that may have ended by now: these surely run when their worker has to go.
        ids += before.submit_many([job(max_tokens=400) for _ in range(4)])
        while len(types_of(before, ids[-4])) < 10:
            pass
        assert worker.stop() == 0
        end = before.redis.info("replication")["master_repl_offset"]
        _wait(lambda: after.redis.info("replication")["slave_repl_offset"] >= end)
        after.redis.replicaof("NO", "ONE")
        old.stop()
        start(url=new.url)

        results = [collect(after.tail(job_id)) for job_id in ids]
        assert all(isinstance(result.end, Finished) for result in results)
        assert {result.choices[0].token_ids for result in results} == {
            reference.choices[0].token_ids
        }
        assert "released" in types_of(after, ids[-4])
        assert "restarted" not in {kind for each in ids for kind in types_of(after, each)}


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def _wait(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
