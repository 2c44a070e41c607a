"""WorkerSettings: every knob of the worker, read once from flags and HEADWATER_* variables."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Alias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]


def _parse_adapters(value: Any) -> Any:
    """Take `alias=directory,...`, a list of such pairs, or the mapping itself."""
    if isinstance(value, str):
        value = [pair for pair in value.split(",") if pair]
    if not isinstance(value, list):
        return value
    pairs = [str(pair).partition("=") for pair in value]
    for alias, equals, directory in pairs:
        if not (alias and equals and directory):
            raise ValueError("give alias=directory")
    adapters = {alias.strip(): directory for alias, _, directory in pairs}
    if len(adapters) < len(pairs):
        raise ValueError("an alias appears twice")
    return adapters


def _check_kv_bits(value: int) -> int:
    if value not in (4, 8):
        raise ValueError("give 4 or 8")
    return value


class WorkerSettings(BaseSettings):
    """What a worker is told at its start. Arguments win over the environment."""

    model_config = SettingsConfigDict(
        env_prefix="HEADWATER_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    model: str
    """Directory or hub name of the model; `demo` is the demo model."""
    alias: Alias
    """The name that jobs ask for; the command line makes it of the model's name."""
    redis: str
    """redis://, rediss:// or unix:// URL; the command line can start an embedded server."""

    connect_timeout_s: float = Field(default=60.0, ge=0)
    """How long a worker that starts waits for a server that is away, loading or read-only; one that
    runs waits as long where its login is refused."""
    adapters: Annotated[dict[Alias, str], NoDecode, BeforeValidator(_parse_adapters)] = {}
    """LoRA adapters that jobs may name, alias=directory with commas between them."""

    max_batch: int = Field(default=32, ge=1, le=1024)
    """Sequences that run at once."""
    target_itl_ms: float = Field(default=400.0, gt=0)
    """No running sequence waits longer for its next token because others prefill."""
    prefill_chunk: int | None = Field(default=None, ge=1)
    """Fixed prefill chunk in tokens; without it the chunk adapts to target_itl_ms."""
    kv_budget_mb: int | None = Field(default=None, ge=1)
    """Running keys and values plus prefix cache; without it a share of the device's memory."""
    kv_bits: Annotated[int, AfterValidator(_check_kv_bits)] | None = None
    """Bits of a stored key or value; rows then run one at a time. Without it they are floats."""
    cache_dir: Path | None = None
    """Directory of prefixes that survive restarts; without it they are kept in memory only."""
    cache_disk_mb: int = Field(default=10_240, ge=1)
    """What the files in cache_dir may take together; the least recently used go."""
    # Measured on a CPU with random models of hidden size 512 and 8 layers (gated delta nets with
    # attention in every fourth layer; windows of 256; a state space model): a token costs 1.4 to
    # 2.9 ms of prefill, a copy of the state 1 to 2 ms at any stride, so time does not decide; but
    # chunks of 128 cost a tenth more a token than chunks of 512, of 32 more than half. A state
    # takes 840 KiB, 1.5 MiB, 2.1 MiB: as much as plain keys and values of 420 (hybrid) and 768
    # (windows) tokens. So with 512 the states of a prompt take about as much memory as its keys
    # and values, half as much as with 256, and a fork that nobody saw coming computes 256 tokens
    # again on average; those that waiting prompts show get a state of their own anyway.
    snapshot_stride: int = Field(default=512, ge=16)
    """Models with recurrent state keep a copy of it every so many prompt tokens; so do those with
    sliding windows whose rows can't share prefixes."""
    max_wait_s: float = Field(default=30.0, gt=0)
    """A queue that waits longer while higher classes are served gives one job, then waits anew."""
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of the BLAS on a CPU; without it all cores."""

    reasoning: str = "auto"
    """Markers of the model's reasoning: auto, none, harmony, or think, mistral, seed, ..."""
    tool_parser: str = "auto"
    """How the model calls tools: auto, none, harmony, or a module of mlx_lm.tool_parsers."""

    lease_s: float = Field(default=15.0, ge=0.5)
    """A worker that has not been heard of for this long has lost its jobs."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for running jobs before they are handed back."""
    checkpoint_s: float = Field(default=5.0, gt=0)
    """How often a `final` job publishes the tokens it has."""
    stream_ttl_s: float = Field(default=3600.0, ge=1)
    """How long a stream can be read after its end."""
    publish_buffer_mb: int = Field(default=64, ge=1)
    """Events that wait for Redis; when full, the engine slows down."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics, /healthz and /readyz; without it they are off, 0 picks a free one."""
    metrics_host: str = "127.0.0.1"
    """Address that these listen on."""
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error; prompts and texts appear at debug only, if at all."""
    log_json: bool | None = None
    """JSON log lines; without it they are JSON unless standard error is a terminal."""


def settings_table() -> str:
    """Return the table of all settings for the README, one row a line."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in WorkerSettings.model_fields.items():
        default = "required" if field.is_required() else field.default
        shown = "" if default in (None, {}) else f"`{default}`"
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `HEADWATER_{name.upper()}` | {shown} | {meaning} |")
    return "\n".join(rows)
