import json

import pytest
from headwater.producer import connection
from headwater.producer.cli import main
from redis import Redis


@pytest.fixture(autouse=True)
def no_embedded_server(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("HEADWATER_REDIS", raising=False)


def _doctor(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(("doctor", *arguments))
    return int(leaving.value.code or 0)


def _server(output: str) -> dict[str, object]:
    findings = json.loads(output)
    return next(finding for finding in findings if finding["name"] == "server")


def test_without_a_server_it_looks_at_the_machine_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _doctor() == 0

    output = capsys.readouterr().out
    assert "GFLOP/s" in output
    assert "start `headwater worker` first" in output


def test_a_server_that_does_not_answer_is_fatal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OUTAGE_S", 0.1)
    assert _doctor("--redis", "redis://127.0.0.1:1/0", "--json") == 1

    assert "is the server running?" in str(_server(capsys.readouterr().out)["advice"])


def test_a_wrong_password_is_fatal_and_not_shown(
    redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    redis.execute_command("ACL", "SETUSER", "nurse", "on", ">right", "+@all", "~*")
    url = redis_url.replace("redis://", "redis://nurse:wrong@")

    try:
        assert _doctor("--redis", url, "--json") == 1
    finally:
        redis.execute_command("ACL", "DELUSER", "nurse")

    output = capsys.readouterr().out
    assert "refuses the login" in str(_server(output)["advice"])
    assert "wrong@" not in output


def test_a_user_who_may_ask_for_nothing_but_info_learns_of_eviction(
    redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody needs CONFIG, which shows passwords too, for a look at the server."""
    redis.execute_command("ACL", "SETUSER", "nurse", "on", ">right", "+ping", "+info", "+client")
    url = redis_url.replace("redis://", "redis://nurse:right@")
    redis.config_set("maxmemory-policy", "allkeys-lru")

    try:
        _doctor("--redis", url)
    finally:
        redis.config_set("maxmemory-policy", "noeviction")
        redis.execute_command("ACL", "DELUSER", "nurse")

    assert "eviction: allkeys-lru -> set `maxmemory-policy noeviction`" in capsys.readouterr().out


def test_a_server_without_persistence_is_a_line_and_an_exit_code(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _doctor("--redis", redis_url) == 1

    assert "FAIL  persistence: no AOF -> set `appendonly yes`" in capsys.readouterr().out
