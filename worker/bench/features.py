"""Scenario features: a decode step whose rows all ask for something else, against a greedy one."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class FeaturesSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, a model directory, or a hub name.")
    rows: int = setting(16, "Rows of the batch.")
    prompt_tokens: int = setting(64, "Tokens of each row's prompt.")
    steps: int = setting(24, "Steps that are timed, after two that are not.")


def _prepare(settings: FeaturesSettings, _: OpenQueue) -> Contest:
    from .features_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="features",
    summary="Decode steps with sampling settings or a JSON schema on every row, against greedy.",
    settings=FeaturesSettings,
    prepare=_prepare,
    quick={"rows": 4, "prompt_tokens": 8, "steps": 4},
    repeat=5,
)
