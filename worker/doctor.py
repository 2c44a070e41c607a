"""What `headwater doctor` looks at: this machine, its BLAS and device, and the server."""

import platform
import time
from importlib import metadata
from typing import Any, NamedTuple

from redis import Redis

from .engine import blas

_SLOW_GFLOPS = 15.0
"""The reference BLAS gives 3; any tuned one more than this."""

_OLDEST_REDIS = (7, 0)


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    value: str
    advice: str | None = None
    """What to do about it; None where nothing is wrong."""
    is_fatal: bool = False
    """Whether a worker should not run in production like this."""


def examine_machine() -> list[Finding]:
    """Look at versions, device and, on a CPU, how fast matrix products are."""
    choice = blas.preload()
    # After the BLAS, which has to come first.
    import mlx.core as mx

    findings = [
        Finding("system", f"{platform.system()} {platform.machine()}"),
        Finding("python", platform.python_version()),
        *(Finding(name, metadata.version(name)) for name in ("mlx", "mlx-lm", "rq", "redis")),
        Finding("device", _device(mx)),
    ]
    if mx.default_device() == mx.Device(mx.cpu):
        findings.append(_blas(choice, _gflops(mx)))
    return findings


def examine_server(redis: Redis) -> list[Finding]:
    """Look at the server behind *redis*; raises RedisError when it does not answer."""
    # redis-py types every reply as possibly awaitable.
    info: Any = redis.info()
    return [_version(info), _persistence(info), *_memory(info)]


def _device(mx: Any) -> str:
    device = mx.default_device()
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture") or "CPU"
    kind = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu"
    size = info.get("max_recommended_working_set_size") or info.get("memory_size")
    memory = f", {size / 2**30:.0f} GiB" if size else ""
    return f"{device} ({kind}: {name}{memory})"


def _gflops(mx: Any, seconds: float = 0.5) -> float:
    """Return the best speed of a float32 product of prefill's shape, in GFLOP/s."""
    rows, inner = 512, 1024
    a, b = mx.random.normal((rows, inner)), mx.random.normal((inner, inner))
    mx.eval(a @ b)
    # The best one: what the CPU can do, whatever else runs beside it for a moment.
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * inner / best / 1e9


def _blas(choice: blas.BlasChoice, gflops: float) -> Finding:
    value = f"{choice.name}, {gflops:.0f} GFLOP/s (float32)"
    if choice.is_reference:
        return Finding("blas", value, blas.advice(platform.machine()), is_fatal=True)
    if gflops < _SLOW_GFLOPS:
        return Finding("blas", value, "slow for this BLAS: end what else keeps this CPU busy")
    return Finding("blas", value)


def _version(info: dict[str, Any]) -> Finding:
    is_valkey = "valkey_version" in info
    text = str(info["valkey_version" if is_valkey else "redis_version"])
    name = f"{'Valkey' if is_valkey else 'Redis'} {text}"
    if tuple(int(part) for part in text.split(".")[:2]) < _OLDEST_REDIS:
        return Finding("server", name, "use Redis 7 or later, or Valkey", is_fatal=True)
    return Finding("server", name)


def _persistence(info: dict[str, Any]) -> Finding:
    if info.get("aof_enabled"):
        status = info.get("aof_last_write_status", "ok")
        advice = None if status == "ok" else "free disk space: the last write of the AOF failed"
        return Finding("persistence", f"AOF, last write {status}", advice, status != "ok")
    return Finding(
        "persistence",
        "no AOF",
        "set `appendonly yes`, or a restart of the server loses its jobs and streams",
        is_fatal=True,
    )


def _memory(info: dict[str, Any]) -> list[Finding]:
    policy = str(info.get("maxmemory_policy", "unknown"))
    limit = int(info.get("maxmemory", 0))
    eviction = Finding("eviction", policy)
    if policy != "noeviction":
        advice = "set `maxmemory-policy noeviction`, or the server may drop jobs and streams"
        eviction = Finding("eviction", policy, advice, is_fatal=limit > 0)
    shown = f"{limit / 2**20:.0f} MiB" if limit else "no limit"
    return [eviction, Finding("maxmemory", shown)]
