"""The engine: launches forwards and sampling, and reads the tokens back a step later."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import mlx.core as mx

from ..errors import EngineUnsound, JobRejected, WorkerError
from ..sequence import PromptReading, Reading, ScheduledSequence, Sequence, TokenOutput
from .logprobs import LogprobBlock
from .prompt_reader import Pending, PromptReader
from .runner import CacheKind, DeviceSegment, ModelRunner, Padding, Segment
from .sampler import NO_TOKEN, NOT_FINITE, Sampler

_RECOMPUTE_CHUNK: Final = 512
_STEPS_BETWEEN_CLEARS: Final = 128
"""MLX keeps freed buffers by size; sizes that no longer occur would pile up."""


class NonFiniteLogits(WorkerError):
    """The model computed NaN or infinity for a row."""


class FailedRow(NamedTuple):
    """A sequence that can't go on, and why; the others of its step are unharmed.

    Its keys and values are gone or wrong: nothing of them may go into a prefix cache.
    """

    sequence: Sequence
    error: Exception


class StepResult(NamedTuple):
    """What one step gave."""

    outputs: list[TokenOutput]
    failed: list[FailedRow]
    readings: list[Reading | PromptReading]


class PendingStep:
    """A launched step; its tokens are on the device until read() asks for them."""

    def __init__(
        self,
        rows: tuple[Sequence, ...],
        tokens: mx.array | None,
        failed: Iterable[FailedRow] = (),
        logprobs: Iterable[LogprobBlock] = (),
        readings: Iterable[Pending] = (),
    ) -> None:
        self.rows = rows
        """The sequences that get a token."""
        self.tokens = tokens
        """Their tokens, (rows,) int32, perhaps not computed yet; None without rows."""
        self.logprobs = tuple(logprobs)
        """Of those rows that ask for them."""
        self.readings = tuple(readings)
        """Of prompts with a readout."""
        self._failed = list(failed)
        self._is_read = False

    @property
    def is_awaited(self) -> bool:
        """Whether a next step can't be launched before this one is read."""
        return any(row.constraint is not None for row in self.rows)

    @property
    def failed_sequences(self) -> set[Sequence]:
        """Sequences that failed before anything was launched for them; their rows are gone."""
        return {failed.sequence for failed in self._failed}

    def read(self) -> StepResult:
        """Wait for the tokens and append them to their sequences' outputs.

        A sequence that has finished in the meantime gets none. Raises EngineUnsound when the
        device failed: nothing computed since can be trusted. ValueError on a second call.
        """
        if self._is_read:
            raise ValueError("this step has been read")
        self._is_read = True
        result = StepResult([], self._failed, [])
        values = self._values()
        logprobs = {row: each for block in self.logprobs for row, each in block.read().items()}
        for sequence, token_id in zip(self.rows, values, strict=True):
            sequence.num_unread_tokens -= 1
            if sequence.is_finished:
                continue
            if token_id in (NOT_FINITE, NO_TOKEN):
                result.failed.append(FailedRow(sequence, _no_token(sequence, token_id)))
                continue
            sequence.output_token_ids.append(token_id)
            result.outputs.append(TokenOutput(sequence, token_id, logprobs.get(sequence)))
        self._read_readings(result)
        return result

    def _read_readings(self, result: StepResult) -> None:
        for pending in self.readings:
            sequence = pending.sequence
            if sequence.is_finished:
                continue
            try:
                reading = pending.read()
            except RuntimeError as error:
                raise EngineUnsound(f"the device failed to compute a step: {error}") from error
            if reading.is_finite:
                result.readings.append(reading)
            else:
                cause = NonFiniteLogits("what was read off the prompt is not finite")
                result.failed.append(FailedRow(sequence, cause))

    def _values(self) -> list[int]:
        if self.tokens is None:
            return []
        try:
            return self.tokens.tolist()  # type: ignore[return-value]  # int32, one dimension
        except RuntimeError as error:  # what MLX raises for a failed evaluation
            raise EngineUnsound(f"the device failed to compute a step: {error}") from error


class Engine:
    """Computes steps over rows. Lives on one thread, the one that loaded the model.

    The engine keeps the sequences' counts: attach() sets num_cached_tokens and
    num_computed_tokens, launch() advances num_computed_tokens and num_unread_tokens, and
    PendingStep.read() turns the unread token into an output token. It never touches a status.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._reader = PromptReader(runner, sampler.vocabulary_size)
        self._last = PendingStep((), None)
        self._failed: set[Sequence] = set()
        self._num_steps = 0

    @property
    def cache_kind(self) -> CacheKind:
        """What the model lets a prefix cache store."""
        return self._runner.cache_kind

    @property
    def nbytes(self) -> int:
        """Bytes held by the running rows, capacity included, shared prefixes excluded."""
        return self._runner.nbytes

    @property
    def padding(self) -> Padding | None:
        """What is padding, where the runner knows it."""
        return self._runner.padding

    @property
    def can_embed(self) -> bool:
        """Whether the model lets its last layer's states be read."""
        return self._runner.reads_states

    def attach(self, sequence: Sequence, prefix: Seq[Segment] = ()) -> None:
        """Give *sequence* a row that starts with *prefix*, adjacent segments from token 0."""
        self._runner.attach(sequence, prefix)
        self._reader.attach(sequence)
        self._failed.discard(sequence)
        num_tokens = sum(segment.num_tokens for segment in prefix)
        sequence.num_cached_tokens = sequence.num_computed_tokens = num_tokens

    def detach(self, sequence: Sequence) -> None:
        """Drop a row, also while a launched step still reads it; without a row do nothing."""
        self._runner.detach(sequence)
        self._reader.detach(sequence)
        self._failed.discard(sequence)

    def has_failed(self, sequence: Sequence) -> bool:
        """Whether a launch found that *sequence* can't be computed.

        Its row is gone: there is nothing to extract, and launches pass it over. True from
        that launch on, before its step is read, until detach() or a new attach().
        """
        return sequence in self._failed

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Copy a row's tokens [start, end), and its state at *end*, behind what is launched."""
        segment = self._runner.extract(sequence, start, end)
        _start(segment.arrays)
        return segment

    def rebase(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Note that *prefix* now holds the row's first tokens."""
        self._runner.rebase(sequence, prefix)

    def launch(self, prefill: Seq[ScheduledSequence], decode: Seq[Sequence]) -> PendingStep:
        """Compute chunks of *prefill* and one token of each of *decode*; return at once.

        A prefill row whose chunk is all that it has pending gets its next token, too. A row
        that makes the forward raise is found by running each alone and reported by read().
        Raises EngineUnsound when the engine can't compute even a row of its own.
        """
        if self._failed:
            prefill = [scheduled for scheduled in prefill if not self.has_failed(scheduled[0])]
            decode = [row for row in decode if not self.has_failed(row)]
        try:
            step = self._forward(prefill, decode)
        except Exception:  # a model may raise anything; see who is at fault
            step = self._forward_apart([*prefill, *(ScheduledSequence(row, 1) for row in decode)])
        _count(prefill, decode, step)
        self._last = step
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        return step

    def _forward(self, prefill: Seq[ScheduledSequence], decode: Seq[Sequence]) -> PendingStep:
        read = self._reader.compute(each for each in prefill if each[0].readout is not None)
        prefill = [each for each in prefill if each[0].readout is None]
        closed = [row for row, num_tokens in prefill if num_tokens == row.num_pending_tokens]
        known = [*(row for row, _ in read.closing), *closed]
        newest = [mx.array([_last_token(row) for row in known], dtype=mx.int32)]
        if decode:
            newest.append(self._inputs(decode))
        logits = [mx.stack([after for _, after in read.closing])] if read.closing else []
        logits += self._logits(prefill, decode, newest[-1])
        rows = [*known, *decode]
        state = self._runner.state([row for row, _ in prefill])
        if not rows:
            _start(state)
            return PendingStep((), None, readings=read.pending)
        together = _joined(logits)
        if any(row.constraint is not None for row in rows):
            # The device computes while the host finds out which tokens the grammars allow.
            _start([together, *state])
        tokens = self._sampler.sample(together, rows, _joined(newest))
        logprobs = LogprobBlock.of(together, tokens, rows)
        _start([tokens, *state, *(logprobs.arrays if logprobs else ())])
        blocks = [logprobs] if logprobs else ()
        return PendingStep(tuple(rows), tokens, logprobs=blocks, readings=read.pending)

    def _logits(
        self, prefill: Seq[ScheduledSequence], decode: Seq[Sequence], inputs: mx.array
    ) -> list[mx.array]:
        """Compute the chunks, and *inputs*, one token each of *decode*.

        Returns the logits after the prompts that end here, then those of *decode*, if any.
        """
        rows, chunks = [row for row, _ in prefill], [_chunk(each) for each in prefill]
        if not prefill:
            return [self._runner.decode(decode, inputs)] if decode else []
        if decode:
            logits = self._runner.prefill_and_decode(rows, chunks, decode, inputs)
        else:
            logits = self._runner.prefill(rows, chunks)
        wanted = [i for i, (row, num) in enumerate(prefill) if num == row.num_pending_tokens]
        wanted += range(len(prefill), len(prefill) + len(decode))
        if wanted and len(wanted) < logits.shape[0]:
            logits = logits[mx.array(wanted)]
        return [logits] if wanted else []

    def _inputs(self, decode: Seq[Sequence]) -> mx.array:
        """Return each row's last token, (rows,), from the last step where nobody has read it."""
        if all(row.num_unread_tokens for row in decode) and self._last.rows == tuple(decode):
            assert self._last.tokens is not None
            return self._last.tokens
        known = [0 if row.num_unread_tokens else _last_token(row) for row in decode]
        inputs = mx.array(known, dtype=mx.int32)
        unread = [index for index, row in enumerate(decode) if row.num_unread_tokens]
        if unread:
            place = {sequence: index for index, sequence in enumerate(self._last.rows)}
            assert self._last.tokens is not None
            source = mx.array([place[decode[index]] for index in unread])
            inputs[mx.array(unread)] = self._last.tokens[source]
        return inputs

    def _forward_apart(self, scheduled: Seq[ScheduledSequence]) -> PendingStep:
        """Run every row alone, after a forward over all of them has raised.

        That one may have written half of the layers, so each row is computed anew.
        """
        done: list[PendingStep] = []
        failed: list[FailedRow] = []
        for sequence, num_tokens in scheduled:
            try:
                done.append(self._forward_anew(sequence, num_tokens))
            except Exception as error:  # it is reported, and its row goes
                failed.append(FailedRow(sequence, error))
                self._runner.detach(sequence)
                self._failed.add(sequence)
        if failed and not done:
            self._check_soundness(scheduled[0].sequence, failed[0].error)
        rows = tuple(row for step in done for row in step.rows)
        tokens = [step.tokens for step in done if step.tokens is not None]
        logprobs = [block for step in done for block in step.logprobs]
        readings = [reading for step in done for reading in step.readings]
        return PendingStep(rows, _joined(tokens) if tokens else None, failed, logprobs, readings)

    def _forward_anew(self, sequence: Sequence, num_tokens: int) -> PendingStep:
        self._runner.detach(sequence)
        self._runner.attach(sequence, ())
        self._reader.attach(sequence)
        for start in range(0, sequence.num_computed_tokens, _RECOMPUTE_CHUNK):
            end = min(start + _RECOMPUTE_CHUNK, sequence.num_computed_tokens)
            if sequence.ends_with_prompt:
                self._reader.compute_spans([(sequence, start, end - start)])
            else:
                self._runner.prefill([sequence], [sequence.tokens(start, end)])
            mx.eval(self._runner.state([sequence]))
        if sequence.num_unread_tokens:
            return self._forward([], [sequence])
        return self._forward([ScheduledSequence(sequence, num_tokens)], [])

    def _check_soundness(self, sequence: Sequence, cause: Exception) -> None:
        """Compute one token in a fresh row; if that fails, no job is to blame."""
        probe = Sequence(sequence.job)
        try:
            self._runner.attach(probe, ())
            mx.eval(self._runner.prefill([probe], [[0]]))
        except Exception as error:
            raise EngineUnsound(f"no row can be computed any more: {error}") from cause
        finally:
            self._runner.detach(probe)


def _count(prefill: Seq[ScheduledSequence], decode: Seq[Sequence], step: PendingStep) -> None:
    """Note what a launched step computes; rows that failed stay where they were."""
    failed = step.failed_sequences
    for sequence, num_tokens in prefill:
        sequence.num_computed_tokens += 0 if sequence in failed else num_tokens
    for sequence in decode:
        sequence.num_computed_tokens += 0 if sequence in failed else 1
    for sequence in step.rows:
        sequence.num_unread_tokens += 1


def _no_token(sequence: Sequence, mark: int) -> Exception:
    if mark == NOT_FINITE:
        return NonFiniteLogits(f"logits of token {sequence.num_tokens} are not finite")
    reason = sequence.constraint.error() if sequence.constraint else None
    if reason is not None:
        return JobRejected("bad_response_format", f"the response format failed: {reason}")
    return JobRejected(
        "no_token_allowed",
        f"every token is ruled out at output token {len(sequence.output_token_ids)}; ask for"
        " fewer bad_token_ids or a lower min_tokens",
    )


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _start(arrays: list[mx.array]) -> None:
    """Let the device begin; whoever reads one of *arrays* waits for it."""
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def _chunk(scheduled: ScheduledSequence) -> list[int]:
    start = scheduled.sequence.num_computed_tokens
    return scheduled.sequence.tokens(start, start + scheduled.num_tokens)


def _last_token(sequence: Sequence) -> int:
    return sequence.tokens(sequence.num_known_tokens - 1, sequence.num_known_tokens)[0]
