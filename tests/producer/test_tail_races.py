"""Readers beside writers that die, repeat themselves and take over: each character once."""

import random
import threading
from typing import Any

import pytest
from headwater.producer.client_queue import job_key
from headwater.producer.tail import Ended, Output, TailSettings, tail
from headwater.schemas import (
    ChoiceEnd,
    Delta,
    DeltaPart,
    EntryId,
    Event,
    Finished,
    FinishReason,
    Released,
    Started,
    TextSpan,
    Timings,
    Usage,
    scripts,
)
from redis import Redis

QUICK = TailSettings(block_ms=50, batch=3, outage_s=10.0)
TTL_MS = 60_000
FENCE = Started(worker_id="w", sampler_version=1)
FINISHED = Finished(
    choices=(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP),),
    usage=Usage(prompt_tokens=1, completion_tokens=1),
    timings=Timings(total_ms=1.0),
)


class Writer:
    """Publishes one text over several attempts, with the protocol's own scripts."""

    def __init__(self, url: str, job_id: str, text: str, dice: random.Random) -> None:
        self._redis = Redis.from_url(url)
        self._job_id, self._text, self._dice = job_id, text, dice

    def run(self) -> None:
        published = 0
        with self._redis:
            while published < len(self._text):
                # A new attempt knows what is published, or repeats some of it.
                published = self._attempt(max(0, published - self._dice.randrange(3)))
            attempt = self._begin()
            self._append(EntryId(attempt, 1), FINISHED)

    def _attempt(self, position: int) -> int:
        attempt, seq = self._begin(), 1
        while position < len(self._text) and self._dice.random() > 0.2:
            end = position + self._dice.randrange(1, 6)
            self._append(EntryId(attempt, seq), delta(position, self._text[position:end]))
            position, seq = min(end, len(self._text)), seq + 1
        if self._dice.random() < 0.3:
            self._append(EntryId(attempt, seq), Released(reason="drain"))
        return position

    def _begin(self) -> int:
        execution = f"{self._dice.random()}"
        for _ in range(self._dice.randrange(1, 3)):  # now and then its reply is lost
            reply = self._call(scripts.BEGIN, scripts.begin(self._job_id, execution, FENCE, TTL_MS))
        return int(reply[1])

    def _append(self, entry_id: EntryId, event: Event) -> None:
        for _ in range(self._dice.randrange(1, 3)):
            call = scripts.append([(self._job_id, entry_id, event)], TTL_MS)
            self._call(scripts.APPEND, call)

    def _call(self, source: str, call: scripts.ScriptCall) -> Any:
        return self._redis.eval(source, len(call.keys), *call.keys, *call.args)


def delta(start: int, text: str) -> Delta:
    span = TextSpan(text_start=start, text=text)
    part = DeltaPart(choice=0, start=start, token_ids=tuple(map(ord, text)), text=(span,))
    return Delta(parts=(part,))


def read_with_interruptions(redis: Redis, job_id: str, dice: random.Random) -> str:
    """Read a job, leaving and resuming after an entry at random; return what was shown."""
    shown, after = "", EntryId(0, 0)
    while True:
        patience = dice.randrange(1, 8)
        for item in tail(redis, job_id, after, QUICK):
            if isinstance(item, Ended):
                return shown
            if isinstance(item, Output):
                shown += "".join(span.text for span in item.text)
            after, patience = item.id, patience - 1
            if patience == 0:
                break


def run_round(redis: Redis, url: str, seed: int) -> None:
    dice = random.Random(seed)
    job_id = f"job{seed}"
    text = "".join(dice.choices("añ漢🙂 \n", k=dice.randrange(1, 80)))
    redis.hset(job_key(job_id), mapping={"status": "started", "origin": "q"})
    writer = threading.Thread(target=Writer(url, job_id, text, random.Random(seed)).run)
    writer.start()
    try:
        assert read_with_interruptions(redis, job_id, dice) == text, f"seed {seed}"
    finally:
        writer.join()


def test_readers_that_come_and_go_see_each_character_once(redis: Redis, redis_url: str) -> None:
    for seed in range(30):
        run_round(redis, redis_url, seed)


@pytest.mark.long
def test_readers_that_come_and_go_see_each_character_once_300_times(
    redis: Redis, redis_url: str
) -> None:
    for seed in range(300):
        run_round(redis, redis_url, seed)
