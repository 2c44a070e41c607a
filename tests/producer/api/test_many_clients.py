"""200 clients on one server; some drop off and come back, and none misses or repeats a thing."""

import asyncio
import json
import random
from typing import Any

import httpx2
import pytest
from headwater.producer.client import Producer, new_job

from .conftest import ALIAS, RunningApi

NUM_CLIENTS = 200
NUM_TOKENS = 24


async def read(http: httpx2.AsyncClient, job_id: str, rng: random.Random) -> list[int]:
    """Read a job's token ids, leaving now and then after a random event."""
    tokens: list[int] = []
    last_id: str | None = None
    while True:
        patience = rng.randrange(1, 12) if rng.random() < 0.5 else 10_000
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        async with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
            assert answer.status_code == 200
            new: list[int] = []
            event: dict[str, str] = {}
            async for line in answer.aiter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                    continue
                data = json.loads(event.get("data", "{}"))
                for part in data.get("parts", ()):
                    new += part["token_ids"]
                if "id" in event:
                    # What came before an id is only kept once the id is there.
                    tokens, new, last_id = tokens + new, [], event["id"]
                if data.get("type") == "finished":
                    return tokens
                assert data.get("type") != "error", data
                event = {}
                patience -= 1
                if patience == 0:
                    break


def test_every_client_gets_its_whole_text(api: RunningApi, producer: Producer) -> None:
    rng = random.Random(1)
    jobs = [
        new_job(
            ALIAS,
            [rng.randrange(256) for _ in range(8)],
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            sampling={"temperature": 1.0, "seed": number, "n": 1 + number % 2},
        )
        for number in range(NUM_CLIENTS)
    ]

    async def run() -> list[Any]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=api.url, timeout=120, limits=limits) as http:
            readers = [
                asyncio.create_task(read(http, job.job_id, random.Random(number)))
                for number, job in enumerate(jobs)
            ]
            return await asyncio.gather(*readers)

    job_ids = producer.submit_many(jobs)
    texts = asyncio.run(run())

    for job, job_id, tokens in zip(jobs, job_ids, texts, strict=True):
        choices = producer.result(job_id).choices.values()
        assert sorted(tokens) == sorted(t for choice in choices for t in choice.token_ids)
        assert len(tokens) == NUM_TOKENS * job.sampling.n
        if job.sampling.n == 1:
            assert tuple(tokens) == next(iter(choices)).token_ids


@pytest.mark.parametrize("num_clients", [20])
def test_a_broken_stream_of_openais_route_is_read_on_as_events(
    api: RunningApi, producer: Producer, num_clients: int
) -> None:
    body = {
        "model": ALIAS,
        "prompt": "Once",
        "max_tokens": 40,
        "ignore_eos": True,
        "stream": True,
        "cancel_on_disconnect": False,
    }

    async def run(number: int, http: httpx2.AsyncClient) -> tuple[str, str]:
        text, last_id, position = "", "", 0
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            job_id = answer.headers["X-Headwater-Job"]
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    position += 1
                    if position > number:
                        break
        path = f"/v1/jobs/{job_id}/events"
        rest = await http.get(path, headers={"Last-Event-ID": last_id})
        for line in rest.text.splitlines():
            if line.startswith("data: "):
                parts = json.loads(line.removeprefix("data: ")).get("parts", ())
                text += "".join(span["text"] for part in parts for span in part["text"])
        return job_id, text

    async def run_all() -> list[tuple[str, str]]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=api.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(run(number, http) for number in range(num_clients)))

    for job_id, text in asyncio.run(run_all()):
        assert text == producer.result(job_id).choices[0].text
