"""Scenario scheduler: what planning a step costs, with few and with many sequences waiting."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class SchedulerSettings:
    """Flags of the scenario."""

    known: int = setting(10_000, "Sequences that the worker knows.")
    baseline: int = setting(100, "Sequences known in the run that it is compared with.")
    batch: int = setting(64, "Sequences that run at once.")
    steps: int = setting(2_000, "Steps that are planned.")
    prompt_tokens: int = setting(256, "Length of a prompt; half of it is shared by many.")
    new_tokens: int = setting(32, "Tokens that each sequence generates.")


def _prepare(settings: SchedulerSettings, _: OpenQueue) -> Contest:
    from .scheduler_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="scheduler",
    summary="Milliseconds to plan a step, without a model, and whether they grow with the queue.",
    settings=SchedulerSettings,
    prepare=_prepare,
    quick={"steps": 500},
)
