"""Scenario detok: what a token costs on its way to text, early and late in an output."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class DetokSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, or a model directory with a tokenizer.json.")
    num_tokens: int = setting(4096, "Length of the output; rounded down to whole edges.")
    edge: int = setting(512, "Tokens of the head and of the tail that are compared.")


def _prepare(settings: DetokSettings, _: OpenQueue) -> Contest:
    from .detok_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="detok",
    summary="Microseconds a token to text, and whether they grow with the output.",
    settings=DetokSettings,
    prepare=_prepare,
    quick={"num_tokens": 2048},
    repeat=20,
    quick_repeat=5,
)
