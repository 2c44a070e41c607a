"""Scenarios whose jobs are all there at the start, with and without prefixes in common."""

from dataclasses import dataclass, replace

from .scenario import Contest, OpenQueue, Scenario, setting

_MODEL = "demo, a model directory, or a hub name."
_NEW = "Tokens that each job generates."
_BATCH = "Sequences at once, on both sides."
_TARGET = "Our target for the gap between two tokens; the worker's default."


@dataclass(frozen=True)
class UniqueSettings:
    """Flags of scenario unique."""

    model: str = setting("demo", _MODEL)
    jobs: int = setting(16, "Jobs that share nothing.")
    shortest: int = setting(32, "Tokens of the shortest prompt.")
    longest: int = setting(256, "Tokens of the longest prompt.")
    new_tokens: int = setting(32, _NEW)
    batch: int = setting(32, _BATCH)
    target_itl_ms: float = setting(400.0, _TARGET)


@dataclass(frozen=True)
class SharedPrefixSettings:
    """Flags of scenario shared-prefix."""

    model: str = setting("demo", _MODEL)
    model_kind: str = setting(
        "", "Instead of --model, random weights: hybrid, sliding or recurrent."
    )
    jobs: int = setting(16, "Jobs that share one prefix.")
    shared_tokens: int = setting(0, "Tokens of the prefix; 0: 512, with --model-kind 1024.")
    own_tokens: int = setting(16, "Tokens of each prompt behind it.")
    new_tokens: int = setting(16, _NEW)
    batch: int = setting(32, _BATCH)
    target_itl_ms: float = setting(400.0, _TARGET)


@dataclass(frozen=True)
class NestedPrefixSettings:
    """Flags of scenario nested-prefix."""

    model: str = setting("demo", _MODEL)
    jobs: int = setting(16, "Jobs that share the first level.")
    shared_tokens: int = setting(256, "Tokens of the first level.")
    group: int = setting(4, "Jobs that share one second level.")
    group_tokens: int = setting(128, "Tokens of a second level.")
    own_tokens: int = setting(16, "Tokens of each prompt behind both.")
    new_tokens: int = setting(16, _NEW)
    batch: int = setting(32, _BATCH)
    target_itl_ms: float = setting(400.0, _TARGET)


@dataclass(frozen=True)
class SamplesSettings:
    """Flags of scenario samples."""

    model: str = setting("demo", _MODEL)
    jobs: int = setting(4, "Prompts that share nothing.")
    n: int = setting(8, "Choices of each prompt.")
    prompt_tokens: int = setting(256, "Tokens of each prompt.")
    new_tokens: int = setting(32, "Tokens that each choice generates.")
    temperature: float = setting(0.8, "Of all choices; 0 is greedy.")
    batch: int = setting(32, _BATCH)
    target_itl_ms: float = setting(400.0, _TARGET)


def _prepare_unique(settings: UniqueSettings, _: OpenQueue) -> Contest:
    from .generation_contest import prepare_unique

    return prepare_unique(settings)


def _prepare_shared_prefix(settings: SharedPrefixSettings, _: OpenQueue) -> Contest:
    from .generation_contest import prepare_shared_prefix

    return prepare_shared_prefix(settings)


def _complete_shared_prefix(settings: SharedPrefixSettings) -> SharedPrefixSettings:
    if settings.shared_tokens:
        return settings
    return replace(settings, shared_tokens=1024 if settings.model_kind else 512)


def _prepare_nested_prefix(settings: NestedPrefixSettings, _: OpenQueue) -> Contest:
    from .generation_contest import prepare_nested_prefix

    return prepare_nested_prefix(settings)


def _prepare_samples(settings: SamplesSettings, _: OpenQueue) -> Contest:
    from .generation_contest import prepare_samples

    return prepare_samples(settings)


UNIQUE = Scenario(
    name="unique",
    summary="Ragged prompts that share nothing, against mlx-lm's batch generator.",
    settings=UniqueSettings,
    prepare=_prepare_unique,
    quick={"jobs": 4, "longest": 64, "new_tokens": 8},
    measures_memory=True,
)
SHARED_PREFIX = Scenario(
    name="shared-prefix",
    summary="Prompts that share one prefix, against mlx-lm's batch generator.",
    settings=SharedPrefixSettings,
    prepare=_prepare_shared_prefix,
    quick={"jobs": 4, "shared_tokens": 128, "new_tokens": 4},
    complete=_complete_shared_prefix,
    measures_memory=True,
)
NESTED_PREFIX = Scenario(
    name="nested-prefix",
    summary="Prompts whose prefixes fork twice, against mlx-lm's batch generator.",
    settings=NestedPrefixSettings,
    prepare=_prepare_nested_prefix,
    quick={"jobs": 4, "shared_tokens": 64, "group": 2, "group_tokens": 32, "new_tokens": 4},
    measures_memory=True,
)
SAMPLES = Scenario(
    name="samples",
    summary="Several choices of each prompt, against mlx-lm's batch generator.",
    settings=SamplesSettings,
    prepare=_prepare_samples,
    quick={"jobs": 2, "n": 3, "prompt_tokens": 64, "new_tokens": 4},
    measures_memory=True,
)
