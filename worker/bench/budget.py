"""Scenario memory: many long rows over a budget for a few, against the same without a budget."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class BudgetSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, a model directory, or a hub name.")
    jobs: int = setting(32, "Jobs that share nothing.")
    prompt_tokens: int = setting(96, "Tokens of each prompt.")
    new_tokens: int = setting(32, "Tokens that each job generates.")
    rows: int = setting(4, "Rows that the budget has room for.")
    batch: int = setting(32, "Sequences at once, where memory allows it.")


def _prepare(settings: BudgetSettings, _: OpenQueue) -> Contest:
    from .budget_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="memory",
    summary="Rows over a budget of keys and values for a few, against no budget.",
    settings=BudgetSettings,
    prepare=_prepare,
    quick={"jobs": 6, "prompt_tokens": 32, "new_tokens": 8, "rows": 2},
    measures_memory=True,
)
