"""Scenario scheduler: what planning a step and claiming a job cost, with few and many waiting."""

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
    claims: int = setting(200, "Jobs claimed from a real queue besides; 0 leaves that out.")
    depth: int = setting(1_000_000, "Ids in that queue.")
    baseline_depth: int = setting(10, "Ids in the queue that it is compared with.")


def _prepare(settings: SchedulerSettings, open_queue: OpenQueue) -> Contest:
    from .scheduler_contest import prepare

    return prepare(settings, open_queue)


SCENARIO = Scenario(
    name="scheduler",
    summary="Milliseconds to plan a step and to claim a job, and whether they grow with the queue.",
    settings=SchedulerSettings,
    prepare=_prepare,
    quick={"steps": 500, "claims": 50, "depth": 100_000},
)
