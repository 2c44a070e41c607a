"""What a job must satisfy to run on this worker's model; the producer checked it too."""

from itertools import chain
from typing import NamedTuple

from headwater.schemas import GenerationJob, JobKind

from .errors import JobRejected


class ModelLimits(NamedTuple):
    """What the loaded model allows."""

    alias: str
    vocab_size: int
    context_length: int
    tokenizer_fingerprint: str
    adapters: tuple[str, ...] = ()
    """Aliases of its LoRA adapters."""


def check(job: GenerationJob, model: ModelLimits) -> None:
    """Raise JobRejected, with what to do about it, unless *job* can run on *model*."""
    if job.model != model.alias:
        raise JobRejected(
            "wrong_model", f"this worker serves {model.alias!r}, the job asks for {job.model!r}"
        )
    if job.adapter not in (None, *model.adapters):
        raise JobRejected(
            "unknown_adapter",
            f"this worker has no adapter {job.adapter!r}; it has:"
            f" {', '.join(model.adapters) or 'none'}",
        )
    if job.tokenizer_fingerprint not in (None, model.tokenizer_fingerprint):
        raise JobRejected(
            "tokenizer_mismatch",
            f"the prompt was tokenized with {job.tokenizer_fingerprint}, the model has"
            f" {model.tokenizer_fingerprint}; tokenize it again with the model's own tokenizer",
        )
    _check_token_ids("prompt_token_ids", max(job.prompt_token_ids), model)
    for field, token_ids in (
        ("continuations", tuple(chain.from_iterable(job.continuations))),
        ("stop_token_ids", job.stop_token_ids),
        ("sampling.bad_token_ids", job.sampling.bad_token_ids),
        ("sampling.logit_bias", tuple(job.sampling.logit_bias)),
    ):
        if token_ids:
            _check_token_ids(field, max(token_ids), model)
    _check_context(job, model)


def _check_context(job: GenerationJob, model: ModelLimits) -> None:
    if job.num_tokens_at_most <= model.context_length:
        return
    num_prompt_tokens = len(job.prompt_token_ids)
    if job.kind is JobKind.SCORE:
        raise JobRejected(
            "context_length_exceeded",
            f"{num_prompt_tokens} prompt tokens and the longest continuation exceed the model's"
            f" context of {model.context_length}; shorten either",
        )
    raise JobRejected(
        "context_length_exceeded",
        f"{num_prompt_tokens} prompt tokens + max_tokens {job.max_tokens} exceed the model's"
        f" context of {model.context_length}; shorten the prompt or lower max_tokens",
    )


def _check_token_ids(field: str, largest: int, model: ModelLimits) -> None:
    if largest >= model.vocab_size:
        raise JobRejected(
            "token_id_out_of_range",
            f"{field} holds {largest}; the vocabulary has {model.vocab_size} ids, from 0",
        )
