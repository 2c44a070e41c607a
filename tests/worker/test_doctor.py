import platform

import pytest
from headwater.producer.embedded import EmbeddedServer
from headwater.worker.doctor import Finding, _blas, examine_machine, examine_server
from headwater.worker.engine import blas
from headwater.worker.engine.blas import BlasChoice
from redis import Redis


def _named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_the_machine_is_named_and_measured() -> None:
    findings = examine_machine()

    assert _named(findings, "device").value
    assert "GFLOP/s" in _named(findings, "blas").value


def test_the_reference_blas_is_fatal_and_a_busy_cpu_is_not() -> None:
    reference = _blas(BlasChoice("reference"), 3.0)
    busy = _blas(BlasChoice("mkl", "libmkl_rt.so.3"), 3.0)

    assert reference.is_fatal
    assert reference.advice == blas.advice(platform.machine())
    assert not busy.is_fatal
    assert busy.advice


def test_a_server_without_persistence_is_fatal_and_says_what_to_do(redis: Redis) -> None:
    finding = _named(examine_server(redis), "persistence")

    assert finding.is_fatal
    assert "appendonly yes" in str(finding.advice)


def test_a_server_that_evicts_keys_is_reported(redis: Redis) -> None:
    redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        finding = _named(examine_server(redis), "eviction")
    finally:
        redis.config_set("maxmemory-policy", "noeviction")

    assert "noeviction" in str(finding.advice)


def test_a_good_server_has_nothing_to_mend(tmp_path) -> None:
    with EmbeddedServer(data_dir=tmp_path) as server, Redis.from_url(server.url) as redis:
        findings = examine_server(redis)

    assert [finding for finding in findings if finding.advice] == []


@pytest.mark.parametrize(
    ("version", "is_fatal"), [("6.2.14", True), ("7.0.15", False), ("8.2.1", False)]
)
def test_an_old_redis_is_fatal(version: str, is_fatal: bool) -> None:
    class OldServer:
        def info(self) -> dict[str, object]:
            return {
                "redis_version": version,
                "aof_enabled": 1,
                "maxmemory_policy": "noeviction",
                "maxmemory": 0,
            }

    findings = examine_server(OldServer())  # type: ignore[arg-type]

    assert _named(findings, "server").is_fatal is is_fatal
