"""Scenario decode: a step of many rows behind one shared prefix, from one given prefix cache."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class DecodeSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, a model directory, or a hub name.")
    rows: int = setting(32, "Rows that share the prefix.")
    shared_tokens: int = setting(2048, "Tokens of the prefix.")
    steps: int = setting(12, "Steps that are timed, after one that is not.")


def _prepare(settings: DecodeSettings, _: OpenQueue) -> Contest:
    from .decode_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="decode",
    summary="Time and memory of decode steps behind one shared prefix, against mlx-lm's.",
    settings=DecodeSettings,
    prepare=_prepare,
    quick={"rows": 4, "shared_tokens": 128, "steps": 4},
    measures_memory=True,
)
