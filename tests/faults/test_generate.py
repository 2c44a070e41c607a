"""The library's generate and agenerate on a real worker with a tiny model."""

import asyncio
import itertools
from contextlib import aclosing

import pytest
from headwater.producer.client import Producer
from headwater.producer.generate import GenerateOptions, agenerate, generate

from .conftest import ALIAS, StartWorker


@pytest.fixture
def url(start_worker: StartWorker, producer: Producer) -> str:
    """A server with a worker."""
    start_worker()
    return f"redis://127.0.0.1:{producer.redis.connection_pool.connection_kwargs['port']}/0"


def test_prompts_come_back_in_order_each_with_its_own_end(url: str) -> None:
    prompts = ["hello", [1, 2, 3], [], "\ud800", "hello", [{"role": "user", "content": "x"}]]

    found = list(generate(prompts, model=ALIAS, redis=url, max_tokens=5, ignore_eos=True))

    assert [each.index for each in found] == list(range(6))
    assert [each.usage and each.usage.completion_tokens for each in found] == [
        5, 5, None, None, 5, None,
    ]  # fmt: skip
    assert found[0].text == found[4].text
    assert "surrogates" in (found[3].error or "")
    assert "chat template" in (found[5].error or "")
    with pytest.raises(ValueError, match="prompt"):
        _ = found[2].text


def test_many_choices_and_any_order(url: str) -> None:
    options = GenerateOptions(ordered=False, window=4, outstanding=4)
    prompts = [f"prompt {number}" for number in range(20)]
    drawn = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 4, "ignore_eos": True}

    first = list(generate(prompts, model=ALIAS, redis=url, options=options, **drawn))
    second = list(generate(prompts, model=ALIAS, redis=url, options=options, **drawn))

    assert sorted(each.index for each in first) == list(range(20))
    assert {len(each.choices) for each in first} == {2}
    by_index = {each.index: [c.token_ids for c in each.choices] for each in second}
    assert all([c.token_ids for c in each.choices] == by_index[each.index] for each in first)


def test_an_endless_iterator_is_read_a_little_ahead_and_left_cleanly(
    url: str, producer: Producer
) -> None:
    numbers = itertools.count()
    options = GenerateOptions(window=8, outstanding=8)
    texts = generate(
        (f"prompt {number}" for number in numbers),
        model=ALIAS, redis=url, options=options, max_tokens=4, ignore_eos=True,
    )  # fmt: skip

    taken = [next(texts).index for _ in range(20)]
    texts.close()

    assert taken == list(range(20))
    assert next(numbers) < 80
    assert producer.redis.llen(f"rq:queue:{ALIAS}.low.default") == 0


def test_the_async_twin_gives_the_same_and_can_be_left(url: str) -> None:
    prompts = [f"prompt {number}" for number in range(30)]
    options = GenerateOptions(window=8, outstanding=8)
    drawn = {"max_tokens": 4, "ignore_eos": True}

    async def both() -> tuple[list[str], list[str]]:
        whole = [
            each.text
            async for each in agenerate(prompts, model=ALIAS, redis=url, options=options, **drawn)
        ]
        part = []
        async with aclosing(
            agenerate(prompts, model=ALIAS, redis=url, options=options, **drawn)
        ) as items:
            async for each in items:
                part.append(each.text)
                if len(part) == 5:
                    break
        return whole, part

    whole, part = asyncio.run(both())

    expected = generate(prompts, model=ALIAS, redis=url, **drawn)
    assert whole == [each.text for each in expected]
    assert part == whole[:5]
