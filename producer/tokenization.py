"""Tokenizer: text and chat messages to the token ids that mlx-lm would make of them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import orjson
from headwater.schemas import SchemaError, TokenizerFiles
from tokenizers import Tokenizer as FastTokenizer

from . import chat_template
from .errors import TokenizationError


class Tokenizer:
    """A model's tokenizer and chat template. Safe to share between threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Build from *files*; raises TokenizationError when they are no tokenizer."""
        self.files = files
        try:
            self._fast = FastTokenizer.from_str(orjson.dumps(files.tokenizer).decode())
        except Exception as error:  # The library raises nothing more exact.
            raise TokenizationError(f"not a tokenizer: {error}") from error
        # What a file says about cutting and padding batches is not for prompts.
        self._fast.no_truncation()
        self._fast.no_padding()

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self:
        """Read tokenizer.json and its companions; raises TokenizationError."""
        try:
            return cls(TokenizerFiles.read(Path(directory)))
        except SchemaError as error:
            raise TokenizationError(str(error)) from error

    @property
    def fingerprint(self) -> str:
        """What tells this tokenizer from others."""
        return self.files.fingerprint

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt.

        The begin-of-sequence token is put first where the tokenizer does so, unless the text
        starts with it already.
        """
        bos = self._special_tokens.get("bos_token")
        has_bos = bos is not None and text.startswith(bos)
        return self._encode(text, add_special_tokens=not has_bos)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that follows others: no special token is added."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special ones by name."""
        return self._fast.decode(list(token_ids), skip_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of chat *messages*; raises TokenizationError.

        The template writes every special token itself, so none is added. Arguments are those of
        chat_template.render.
        """
        text = chat_template.render(
            self._template(has_tools=tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            **{**self._special_tokens, **variables},
        )
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise TokenizationError(f"not a text that can be tokenized: {error}") from error
        return list(encoding.ids)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        # Models name tokens of their own beside the usual ones: image_token, ...
        config = self.files.config
        extra = config.get("extra_special_tokens")
        named = {**config, **(extra if isinstance(extra, dict) else {})}
        found = {name: _token_text(value) for name, value in named.items()}
        return {
            name: text
            for name, text in found.items()
            if name.endswith("_token") and text is not None
        }

    def _template(self, *, has_tools: bool) -> str:
        template = self.files.chat_template or self.files.config.get("chat_template")
        if isinstance(template, list):
            template = _choose_template(template, has_tools=has_tools)
        if not isinstance(template, str):
            raise TokenizationError("this model has no chat template: give a plain prompt")
        return template


def _token_text(token: Any) -> str | None:
    # Added tokens stand in the config as objects, with their text as `content`.
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _choose_template(named: list[Any], *, has_tools: bool) -> Any:
    by_name = {
        item["name"]: item["template"]
        for item in named
        if isinstance(item, dict) and {"name", "template"} <= item.keys()
    }
    wanted = "tool_use" if has_tools and "tool_use" in by_name else "default"
    return by_name.get(wanted)
