"""Scenario restart: what a worker that starts anew has to compute of prompts that it served."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class RestartSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, a model directory, or a hub name.")
    prompts: int = setting(8, "System prompts, one job each before and after the restart.")
    system_tokens: int = setting(1024, "Tokens of a system prompt.")
    own_tokens: int = setting(16, "Tokens behind it, others after the restart.")
    new_tokens: int = setting(4, "Tokens that each job generates.")


def _prepare(settings: RestartSettings, _: OpenQueue) -> Contest:
    from .restart_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="restart",
    summary="Prompts whose start is on disk after a restart, against the first start.",
    settings=RestartSettings,
    prepare=_prepare,
    quick={"prompts": 2, "system_tokens": 256},
    repeat=1,
)
