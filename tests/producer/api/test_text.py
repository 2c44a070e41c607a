"""OpenAI's text routes, through the official client."""

from collections import defaultdict
from typing import Any

from openai import OpenAI

from .conftest import ALIAS

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


def test_the_models_that_workers_announced_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [ALIAS]
    assert client.models.retrieve(ALIAS).id == ALIAS


def test_a_chat_is_answered(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=ALIAS, messages=MESSAGES, max_tokens=8, temperature=0
    )

    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("[user]Hello[assistant]")
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": ALIAS,
        "messages": MESSAGES,
        "max_completion_tokens": 40,
        "seed": 7,
        "n": 3,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )

    texts: defaultdict[int, str] = defaultdict(str)
    ends = {}
    roles = defaultdict(list)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert chunk.usage is None
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles[choice.index].append(choice.delta.role)
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert roles == {0: ["assistant"], 1: ["assistant"], 2: ["assistant"]}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 120
    assert len({chunk.id for chunk in chunks}) == 1
