"""ApiSettings: the HTTP server's knobs, read once from flags and HEADWATER_API_* variables."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ApiSettings(BaseSettings):
    """What the server is told at its start. Arguments win over the environment."""

    model_config = SettingsConfigDict(
        env_prefix="HEADWATER_API_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    keys_file: Path | None = None
    """File of API keys, one line each from `headwater api new-key`; without it anyone may call."""
    data_dir: Path | None = None
    """Where uploaded files and batches are kept; without it below the user's state directory."""
    max_queue_depth: int | None = Field(default=None, ge=1)
    """Jobs that may wait in one queue before submits are refused with 429."""
    max_body_mb: int = Field(default=16, ge=1)
    """Size limit of a request's body."""
    max_file_mb: int = Field(default=200, ge=1)
    """Size limit of an uploaded file."""
    batch_rows_in_flight: int = Field(default=64, ge=1, le=4096)
    """Jobs of one batch that are queued or run at once."""
    retention_days: float = Field(default=30.0, ge=0)
    """Files, and batches that have ended, are deleted after so many days; 0 keeps them."""
    keepalive_s: float = Field(default=15.0, gt=0)
    """A stream that is silent for so long gets a comment, so that proxies keep it open."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for requests that don't stream."""
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error; prompts and texts are never logged."""
    log_json: bool | None = None
    """JSON log lines; without it they are JSON unless standard error is a terminal."""

    @property
    def retention_s(self) -> float | None:
        """The retention in seconds; None for ever."""
        return self.retention_days * 24 * 3600 or None


def settings_table() -> str:
    """Return the table of all settings for the README, one row a line."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in ApiSettings.model_fields.items():
        shown = "" if field.default is None else f"`{field.default}`"
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `HEADWATER_API_{name.upper()}` | {shown} | {meaning} |")
    return "\n".join(rows)
