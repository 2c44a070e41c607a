"""TokenizerFiles: a model's tokenizer as it travels, so that any producer can tokenize."""

import hashlib
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import Field

from . import limits
from .base import WireModel
from .errors import SchemaError

_NOT_PART_OF_THE_IDENTITY = ("truncation", "padding")
"""Sections of tokenizer.json that say how to cut batches, not how to tokenize."""


class TokenizerFiles(WireModel):
    """The files of a tokenizer: enough to encode, to decode and to apply the chat template."""

    tokenizer: dict[str, Any]
    """tokenizer.json, parsed."""
    config: dict[str, Any] = Field(default_factory=dict)
    """tokenizer_config.json, parsed."""
    chat_template: str | None = None
    """The Jinja template; from a file of its own or from the config."""

    @cached_property
    def fingerprint(self) -> str:
        """Return what tells tokenizers apart: a hash of tokenizer.json, key order ignored."""
        kept = {k: v for k, v in self.tokenizer.items() if k not in _NOT_PART_OF_THE_IDENTITY}
        canonical = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)
        return "sha256:" + hashlib.sha256(canonical).hexdigest()

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a model directory's tokenizer; raises SchemaError that names the file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SchemaError(f"no tokenizer.json in {directory}")
        template_path = directory / "chat_template.jinja"
        config_path = directory / "tokenizer_config.json"
        config = _read_json(config_path) if config_path.is_file() else {}
        # Older models name their special tokens in a file apart.
        map_path = directory / "special_tokens_map.json"
        tokens = _read_json(map_path) if map_path.is_file() else {}
        config |= {name: token for name, token in tokens.items() if config.get(name) is None}
        if template_path.is_file():
            template: Any = template_path.read_text("utf-8")
        else:
            template = config.get("chat_template")
        return cls(
            tokenizer=_read_json(path),
            config=config,
            # Several named templates stay in the config.
            chat_template=template if isinstance(template, str) else None,
        )

    def compress(self) -> bytes:
        """Return the form that lies in Redis."""
        return zlib.compress(self.encode(), level=6)

    @classmethod
    def decompress(cls, data: bytes) -> Self:
        """Parse what compress() gave, inflating a bounded number of bytes; raises SchemaError."""
        inflater = zlib.decompressobj()
        try:
            raw = inflater.decompress(data, limits.MAX_TOKENIZER_BYTES)
        except zlib.error as error:
            raise SchemaError(f"tokenizer files are damaged: {error}") from error
        if not inflater.eof:
            raise SchemaError(
                f"tokenizer files are cut short or above {limits.MAX_TOKENIZER_BYTES} bytes"
            )
        return cls.decode(raw)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SchemaError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise SchemaError(f"{path} holds no JSON object")
    return value
