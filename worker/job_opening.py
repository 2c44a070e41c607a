"""Opening a claimed job: new sequences, or those of earlier attempts with their text rebuilt."""

from collections.abc import Collection
from typing import NamedTuple

from headwater.schemas import DeltaPart, JobKind, StreamMode

from .channel_family import ChannelFamily
from .grammars import Grammars
from .messages import Claim
from .readouts import prompt_readout, readout_sequences
from .sequence import Sequence
from .text import LogprobLog, PromptLog, SequenceText, TextDiverged, Vocabulary


class Opened(NamedTuple):
    """A job's choices, ready to run."""

    sequences: list[Sequence]
    texts: list[SequenceText]
    logprobs: list[LogprobLog | None]
    """For a job that asks for them."""
    prompt: PromptLog | None
    """Likewise, of the prompt; choice 0 reads it."""
    restart_reason: str | None
    """Why the published text can't be continued; readers must be told before new deltas."""


class JobOpener:
    """Makes a claim's sequences and texts; knows the model's vocabulary and sampler."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        eos_token_ids: Collection[int],
        sampler_version: int,
        vocab_size: int,
        grammars: Grammars,
        family: ChannelFamily | None = None,
    ) -> None:
        """*vocab_size* is the model's own, which may exceed the tokenizer's."""
        self._family = family
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._vocabulary = vocabulary
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sampler_version = sampler_version

    def open(self, claim: Claim) -> Opened:
        """Return the job's choices where the earlier attempts left them, or from the start.

        Raises JobRejected for a response format that can't be enforced.
        """
        if claim.job.kind is not JobKind.GENERATE:
            return self._read_off(claim)
        if not claim.history:
            return self._fresh(claim, None)
        if any(max(part.token_ids, default=0) >= self._vocab_size for part in claim.history):
            return self._fresh(claim, "another model drew the published tokens")
        if self._draws_differ(claim):
            return self._fresh(claim, "another sampler version drew the published tokens")
        try:
            opened = self._opened(claim, claim.history, None)
        except TextDiverged as error:
            return self._fresh(claim, str(error))
        if any(_breaks_format(sequence) for sequence in opened.sequences):
            return self._fresh(claim, "the published tokens do not keep to the response format")
        return opened

    def _read_off(self, claim: Claim) -> Opened:
        sequences = readout_sequences(claim)
        # They stay empty.
        texts = [SequenceText(self._vocabulary, each.job) for each in sequences]
        return Opened(sequences, texts, [None] * len(sequences), None, None)

    def _draws_differ(self, claim: Claim) -> bool:
        # Greedy rows draw nothing.
        is_sampled = claim.job.sampling.temperature > 0
        return is_sampled and claim.sampler_version not in (None, self._sampler_version)

    def _fresh(self, claim: Claim, restart_reason: str | None) -> Opened:
        return self._opened(claim, (), restart_reason)

    def _opened(
        self, claim: Claim, history: tuple[DeltaPart, ...], restart_reason: str | None
    ) -> Opened:
        choices = range(claim.job.sampling.n)
        opened = Opened(
            [self._sequence(claim, choice, _published(history, choice)) for choice in choices],
            [self._text(claim, history, choice) for choice in choices],
            [self._logprobs(claim, history, choice) for choice in choices],
            self._prompt(claim, history),
            restart_reason,
        )
        if opened.prompt is not None:
            opened.sequences[0].readout = prompt_readout(claim.job, opened.prompt.num_read)
        return opened

    def _sequence(self, claim: Claim, choice: int, output_token_ids: list[int]) -> Sequence:
        return Sequence(
            claim.job,
            choice,
            output_token_ids=output_token_ids,
            num_resumed_tokens=len(output_token_ids),
            constraint=self._grammars.start(claim.job) if claim.job.is_enforced else None,
            runs_alone=claim.strikes > 0,
        )

    def _text(self, claim: Claim, history: tuple[DeltaPart, ...], choice: int) -> SequenceText:
        return SequenceText.resume(
            self._vocabulary,
            claim.job,
            history,
            eos_token_ids=self._eos_token_ids,
            family=self._family,
            choice=choice,
        )

    def _logprobs(
        self, claim: Claim, history: tuple[DeltaPart, ...], choice: int
    ) -> LogprobLog | None:
        if claim.job.logprobs is None:
            return None
        log = LogprobLog(self._vocabulary, keeps_all=claim.job.stream is StreamMode.FINAL)
        log.resume(part for part in history if part.choice == choice)
        return log

    def _prompt(self, claim: Claim, history: tuple[DeltaPart, ...]) -> PromptLog | None:
        if claim.job.prompt_logprobs is None:
            return None
        log = PromptLog(self._vocabulary, claim.job.prompt_token_ids)
        log.resume(history)
        return log


def _published(history: tuple[DeltaPart, ...], choice: int) -> list[int]:
    parts = (part for part in history if part.choice == choice)
    return [token for part in parts for token in part.token_ids]


def _breaks_format(sequence: Sequence) -> bool:
    if sequence.constraint is None:
        return False
    return not any(sequence.constraint.allowed(sequence.output_token_ids))
