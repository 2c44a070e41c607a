"""The variables of programs, checked with the settings that read them."""

from collections.abc import Mapping
from typing import Any

from headwater.producer.api.settings import ApiSettings
from headwater.producer.cli.app import build
from headwater.worker.settings import WorkerSettings
from typer.main import get_command

API = "HEADWATER_API_"
WORKER = "HEADWATER_"
WORKER_SPARE_S = 10
"""What a worker may need after its drain, to hand back what still runs."""


def check_worker(variables: Mapping[str, str]) -> WorkerSettings:
    """Return a worker's settings from *variables*, all of which have to be settings."""
    own = {name.removeprefix(WORKER).lower(): value for name, value in variables.items()}
    assert set(own) <= set(WorkerSettings.model_fields), own
    assert all(name.startswith(WORKER) for name in variables)
    return WorkerSettings.model_validate(own)


def check_api(variables: Mapping[str, str]) -> ApiSettings:
    """Return the HTTP server's settings from *variables*; the command itself reads the Redis."""
    assert variables.get("HEADWATER_REDIS", "redis://").startswith("redis://")
    rest = {name: value for name, value in variables.items() if name != "HEADWATER_REDIS"}
    assert all(name.startswith(API) for name in rest), rest
    own = {name.removeprefix(API).lower(): value for name, value in rest.items()}
    assert set(own) <= set(ApiSettings.model_fields), own
    return ApiSettings.model_validate(own)


def check_command(words: list[str]) -> None:
    """Check that `headwater WORDS...` names a command, and flags that it has."""
    command: Any = get_command(build([words[0]]))
    rest = list(words)
    while rest and (inner := getattr(command, "commands", {}).get(rest[0])) is not None:
        command = inner
        rest.pop(0)
    assert len(rest) < len(words), words
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= known, words


def parse_env(text: str) -> dict[str, str]:
    """Return the variables of an env file."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}
