"""JobRun: one claimed job on its way through the engine: its sequences, their text, its end."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from headwater.schemas import (
    CachedTokens,
    ChoiceEnd,
    DeltaPart,
    Embedding,
    Finished,
    FinishReason,
    GenerationJob,
    JobKind,
    Score,
    StreamMode,
    Timings,
    Usage,
)

from .messages import Claim
from .sequence import Reading, Sequence
from .text import LogprobLog, PromptLog, SequenceText


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence and its text."""

    sequence: Sequence
    text: SequenceText
    logprobs: LogprobLog | None = None
    """For a job that asks for them."""
    prompt: PromptLog | None = None
    """For choice 0 of a job that asks for the prompt's logprobs."""
    reading: Reading | None = None
    """For a job that generates nothing."""
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None

    @property
    def is_open(self) -> bool:
        """Whether it still generates."""
        return self.finish_reason is None

    def take_part(self) -> DeltaPart | None:
        """Return what the choice gained since the last call; None if nothing."""
        part = self.text.take()
        prompt = self.prompt.take() if self.prompt is not None else None
        if part is None and prompt is None:
            return None
        if part is None:
            start = self.text.num_tokens
            return DeltaPart(choice=self.sequence.choice, start=start, token_ids=(), prompt=prompt)
        logprobs = self.logprobs.take() if self.logprobs is not None else None
        return part.model_copy(update={"logprobs": logprobs, "prompt": prompt})


@dataclass(slots=True, eq=False)
class JobRun:
    """Everything the engine thread knows of one claimed job."""

    claim: Claim
    choices: list[Choice]
    started_s: float
    """When the engine took the job, on the loop's clock."""
    checkpoint_due_s: float
    """When a `final` job next publishes its tokens, on the same clock."""
    deadline_s: float | None = None
    """When it must have ended, on the same clock."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached: CachedTokens = field(default_factory=CachedTokens)
    """Prompt tokens that were reused when the first new token came."""

    @property
    def job(self) -> GenerationJob:
        """What was asked for."""
        return self.claim.job

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were reused, wherever they came from."""
        return self.cached.memory + self.cached.disk + self.cached.in_flight

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return not any(choice.is_open for choice in self.choices)

    def open_choices(self) -> Iterator[Choice]:
        """Yield the choices that still run."""
        return (choice for choice in self.choices if choice.is_open)

    def is_overdue(self, now: float) -> bool:
        """Whether the job's deadline has passed."""
        return self.deadline_s is not None and now >= self.deadline_s

    def is_publish_due(self, now: float) -> bool:
        """Whether what is new should be published now, rather than with a later checkpoint."""
        return self.job.stream is StreamMode.DELTAS or now >= self.checkpoint_due_s

    def take_parts(self) -> list[DeltaPart]:
        """Return what each choice gained since the last call."""
        return [part for choice in self.choices if (part := choice.take_part()) is not None]

    def finished(self, now: float) -> Finished:
        """Return the end of a job whose choices have all ended; *now* is on the loop's clock."""
        first = self.first_token_s
        generates = self.job.kind is JobKind.GENERATE
        return Finished(
            choices=tuple(self._choice_end(choice) for choice in self.choices if generates),
            scores=self._scores(),
            embedding=self._embedding(),
            usage=Usage(
                prompt_tokens=len(self.job.prompt_token_ids),
                completion_tokens=sum(self._num_new_tokens(choice) for choice in self.choices),
                cached_tokens=self.num_cached_tokens,
                cached_from=self.cached,
                reasoning_tokens=sum(c.text.num_reasoning_tokens for c in self.choices),
            ),
            timings=Timings(
                queue_ms=self.claim.queue_ms,
                ttft_ms=None if first is None else (first - self.started_s) * 1e3,
                total_ms=(now - self.started_s) * 1e3,
            ),
            metadata=self.job.metadata,
        )

    def _num_new_tokens(self, choice: Choice) -> int:
        if self.job.continuations:
            return len(self.job.continuations[choice.sequence.choice])
        return len(choice.sequence.output_token_ids)

    def _scores(self) -> tuple[Score, ...]:
        readings = ((c.sequence.choice, c.reading) for c in self.choices)
        return tuple(
            Score(
                continuation=number,
                logprobs=reading.logprobs,
                is_greedy=reading.is_greedy,
            )
            for number, reading in readings
            if reading is not None and reading.logprobs
        )

    def _embedding(self) -> Embedding | None:
        vectors = (choice.reading.vector for choice in self.choices if choice.reading)
        return next((Embedding.of(vector) for vector in vectors if vector), None)

    def _choice_end(self, choice: Choice) -> ChoiceEnd:
        if choice.finish_reason is None:
            raise ValueError(f"choice {choice.sequence.choice} of {self.job.job_id} still runs")
        is_final = self.job.stream is StreamMode.FINAL
        return ChoiceEnd(
            choice=choice.sequence.choice,
            finish_reason=choice.finish_reason,
            matched_stop=choice.matched_stop,
            text=choice.text.whole_text if is_final else None,
            logprobs=choice.logprobs.whole if is_final and choice.logprobs else None,
            reasoning=(choice.text.whole_reasoning or None) if is_final else None,
            tool_calls=choice.text.tool_calls if is_final else (),
            incomplete_tool_calls=choice.text.incomplete_tool_calls,
        )
