"""ModelCard: what a worker announces of its model, so that producers can check and tokenize."""

from pydantic import Field

from .base import WireModel
from .job import Name


class ModelCard(WireModel):
    """The model behind an alias."""

    alias: Name
    source: str
    """The directory or hub name that the worker loaded."""
    vocab_size: int = Field(gt=0)
    """Token ids must be below this."""
    context_length: int = Field(gt=0)
    """Prompt and new tokens together must fit."""
    tokenizer_fingerprint: str
    eos_token_ids: tuple[int, ...] = ()
    enforces_tool_calls: bool = False
    """Whether jobs may have a tool_choice that forces a call."""
    adapters: tuple[Name, ...] = ()
    """Aliases of the LoRA adapters that jobs may ask for."""
