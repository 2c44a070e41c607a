import json
from pathlib import Path
from typing import Any

import pytest
from headwater.producer.errors import TokenizationError
from headwater.producer.tokenization import Tokenizer
from headwater.schemas import TokenizerFiles
from headwater.worker.engine.demo_model import fetch_demo
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|header|>"]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {%- if message.role not in ('system', 'user', 'assistant') %}\n"
    "        {{- raise_exception('roles are system, user, assistant') }}\n"
    "    {%- endif %}\n"
    "<|header|>{{ message.role }}\n\n{{ message.content | trim }}{{ eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}<|header|>assistant\n\n{%- endif %}"
)
WITH_TOOLS = (
    "{%- if tools %}Tools:\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{{ tool | tojson(indent=2) }}\n{% endfor %}{%- endif %}"
    "{%- for document in documents or [] %}[{{ document.title }}] {{ document.text }}\n{% endfor %}"
    "{%- set state = namespace(turn=0) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'skip' %}{% continue %}{% endif %}"
    "{%- set state.turn = state.turn + 1 %}"
    "{{ state.turn }} {{ message.role }}: "
    "{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{% generation %}{{ message.content }}{% endgeneration %}\n"
    "{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{%- if state.turn > 3 %}{% break %}{% endif %}"
    "{% endfor %}{{ dict(a=1) | tojson }}{{ '<think>' if enable_thinking else '' }}"
)
NONE_AND_TRIM = (
    "{% for message in messages %}\n"
    "  {% if 'name' in message %}\n{{ message.name }}:\n  {% endif %}\n"
    "{{ message.content }}\n"
    "{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "bos": WITH_BOS, "tools": WITH_TOOLS, "trim": NONE_AND_TRIM}

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "x": "<a & 'b'> é"}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [{"role": "system", "content": " Sé brève \n"}, {"role": "user", "content": "hi 🙂"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "why", "name": None},
        {"role": "user", "content": "<|im_start|>not a marker</s>"},
    ],
    "empty": [{"role": "user", "content": ""}],
}


def fast_tokenizer(*, adds_bos: bool = True) -> FastTokenizer:
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("e", "r")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def files(template: str | None = CHATML, *, adds_bos: bool = True, **config: Any) -> TokenizerFiles:
    return TokenizerFiles(
        tokenizer=json.loads(fast_tokenizer(adds_bos=adds_bos).to_str()),
        config={
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "__type": "AddedToken"},
            "unk_token": "<unk>",
            **config,
        },
        chat_template=template,
    )


def reference(template: str) -> TokenizerWrapper:
    """Return what mlx-lm makes of the same files."""
    return TokenizerWrapper(
        PreTrainedTokenizerFast(
            tokenizer_object=fast_tokenizer(),
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            chat_template=template,
        )
    )


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [TOOL], "enable_thinking": True},
        {"add_generation_prompt": True, "documents": [{"title": "t", "text": "<b>"}]},
    ],
    ids=["prompt", "no prompt", "tools", "documents"],
)
def test_a_chat_gives_the_ids_that_mlx_lm_gives(
    template: str, chat: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    expected = reference(template).apply_chat_template(chat, return_dict=False, **options)

    assert Tokenizer(files(template)).encode_chat(chat, **options) == expected


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (CHATML, "The answer is"),
        (CHATML, "The answer is "),
        (CHATML, [{"type": "text", "text": "The"}, {"type": "image"}]),
        (WITH_BOS, "The answer is"),
        (WITH_BOS, "The answer is "),
        (NONE_AND_TRIM, "The answer is "),
    ],
)
def test_a_final_message_is_continued_as_mlx_lm_does(template: str, content: Any) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}

    expected = reference(template).apply_chat_template(chat, return_dict=False, **options)

    assert Tokenizer(files(template)).encode_chat(chat, **options) == expected


def test_the_first_token_is_put_first_once() -> None:
    tokenizer = Tokenizer(files())

    assert tokenizer.encode("the")[0] == 0
    assert tokenizer.encode("<s>the") == tokenizer.encode("the")


def test_a_tokenizer_that_adds_no_first_token_gets_none() -> None:
    assert Tokenizer(files(adds_bos=False)).encode("the")[0] != 0


def test_a_template_that_writes_the_first_token_is_not_given_another() -> None:
    ids = Tokenizer(files(WITH_BOS)).encode_chat(CHATS["one turn"])

    assert ids.count(0) == 1


@pytest.mark.parametrize("text", ["", "the", "é🙂", "<s>", "<s><s>x", " <s>x", "</s>"])
def test_plain_text_gives_the_ids_that_mlx_lm_gives(text: str) -> None:
    theirs = reference(CHATML)
    add_special = theirs.bos_token is None or not text.startswith(theirs.bos_token)

    assert Tokenizer(files()).encode(text) == theirs.encode(text, add_special_tokens=add_special)


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (WITH_BOS, [{"role": "tool", "content": "x"}], "roles are system, user, assistant"),
        (CHATML, [], "at least one message"),
        (CHATML, ["text"], "must be an object"),
        ("{% if %}", [{"role": "user", "content": "x"}], "damaged"),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}], "refuses"),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            [{"role": "user", "content": "x"}],
            "refuses",
        ),
        ("{% set n = namespace(_x=1) %}", [{"role": "user", "content": "x"}], "refuses"),
        (CHATML, [{"role": "user", "content": object()}], "JSON values"),
    ],
)
def test_what_a_template_refuses_is_a_clear_error(template: str, chat: Any, message: str) -> None:
    with pytest.raises(TokenizationError, match=message):
        Tokenizer(files(template)).encode_chat(chat)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(TokenizationError, match="plain prompt"):
        Tokenizer(files(None)).encode_chat(CHATS["one turn"])


def test_of_several_templates_the_one_for_tools_is_taken_with_tools() -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    tokenizer = Tokenizer(files(None, chat_template=named))

    plain, tools = (tokenizer.encode_chat(CHATS["one turn"], tools=t) for t in (None, [TOOL]))
    assert plain == tokenizer.encode("plain")[1:]
    assert tools == tokenizer.encode("with tools")[1:]


def test_a_directory_is_read_with_the_template_of_its_own_file(tmp_path: Path) -> None:
    source = files("in the config")
    (tmp_path / "tokenizer.json").write_text(json.dumps(source.tokenizer))
    config = source.config | {"chat_template": "in the config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    in_config = Tokenizer.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("in its own file")
    in_file = Tokenizer.from_directory(tmp_path)

    assert in_config.files.chat_template == "in the config"
    assert in_file.files.chat_template == "in its own file"
    assert in_file.fingerprint == in_config.fingerprint == source.fingerprint


@pytest.mark.parametrize("content", [None, "not json", "[1]", "{}", '{"model": {"type": "No"}}'])
def test_a_directory_without_a_usable_tokenizer_is_a_clear_error(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(TokenizationError):
        Tokenizer.from_directory(tmp_path)


def test_what_the_file_says_about_cutting_batches_does_not_cut_a_prompt() -> None:
    fast = fast_tokenizer()
    fast.enable_truncation(3)
    fast.enable_padding(length=50)
    cut = files().model_copy(update={"tokenizer": json.loads(fast.to_str())})

    assert Tokenizer(cut).encode("a long prompt") == Tokenizer(files()).encode("a long prompt")
    assert cut.fingerprint == files().fingerprint


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"bos_token": "<s>", "extra_special_tokens": {"image_token": "<|header|>"}}, {}),
        ({"bos_token": "<s>", "image_token": "<|header|>"}, {}),
        ({"bos_token": None}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
        ({}, {"bos_token": "<s>", "eos_token": "</s>"}),
    ],
)
def test_special_tokens_are_found_wherever_mlx_lm_finds_them(
    tmp_path: Path, config: dict[str, Any], tokens: dict[str, Any]
) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ messages[0].content }}"
    written = {
        "tokenizer.json": files().tokenizer,
        "tokenizer_config.json": config | {"chat_template": template},
        "special_tokens_map.json": tokens,
        "config.json": {"model_type": "llama"},
    }
    for name, value in written.items():
        (tmp_path / name).write_text(json.dumps(value))

    ours, theirs = Tokenizer.from_directory(tmp_path), load_tokenizer(tmp_path)

    chat = CHATS["one turn"]
    assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, return_dict=False)


@pytest.fixture(scope="module")
def demo() -> tuple[Tokenizer, Any]:
    """Ours and mlx-lm's tokenizer of the demo model (SmolLM2)."""
    directory = fetch_demo()
    return Tokenizer.from_directory(directory), load_tokenizer(directory)


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_the_demo_models_chats_are_tokenized_as_by_mlx_lm(
    demo: tuple[Tokenizer, Any], chat: list[dict[str, Any]]
) -> None:
    ours, theirs = demo

    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat) == expected


@pytest.mark.parametrize("text", ["Once upon a time", " 12 漢字 🙂\n", "<|im_start|>x", "a" * 5000])
def test_the_demo_models_plain_prompts_are_tokenized_as_by_mlx_lm(
    demo: tuple[Tokenizer, Any], text: str
) -> None:
    ours, theirs = demo
    add_special = theirs.bos_token is None or not text.startswith(theirs.bos_token)

    assert ours.encode(text) == theirs.encode(text, add_special_tokens=add_special)
