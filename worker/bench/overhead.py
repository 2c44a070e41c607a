"""Scenario overhead: what Redis costs, against the same loop without it."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class OverheadSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, a model directory, or a hub name.")
    jobs: int = setting(64, "Jobs, all there at the start.")
    shortest: int = setting(16, "Tokens of the shortest prompt.")
    longest: int = setting(32, "Tokens of the longest prompt.")
    new_tokens: int = setting(32, "Tokens that each job generates.")
    batch: int = setting(32, "Sequences at once.")
    prefill_chunk: int = setting(512, "Fixed, so that both sides run the same steps.")


def _prepare(settings: OverheadSettings, open_queue: OpenQueue) -> Contest:
    from .overhead_contest import prepare

    return prepare(settings, open_queue)


SCENARIO = Scenario(
    name="overhead",
    summary="Tokens per second through Redis, over those of the same loop without it.",
    settings=OverheadSettings,
    prepare=_prepare,
    quick={"jobs": 8, "new_tokens": 8},
    repeat=5,
)
