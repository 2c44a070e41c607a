"""Scenario bulk: a file of rows with one system prompt, against a loop over mlx-lm's batches."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class BulkSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, a model directory, or a hub name.")
    rows: int = setting(64, "Rows of the file.")
    shared_tokens: int = setting(512, "Tokens of the system prompt, at least.")
    new_tokens: int = setting(8, "Tokens that each row generates at most.")
    peer_batch: int = setting(16, "Rows that the peer's loop runs at once.")


def _prepare(settings: BulkSettings, _: OpenQueue) -> Contest:
    from .bulk_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="bulk",
    summary="`headwater bulk`, all in one, against a loop over mlx-lm's batch_generate.",
    settings=BulkSettings,
    prepare=_prepare,
    quick={"rows": 4, "shared_tokens": 64, "new_tokens": 4, "peer_batch": 2},
    repeat=1,
)
