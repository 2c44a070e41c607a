"""A job's stream as the worker sees it: begin an attempt, read what is there, append."""

from enum import Enum, auto
from typing import Any, NamedTuple

from headwater.schemas import (
    FENCE_TYPES,
    Channel,
    Delta,
    DeltaPart,
    End,
    EntryId,
    Event,
    Fence,
    PromptPart,
    Released,
    Restarted,
    StreamEntry,
    TextSpan,
    decode_entry,
    keys,
    scripts,
)
from redis import Redis
from redis.exceptions import RedisError

from .redis_client import is_passing


class Begun(NamedTuple):
    """An attempt that is ours."""

    attempt: int
    at_ms: int
    """Redis' time of its fence."""


class Ended(NamedTuple):
    """The stream has an end already."""

    entry: StreamEntry


class Appended(Enum):
    """What became of an entry."""

    WRITTEN = auto()
    """It is there, by this call or by an earlier one whose reply was lost."""
    FENCED = auto()
    """A later attempt owns the stream."""
    GONE = auto()
    """There is no such stream any more."""
    LATER = auto()
    """The server can't now: the same entry again, later."""
    BEHIND = auto()
    """The stream does not end with this attempt's entry before it."""
    BROKEN = auto()
    """The key holds something that is no stream."""


class History(NamedTuple):
    """What a new attempt has to know of the ones before it."""

    parts: tuple[DeltaPart, ...]
    """Published since the last `restarted`, in order."""
    sampler_version: int | None
    first_started_ms: int
    strikes: int
    """Attempts in a row, before this one, that died without a new token.

    One whose worker only paused past its lease counts, too: nothing tells its heir a paused
    worker from a dead one, and the paused one is fenced when it wakes, so it can't write that it
    lives. Three such pauses in a row before a first token dead-letter a job that did no harm.
    """


class Tip(NamedTuple):
    """The last entry of a stream, whoever wrote it."""

    id: EntryId
    is_end: bool
    execution_id: str | None
    """Of the claimant whose fence it is."""


def read_tip(redis: Any, stream: str) -> Tip | None:
    """Read a stream's last entry; on a watching pipeline, at once."""
    found = redis.xrevrange(stream, count=1)
    if not found:
        return None
    entry_id, fields = found[0]
    execution = fields.get(b"execution")
    claimant = execution.decode("utf-8", "replace") if execution else None
    return Tip(EntryId.parse(entry_id), b"end" in fields, claimant)


class JobStreams:
    """The streams on one server. Not shared between threads."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._begin = redis.register_script(scripts.BEGIN)
        self._close = redis.register_script(scripts.CLOSE)
        self._append = redis.register_script(scripts.APPEND)

    def begin(self, job_id: str, execution_id: str, fence: Fence, ttl_ms: int) -> Begun | Ended:
        """Open an attempt, unless the stream has ended; may be repeated."""
        call = scripts.begin(job_id, execution_id, fence, ttl_ms)
        reply: Any = self._begin(keys=call.keys, args=call.args)
        if reply[0] == b"begun":
            return Begun(int(reply[1]), int(reply[2]))
        return Ended(self._entry(job_id, reply[1]))

    def close(self, job_id: str, end: End, ttl_ms: int) -> StreamEntry:
        """End a stream that no worker writes to; return its end, which may be an older one."""
        call = scripts.close(job_id, end, ttl_ms)
        reply: Any = self._close(keys=call.keys, args=call.args)
        return self._entry(job_id, reply)

    def read(self, job_id: str) -> list[StreamEntry]:
        """Return all entries; raises SchemaError for one that is none of ours."""
        found: Any = self.redis.xrange(keys.stream_key(job_id))
        return [decode_entry(entry_id, fields) for entry_id, fields in found]

    def has_strikes(self, job_id: str) -> bool:
        """Whether the newest attempt, if any, has neither told anything nor handed back."""
        # Its fence, where it told nothing: whatever it did tell comes after.
        tip = self.tip(job_id)
        return tip is not None and tip.execution_id is not None

    def tip(self, job_id: str) -> Tip | None:
        """Return what the last entry is; None when there is no stream."""
        return read_tip(self.redis, keys.stream_key(job_id))

    def append_all(self, entries: list[tuple[str, EntryId, Event]], ttl_ms: int) -> list[Appended]:
        """Append one entry each to several streams, (job id, entry id, event), in one trip.

        Raises RedisError when the trip itself fails: any of them may be written then.
        """
        call = scripts.append(entries, ttl_ms)
        replies: Any = self._append(keys=call.keys, args=call.args)
        pairs = zip(entries, replies, strict=True)
        return [_appended(entry_id, reply) for (_, entry_id, _), reply in pairs]

    def _entry(self, job_id: str, entry_id: bytes) -> StreamEntry:
        found: Any = self.redis.xrange(keys.stream_key(job_id), entry_id, entry_id)
        return decode_entry(*found[0])


class _Told:
    """How much of each choice was told, to leave out what an attempt told again.

    An attempt that lost its stream's tail to a fail-over tells all it has from the start; its
    readers drop what they know, and so do we.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}
        self._num_chars: dict[tuple[int, Channel, int | None], int] = {}
        self._prompt_end = 1

    def news(self, part: DeltaPart) -> DeltaPart | None:
        """Return *part* without what was told before; None when nothing is left."""
        known = self._num_tokens.get(part.choice, 0)
        num_old = min(len(part.token_ids), max(0, known - part.start))
        self._num_tokens[part.choice] = max(known, part.start + len(part.token_ids))
        text = tuple(new for span in part.text if (new := self._new_text(part.choice, span)))
        prompt = self._new_prompt(part.prompt)
        if num_old == len(part.token_ids) and not text and prompt is None:
            return None
        changes = {
            "start": part.start + num_old,
            "token_ids": part.token_ids[num_old:],
            "text": text,
            "logprobs": part.logprobs and part.logprobs[num_old:],
            "prompt": prompt,
        }
        return part.model_copy(update=changes)

    def _new_prompt(self, prompt: PromptPart | None) -> PromptPart | None:
        if prompt is None or prompt.end <= self._prompt_end:
            return None
        news = prompt.after(max(0, self._prompt_end - prompt.start))
        self._prompt_end = prompt.end
        return news

    def _new_text(self, choice: int, span: TextSpan) -> TextSpan | None:
        key = (choice, span.channel, span.index)
        known = self._num_chars.get(key, 0)
        num_old = min(len(span.text), max(0, known - span.text_start))
        self._num_chars[key] = max(known, span.text_start + len(span.text))
        if num_old == len(span.text):
            return None
        return span.after(num_old)


def history_of(entries: list[StreamEntry], attempt: int) -> History:
    """Return what the attempts before *attempt* left in *entries*."""
    parts: list[DeltaPart] = []
    told = _Told()
    sampler_version: int | None = None
    strikes = 0
    for entry in entries:
        event = entry.event
        if entry.id.attempt >= attempt:
            break
        if isinstance(event, Restarted):
            parts.clear()
            told = _Told()
        if isinstance(event, FENCE_TYPES) and entry.id.seq == 0:
            sampler_version = event.sampler_version
            strikes += 1
        elif isinstance(event, Released):
            strikes = 0
        elif isinstance(event, Delta):
            strikes = 0
            parts += [news for part in event.parts if (news := told.news(part)) is not None]
    first = next((entry.at_ms for entry in entries if entry.at_ms is not None), 0)
    return History(tuple(parts), sampler_version if parts else None, first, strikes)


def _appended(entry_id: EntryId, reply: Any) -> Appended:
    if isinstance(reply, RedisError):
        # What is wrong with one job must not end the others.
        return Appended.LATER if is_passing(reply) else Appended.BROKEN
    kind, last = reply
    if kind == b"written":
        return Appended.WRITTEN
    if kind == b"gone" or not last:
        return Appended.GONE
    last_id = EntryId.parse(last)
    if last_id == entry_id:
        return Appended.WRITTEN
    return Appended.FENCED if last_id.attempt > entry_id.attempt else Appended.BEHIND
