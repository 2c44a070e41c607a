"""Families of models for the tests of channels, as a worker would infer them."""

import json

from headwater.worker.channel_family import ChannelFamily, Mode, ParsedCall, UnparsableCalls

THINK = {"<think>": Mode.REASONING}
UNTHINK = {"</think>": Mode.CONTENT}
CALL = {"<tool_call>": Mode.TOOL_CALLS}
UNCALL = {"</tool_call>": Mode.CONTENT}


def parse_json(text, tools) -> list[ParsedCall]:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnparsableCalls(str(error)) from error
    if not isinstance(name, str):
        raise UnparsableCalls("a name is a string")
    return [ParsedCall(name, json.dumps(arguments))]


def parse_words(text, tools) -> list[ParsedCall]:
    """Several calls of one text: `name=value; name=value`."""
    pairs = [pair.strip().partition("=") for pair in text.split(";")]
    if not all(name and equals for name, equals, _ in pairs):
        raise UnparsableCalls(text)
    return [ParsedCall(name, json.dumps({"v": value})) for name, _, value in pairs]


def family(parse=parse_json, *, has_json_calls: bool = True, uncall=UNCALL) -> ChannelFamily:
    return ChannelFamily(
        {
            Mode.CONTENT: THINK | CALL,
            Mode.REASONING: UNTHINK | CALL,
            Mode.TOOL_CALLS: uncall,
        },
        parse_calls=parse,
        has_json_calls=has_json_calls,
    )


JSON_CALLS = family()
WORD_CALLS = family(parse_words, has_json_calls=False)
ENDLESS_CALLS = family(parse_words, has_json_calls=False, uncall={})
