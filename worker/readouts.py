"""What of the prompts of jobs is to be read, and the sequences of those that do nothing else."""

from headwater.schemas import GenerationJob, JobKind, Pooling

from .messages import Claim
from .sequence import Readout, Sequence


def readout_sequences(claim: Claim) -> list[Sequence]:
    """Return a sequence for each continuation of a scoring job, one for an embedding."""
    job = claim.job
    if job.kind is JobKind.SCORE:
        return [_scored(claim, number) for number in range(len(job.continuations))]
    last = len(job.prompt_token_ids) - 1
    # An average needs the states of all tokens, and caches hold none.
    first = last if job.pooling is Pooling.LAST else 0
    readout = Readout(first, pooling=job.pooling)
    return [Sequence(job, readout=readout, runs_alone=claim.strikes > 0)]


def prompt_readout(job: GenerationJob, num_told: int) -> Readout | None:
    """Return what is left to read for prompt logprobs when *num_told* of them are told."""
    targets = job.prompt_token_ids[num_told + 1 :]
    if job.prompt_logprobs is None or not targets:
        return None
    return Readout(num_told, targets, num_top=job.prompt_logprobs)


def _scored(claim: Claim, number: int) -> Sequence:
    job = claim.job
    targets = job.continuations[number]
    readout = Readout(len(job.prompt_token_ids) - 1, targets)
    # Each token tells how likely the next one is, so the last one need not be computed.
    tokens = (*job.prompt_token_ids, *targets[:-1])
    return Sequence(
        _with_prompt(job, tokens), number, readout=readout, runs_alone=claim.strikes > 0
    )


def _with_prompt(job: GenerationJob, tokens: tuple[int, ...]) -> GenerationJob:
    return job.model_copy(update={"prompt_token_ids": tokens})
