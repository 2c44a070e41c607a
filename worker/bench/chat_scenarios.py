"""Scenarios whose jobs come one after the other: multi-turn, mixed."""

from dataclasses import dataclass

from .batch_scenarios import _BATCH, _MODEL, _NEW, _TARGET
from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class MultiTurnSettings:
    """Flags of scenario multi-turn."""

    model: str = setting("demo", _MODEL)
    chats: int = setting(8, "Chats that start together.")
    turns: int = setting(6, "Turns of each chat.")
    system_tokens: int = setting(256, "Tokens of the system prompt, the same in all chats.")
    user_tokens: int = setting(32, "Tokens of a user's turn.")
    new_tokens: int = setting(16, _NEW)
    batch: int = setting(32, _BATCH)
    target_itl_ms: float = setting(400.0, _TARGET)


@dataclass(frozen=True)
class MixedSettings:
    """Flags of scenario mixed."""

    model: str = setting("demo", _MODEL)
    long_tokens: int = setting(2048, "Tokens of the long prompt, which comes first.")
    jobs: int = setting(8, "Short jobs.")
    short_tokens: int = setting(32, "Tokens of a short prompt.")
    new_tokens: int = setting(16, _NEW)
    first_s: float = setting(1.0, "When the first short job comes.")
    every_s: float = setting(0.5, "Time from one short job to the next.")
    batch: int = setting(32, _BATCH)
    target_itl_ms: float = setting(400.0, _TARGET)


def _prepare_multi_turn(settings: MultiTurnSettings, _: OpenQueue) -> Contest:
    from .generation_contest import prepare_multi_turn

    return prepare_multi_turn(settings)


def _prepare_mixed(settings: MixedSettings, _: OpenQueue) -> Contest:
    from .generation_contest import prepare_mixed

    return prepare_mixed(settings)


MULTI_TURN = Scenario(
    name="multi-turn",
    summary="Chats of several turns, against mlx-lm's batch generator and its prompt cache.",
    settings=MultiTurnSettings,
    prepare=_prepare_multi_turn,
    quick={"chats": 2, "turns": 2, "system_tokens": 64, "new_tokens": 4},
    measures_memory=True,
)
MIXED = Scenario(
    name="mixed",
    summary="Short jobs beside a long prompt, against mlx-lm's batch generator.",
    settings=MixedSettings,
    prepare=_prepare_mixed,
    quick={"long_tokens": 256, "jobs": 2, "first_s": 0.2, "new_tokens": 4},
    measures_memory=True,
)
