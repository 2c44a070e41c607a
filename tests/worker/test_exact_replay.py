"""A prompt that is wholly cached needs its last token's logits only, however it is sampled."""

from typing import Any

import pytest
from headwater.schemas import CachedTokens, SamplingParams
from headwater.worker.engine.loading import LoadedModel

from tests.worker.test_cold_prefixes import (  # noqa: F401 - fixtures
    Worker,
    generate_metrics,
    job,
    loaded,
    loaded_models,
    start,
    tokens,
)

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "bias": {"logit_bias": {65: 5.0}, "bad_token_ids": (66, 67)},
    "choices": {"temperature": 1.0, "n": 3},
}
FIELDS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "final": {"stream": "final"},
    "stops": {"stop": ("zzzz",), "min_tokens": 2},
}


def jobs(suffix: str) -> list:
    """One job of each mode, each with a prompt of its own."""
    sampled = [
        job(f"{name}{suffix}", tokens(seed, 70), sampling=SamplingParams(seed=5, **mode))
        for seed, (name, mode) in enumerate(MODES.items())
    ]
    others = [
        job(f"{name}{suffix}", tokens(50 + seed, 70), sampling=SamplingParams(seed=5), **fields)
        for seed, (name, fields) in enumerate(FIELDS.items())
    ]
    return sampled + others


def texts(worker: Worker, job_id: str) -> dict[int, list[int]]:
    """Return the tokens of each choice."""
    found: dict[int, list[int]] = {}
    for part in worker.sink.parts[job_id]:
        found.setdefault(part.choice, []).extend(part.token_ids)
    return found


def test_a_wholly_cached_prompt_is_not_prefilled_in_any_sampling_mode(
    loaded: LoadedModel,  # noqa: F811 - the fixture's value
) -> None:
    worker = Worker(loaded, None)
    worker.run(*jobs("-first"))
    launch, prefilled = worker.loop._engine.launch, []

    def noting(prefill: Any, decode: Any) -> Any:
        prefilled.extend(prefill)
        return launch(prefill, decode)

    worker.loop._engine.launch = noting  # type: ignore[method-assign]
    worker.run(*jobs("-again"))

    assert prefilled == []
    for first, again in zip(jobs("-first"), jobs("-again"), strict=True):
        assert worker.cached(again) == CachedTokens(memory=69)
        assert worker.sink.ends[again.job_id].type == "finished"
        assert texts(worker, again.job_id) == texts(worker, first.job_id)


@pytest.mark.parametrize("source", ["memory", "disk", "in_flight"])
def test_where_cached_tokens_were_is_exported(
    start: Any,  # noqa: F811 - the fixture's value
    loaded_models: dict[str, LoadedModel],  # noqa: F811 - the fixture's value
    source: str,
) -> None:
    plain = loaded_models["plain"]
    first, second = (job(name, tokens(1, 200)) for name in ("first", "second"))
    worker = start(plain)
    if source == "in_flight":
        worker.run(first, second)
    else:
        worker.run(first)
        worker = start(plain) if source == "disk" else worker
        worker.run(second)
    text = generate_metrics(worker)

    expected = 199
    assert worker.cached(second) == CachedTokens(**{source: expected})
    assert f'headwater_cached_tokens_total{{source="{source}"}} {expected}.0' in text
    assert f"headwater_prompt_tokens_reused_total {expected}.0" in text
