"""What marks a model's reasoning and tool calls, and what mlx-lm's parsers make of its calls."""

import json
import random

import pytest
from headwater.schemas import TokenizerFiles
from headwater.worker.channel_family import ChannelFamily, Mode, UnparsableCalls
from headwater.worker.engine.channel_families import infer_family
from headwater.worker.errors import StartupError
from headwater.worker.text import ChannelSplitter
from tokenizers import AddedToken, Tokenizer, models

QWEN = '{{"<tool_call>"}}{{ tool_call.name }}'
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"]


def infer(template: str | None = None, tokens=(), **settings) -> ChannelFamily | None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    config = settings.pop("config", {})
    files = TokenizerFiles(
        tokenizer=json.loads(tokenizer.to_str()), config=config, chat_template=template
    )
    return infer_family(files, tokenizer, **settings)


def split(family: ChannelFamily, text: str, *, start=Mode.CONTENT, tools=()) -> list[tuple]:
    splitter = ChannelSplitter(family, start=start, tools=tools)
    segments = [*splitter.push(text), *splitter.flush(is_complete=True)]
    return [
        (each.call.name, each.text)
        if each.call
        else ("reasoning" if each.is_reasoning else "content", each.text)
        for each in segments
        if each.text
    ]


def test_a_model_that_marks_nothing_has_no_family() -> None:
    assert infer("{{ messages }}") is None


def test_the_markers_are_those_of_the_vocabulary() -> None:
    family = infer(tokens=["<longcat_think>", "</longcat_think>"])

    assert split(family, "<longcat_think>a</longcat_think>b") == [
        ("reasoning", "a"),
        ("content", "b"),
    ]


def test_families_that_mlx_lm_does_not_infer_are_known() -> None:
    family = infer(tokens=["[THINK]", "[/THINK]"])

    assert split(family, "[THINK]a[/THINK]b") == [("reasoning", "a"), ("content", "b")]


def test_a_setting_wins_over_what_the_model_says() -> None:
    tokens = ["<think>", "</think>"]

    assert infer(tokens=tokens, reasoning="none") is None
    assert infer(tokens=tokens, reasoning="seed").markers == {"<seed:think>", "</seed:think>"}
    assert infer(QWEN, tool_parser="none") is None
    assert infer(tool_parser="gemma4").markers == {"<|tool_call>", "<tool_call|>"}


def test_the_parser_that_the_tokenizers_config_names_is_used() -> None:
    family = infer(config={"tool_parser_type": "longcat"})

    assert "<longcat_tool_call>" in family.markers


@pytest.mark.parametrize("setting", ["reasoning", "tool_parser"])
def test_an_unknown_name_says_which_are_known(setting: str) -> None:
    with pytest.raises(StartupError, match=r"no .*'qwne'.*auto, none, harmony"):
        infer(**{setting: "qwne"})


CALLS = {
    "json_tools": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "qwen3_coder": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "laguna": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "function_gemma": "<start_function_call>call:add{a:1}<end_function_call>",
    "longcat": "<longcat_tool_call>add<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>1</longcat_arg_value></longcat_tool_call>",
    "pythonic": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "minimax_m2": '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>',
    "minicpm5": '<function name="add"><param name="a">1</param></function>',
    "muse_spark": '<atem:function_calls><atem:invoke name="add"><atem:parameter name="a">1</atem:parameter></atem:invoke></atem:function_calls>',
}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
)


@pytest.mark.parametrize("parser", sorted(CALLS))
def test_every_parser_of_mlx_lm_gives_name_and_json_arguments(parser: str) -> None:
    family = infer(tool_parser=parser)

    (told,) = split(family, CALLS[parser], tools=TOOLS)

    assert told == ("add", '{"a": 1}')


def test_the_offered_tools_give_arguments_their_types() -> None:
    family = infer(tool_parser="qwen3_coder")

    assert split(family, CALLS["qwen3_coder"]) == [("add", '{"a": "1"}')]


def test_a_models_own_ids_of_calls_are_kept() -> None:
    family = infer(tool_parser="kimi_k2")
    splitter = ChannelSplitter(family)

    (segment,) = splitter.push(CALLS["kimi_k2"])

    assert segment.call.call_id == "functions.add:0"


@pytest.mark.parametrize("parser", sorted(CALLS))
def test_whatever_a_parser_makes_of_nonsense_the_text_is_not_lost(parser: str) -> None:
    family = infer(tool_parser=parser)
    (start,) = family.transitions[Mode.CONTENT].keys() - {
        marker for marker, mode in family.transitions[Mode.CONTENT].items() if mode is Mode.CONTENT
    }

    for text in ("", "\x00", "][", "{", "f(", "name: {" * 50):
        runs = split(family, f"a{start}{text}")
        told = "".join(run for _, run in runs)
        assert text in told or runs[-1][0] not in ("content", "reasoning")


def test_arguments_that_are_no_json_are_no_call() -> None:
    family = infer(tool_parser="pythonic")

    with pytest.raises(UnparsableCalls):
        family.parse_calls("[add(a={1, 2})]", ())


def test_a_header_announces_the_channel_of_a_harmony_message() -> None:
    family = infer(tokens=HARMONY)
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )

    assert split(family, text, start=Mode.HEADER) == [
        ("reasoning", "hm"),
        ("content", "Let me see."),
        ("add", '{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<|channel|>final <|constrain|>json<|message|>{}", [("content", "{}")]),
        (
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
            [("add", '{"a": 1}')],
        ),
        ("<|channel|>analysis<|message|>hm", [("reasoning", "hm")]),
        ("<|channel|>ana", []),
        ("plain text", [("content", "plain text")]),
        (
            "<|channel|>commentary to=functions.add<|message|>{oops",
            [("content", "<|channel|>commentary to=functions.add<|message|>{oops")],
        ),
    ],
)
def test_headers_of_every_form_are_understood_and_what_is_none_is_content(text, told) -> None:
    assert split(infer(tokens=HARMONY), text, start=Mode.HEADER) == told


def test_a_harmony_model_can_be_told_to_mark_nothing() -> None:
    assert infer(tokens=HARMONY, reasoning="none", tool_parser="none") is None
    with pytest.raises(StartupError, match="not differ"):
        infer(tokens=HARMONY, reasoning="none")


@pytest.mark.parametrize("parser", ["gemma4", "kimi_k3", "muse_spark"])
def test_a_call_too_long_for_its_parser_is_content(parser: str) -> None:
    family = infer(tool_parser=parser)
    text = CALLS[parser].replace("1", "1" * 40_000)

    assert split(family, text) == [("content", text)]


def test_a_json_call_may_be_long() -> None:
    family = infer(tool_parser="json_tools")
    arguments = '{"text": "' + "word " * 100_000 + '"}'
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'

    parts = split(family, text)
    assert {name for name, _ in parts} == {"write"}
    assert "".join(part for _, part in parts) == arguments


@pytest.mark.parametrize("parser", [*sorted(CALLS), "harmony"])
def test_every_family_tells_the_same_however_its_text_is_cut(parser: str) -> None:
    family = infer(tool_parser=parser) if parser != "harmony" else infer(tokens=HARMONY)
    whole = CALLS.get(parser, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}')
    fragments = [*sorted(family.markers), whole, "a ", "<", "{", '"x"', "assistant", "\n"]
    draw = random.Random(9)
    for _ in range(60):
        text = "".join(draw.choices(fragments, k=draw.randint(1, 9)))
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        start = draw.choice([Mode.CONTENT, Mode.REASONING])

        assert runs(family, pieces, start) == runs(family, list(text), start), text


def runs(family: ChannelFamily, pieces: list[str], start: Mode) -> list[tuple]:
    splitter = ChannelSplitter(family, start=start)
    segments = [segment for piece in pieces for segment in splitter.push(piece)]
    joined: list[tuple] = []
    for each in [*segments, *splitter.flush(is_complete=True)]:
        kind = (each.call, each.is_reasoning)
        if each.text and joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + each.text)
        elif each.text:
            joined.append((kind, each.text))
    return joined
