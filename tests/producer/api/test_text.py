"""OpenAI's text routes, through the official client."""

import json
from collections import defaultdict
from itertools import chain
from typing import Any

import httpx2
import openai
import pytest
from headwater.producer.client import Producer
from headwater.schemas import keys
from openai import OpenAI

from .conftest import ALIAS, parse_events

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {
    "model": ALIAS,
    "messages": MESSAGES,
    "max_tokens": 24,
    "seed": 7,
    "extra_body": {"ignore_eos": True},
}
TEXT: dict[str, Any] = {
    "model": ALIAS,
    "prompt": "Once upon a time",
    "max_tokens": 24,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def test_the_models_that_workers_announced_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [ALIAS]
    assert client.models.retrieve(ALIAS).id == ALIAS


def test_a_chat_is_answered(client: OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT)

    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert reply.model == ALIAS
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("[user]Hello[assistant]")
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, n=3)
    *chunks, last = client.chat.completions.create(
        **CHAT, n=3, stream=True, stream_options={"include_usage": True}
    )

    texts: defaultdict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    roles = defaultdict(list)
    for chunk in chunks:
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
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 72
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_a_stream_has_no_usage_unless_asked_for(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True))

    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_text_is_completed_alike_streamed_and_whole(client: OpenAI) -> None:
    whole = client.completions.create(**TEXT)
    chunks = client.completions.create(**TEXT, stream=True)

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_a_completion_without_max_tokens_gets_openais_sixteen(client: OpenAI) -> None:
    reply = client.completions.create(
        model=ALIAS, prompt="x", temperature=0, extra_body={"ignore_eos": True}
    )

    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_token_ids_are_a_prompt_as_good_as_their_text(client: OpenAI) -> None:
    text = client.completions.create(**TEXT)
    # The tiny model's tokens are bytes, numbered in the order of their letters.
    prompt_ids = [_token_id(letter) for letter in TEXT["prompt"]]

    ids = client.completions.create(**{**TEXT, "prompt": prompt_ids})

    assert ids.choices[0].text == text.choices[0].text


def _token_id(letter: str) -> int:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters.index("Ġ" if letter == " " else letter)


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_of_one_request_are_numbered_choices(client: OpenAI, stream: bool) -> None:
    prompts = ["Once", "upon", "a"]
    alone = [client.completions.create(**{**TEXT, "prompt": each}) for each in prompts]

    asked = {**TEXT, "prompt": prompts, "n": 2, "stream": stream}
    reply = client.completions.create(**asked)

    texts: defaultdict[int, str] = defaultdict(str)
    for part in reply if stream else [reply]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    expected = [one.choices[0].text for one in alone for _ in range(2)]
    assert [texts[index] for index in range(6)] == expected


def test_a_repeated_prompt_counts_as_cached(client: OpenAI) -> None:
    asked = {**TEXT, "prompt": "The same long beginning of a prompt. " * 4}
    client.completions.create(**asked)

    again = client.completions.create(**asked)

    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


@pytest.mark.parametrize("stop_form", [str, list])
def test_a_stop_string_ends_the_text_before_it(client: OpenAI, stop_form: type) -> None:
    text = client.completions.create(**TEXT).choices[0].text
    stop = text[5:7]

    reply = client.completions.create(**TEXT, stop=stop if stop_form is str else ["zzz", stop])

    assert reply.choices[0].text == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_text_and_another_one_another(client: OpenAI) -> None:
    texts = [
        client.chat.completions.create(**{**CHAT, "seed": seed}).choices[0].message.content
        for seed in (1, 1, 2)
    ]

    assert texts[0] == texts[1] != texts[2]


def test_fields_of_a_job_pass_by_their_own_names(client: OpenAI) -> None:
    greedy = client.completions.create(**TEXT)
    asked = {**TEXT, "temperature": 1.0, "extra_body": {"ignore_eos": True, "top_k": 1}}

    only_the_likeliest = client.completions.create(**asked)

    assert only_the_likeliest.choices[0].text == greedy.choices[0].text


def test_content_in_parts_and_the_developers_role_are_a_plain_chat(client: OpenAI) -> None:
    plain = [{"role": "system", "content": "Be\nbrief"}, {"role": "user", "content": "Hello"}]
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    modern = [{"role": "developer", "content": parts}, {"role": "user", "content": "Hello"}]

    replies = [
        client.chat.completions.create(**{**CHAT, "messages": messages})
        for messages in (plain, modern)
    ]

    assert replies[0].usage.prompt_tokens == replies[1].usage.prompt_tokens
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content


def test_a_final_assistant_message_is_continued(client: OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    body = {"ignore_eos": True, "continue_final_message": True}

    reply = client.chat.completions.create(**{**CHAT, "messages": messages, "extra_body": body})

    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("[user]Hello[assistant]Well,")


def test_the_reply_names_its_job(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)

    assert raw.parse().id == "chatcmpl-" + raw.headers["X-Headwater-Job"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_logprobs_are_of_every_token_with_the_likeliest_ones(
    client: OpenAI, stream: bool
) -> None:
    asked = {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 2, "stream": stream}
    reply = client.chat.completions.create(**asked)

    parts = [part.choices[0].logprobs for part in (reply if stream else [reply])]
    tokens = [token for part in parts if part is not None for token in part.content]
    assert len(tokens) == 24
    for token in tokens:
        assert token.logprob <= 0
        assert token.bytes
        assert token.top_logprobs[0].token == token.token  # greedy
        assert len(token.top_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_completions_logprobs_say_where_each_token_stands(client: OpenAI, stream: bool) -> None:
    asked = {**TEXT, "logprobs": 1, "stream": stream}
    reply = client.completions.create(**asked)

    tokens: list[str] = []
    for part in reply if stream else [reply]:
        told = part.choices[0].logprobs
        if told is not None:
            assert told.text_offset[0] == sum(map(len, tokens))
            tokens += told.tokens
            assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs)
    assert len(tokens) == 24


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"enum": [1, 22]}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("find", "add")
]
FORCED: dict[str, Any] = {
    "model": ALIAS,
    "messages": MESSAGES,
    "max_tokens": 200,
    "temperature": 0,
    "tools": TOOLS,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called(client: OpenAI, stream: bool) -> None:
    """A model of random weights writes one whole call of the tool, and nothing else."""
    choice: Any = {"type": "function", "function": {"name": "add"}}
    reply = client.chat.completions.create(**FORCED, tool_choice=choice, stream=stream)
    if not stream:
        (answer,) = reply.choices
        (call,) = answer.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
        assert answer.message.content is None
    else:
        choices = [chunk.choices[0] for chunk in reply]
        calls = [call for each in choices for call in each.delta.tool_calls or ()]
        name = calls[0].function.name
        arguments = "".join(call.function.arguments or "" for call in calls)
        reason = choices[-1].finish_reason
    assert name == "add"
    assert json.loads(arguments)["x"] in (1, 22)
    assert reason == "tool_calls"


def test_a_call_that_the_model_cannot_be_made_to_write_is_refused(
    client: OpenAI, idle: str, producer: Producer
) -> None:
    """The refusal is one of the request, and says what to do."""
    card = producer.models.card(idle).model_copy(update={"enforces_tool_calls": False})
    producer.redis.set(keys.model_card_key(idle), card.encode())
    with pytest.raises(openai.UnprocessableEntityError, match="leave tool_choice") as caught:
        client.chat.completions.create(**{**FORCED, "model": idle}, tool_choice="required")
    assert caught.value.code == "unsupported_tool_choice"


def test_a_tool_that_is_not_offered_cannot_be_forced(client: OpenAI) -> None:
    """The names that there are are told."""
    choice: Any = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.UnprocessableEntityError, match="'find', 'add'"):
        client.chat.completions.create(**FORCED, tool_choice=choice)


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_begins_with_the_prompt_and_its_logprobs(client: OpenAI, as_ids: bool) -> None:
    """What evaluation harnesses ask for: every token of the prompt in its place, then the rest."""
    plain = client.completions.create(**TEXT, logprobs=2)
    prompt: Any = TEXT["prompt"]
    if as_ids:
        prompt = [_token_id(letter) for letter in prompt]
    (choice,) = client.completions.create(
        **{**TEXT, "prompt": prompt}, logprobs=2, echo=True
    ).choices

    own = plain.choices[0].logprobs
    told = choice.logprobs
    assert own is not None
    assert told is not None
    length = len(TEXT["prompt"])
    assert choice.text == TEXT["prompt"] + plain.choices[0].text
    assert "".join(told.tokens[:length]) == TEXT["prompt"]
    assert told.tokens[length:] == own.tokens
    assert told.token_logprobs[0] is None
    assert all(value < 0 for value in told.token_logprobs[1:length])
    assert told.token_logprobs[length:] == pytest.approx(own.token_logprobs, abs=1e-4)
    assert told.text_offset[:length] == list(range(length))
    assert told.text_offset[length:] == [length + offset for offset in own.text_offset]
    assert told.top_logprobs[0] is None
    # Tokens that look alike share an entry there.
    assert {len(each) for each in told.top_logprobs[1:length]} <= {1, 2}


def test_many_prompts_and_choices_are_each_echoed(client: OpenAI) -> None:
    """Without logprobs it is the text alone."""
    prompts = ["Once", "upon"]
    asked = {**TEXT, "prompt": prompts, "temperature": 1, "seed": 3}
    plain = client.completions.create(**asked, n=2)
    reply = client.completions.create(**asked, n=2, echo=True)
    texts = [choice.text for choice in plain.choices]
    heads = [prompts[0]] * 2 + [prompts[1]] * 2
    expected = [head + text for head, text in zip(heads, texts, strict=True)]
    assert [choice.text for choice in reply.choices] == expected
    assert {choice.logprobs for choice in reply.choices} == {None}


def test_prompt_logprobs_come_as_vllm_gives_them(client: OpenAI) -> None:
    """In each choice of a completion, once for a chat; a map by token id for each position."""
    text = client.completions.create(
        **{**TEXT, "extra_body": {"ignore_eos": True, "prompt_logprobs": 1}}
    )
    (first, *others) = text.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    ids = [_token_id(letter) for letter in TEXT["prompt"][1:]]
    for token_id, position in zip(ids, others, strict=True):
        assert 1 <= len(position) <= 2
        assert position[str(token_id)]["logprob"] <= 0
        best = [each for each in position.values() if each["rank"] == 1]
        assert best[0]["logprob"] == max(each["logprob"] for each in position.values())

    chat = client.chat.completions.create(**{**CHAT, "extra_body": {"prompt_logprobs": 0}})
    told = chat.model_extra["prompt_logprobs"]
    assert len(told) == chat.usage.prompt_tokens
    assert [len(position) for position in told[1:]] == [1] * (len(told) - 1)


def rounded(value: Any) -> Any:
    """Return *value* with its numbers rounded: other batches add up in another order."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"logprobs": 0, "n": 2, "temperature": 1, "seed": 3},
        {"prompt": ["Once", "u"], "logprobs": 1},
        {"extra_body": {"ignore_eos": True, "prompt_logprobs": 1}, "logprobs": 1, "n": 2},
    ],
)
def test_a_streamed_echo_is_the_whole_one_in_pieces(client: OpenAI, fields: dict[str, Any]) -> None:
    """Text, logprobs with their places, vLLM's field and usage: all of it, in the same order."""
    asked = {**TEXT, **fields, "echo": True}
    whole = client.completions.create(**asked)
    *chunks, last = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )

    lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    for expected in whole.choices:
        choices = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert "".join(choice.text for choice in choices) == expected.text
        told = [choice.logprobs for choice in choices if choice.logprobs is not None]
        assert bool(told) == (expected.logprobs is not None) == ("logprobs" in fields)
        for name in lists if told else ():
            joined = [value for each in told for value in getattr(each, name)]
            assert rounded(joined) == rounded(getattr(expected.logprobs, name))
        vllms = [choice.model_extra.get("prompt_logprobs", ()) for choice in choices]
        told_vllms = rounded(list(chain(*vllms)))
        assert told_vllms == rounded(expected.model_extra.get("prompt_logprobs", []))
    prompt = fields.get("prompt", TEXT["prompt"])
    assert chunks[0].choices[0].text == (prompt if not told else prompt[0][0])
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_streamed_chat_tells_its_prompts_logprobs_before_its_text(client: OpenAI) -> None:
    """In pieces that together are the list of the whole reply."""
    asked = {**CHAT, "extra_body": {"ignore_eos": True, "prompt_logprobs": 1}}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))

    pieces = [chunk.model_extra.get("prompt_logprobs") for chunk in chunks]
    told = [piece for piece in pieces if piece is not None]
    assert rounded(list(chain(*told))) == rounded(whole.model_extra["prompt_logprobs"])
    assert None not in pieces[: len(told)]
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles == ["assistant", *[None] * (len(chunks) - 1)]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content


def test_an_echo_can_be_read_on_where_it_was_cut_off(client: OpenAI, http: httpx2.Client) -> None:
    """An event's id is an entry of which all before it is told: echo, then the text."""
    body = {key: value for key, value in TEXT.items() if key != "extra_body"}
    body |= {"ignore_eos": True, "echo": True, "logprobs": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        job_id = response.headers["X-Headwater-Job"]
        events = [event for event in parse_events(response.iter_lines()) if event.data != "[DONE]"]

    assert events[0].id is None
    texts = [json.loads(event.data)["choices"][0]["text"] for event in events]
    whole = client.completions.create(**TEXT, echo=True).choices[0].text
    assert "".join(texts) == whole
    known = [number for number, event in enumerate(events) if event.id is not None]
    assert len(known) > 2
    for last in known[:-1:4]:
        headers = {"Last-Event-ID": str(events[last].id)}
        with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
            rest = [json.loads(event.data) for event in parse_events(response.iter_lines())]
        parts = [part for each in rest for part in each.get("parts", ())]
        spans = [span["text"] for part in parts for span in part.get("text", ())]
        assert "".join(texts[: last + 1] + spans) == whole


def test_one_call_at_most_is_asked_for_as_openais_clients_do(client: OpenAI) -> None:
    """The field is taken with tool_choice auto; what it can't go with is named."""
    asked = {"model": ALIAS, "messages": MESSAGES, "max_tokens": 5, "tools": TOOLS}
    asked |= {"tool_choice": "auto", "parallel_tool_calls": False}
    reply = client.chat.completions.create(**asked)

    assert reply.choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.UnprocessableEntityError, match="parallel_tool_calls=false ends"):
        client.chat.completions.create(**asked, extra_body={"min_tokens": 2})
