"""The models that workers have announced: their cards and tokenizers."""

from typing import Any

from headwater.schemas import GenerationJob, ModelCard, TokenizerFiles, keys
from redis import Redis
from redis.exceptions import NoPermissionError

from .errors import (
    InvalidRequest,
    PromptTooLong,
    TokenizationError,
    UnknownModel,
    UnsupportedToolChoice,
)
from .patience import OUTAGE_S, insist
from .tokenization import Tokenizer

_MAX_LISTED = 20


class ModelDirectory:
    """Cards and tokenizers, fetched once and kept; a card is fetched again on request only."""

    def __init__(self, redis: Redis, outage_s: float = OUTAGE_S) -> None:
        """*outage_s*: how long a read waits for a server that is away."""
        self._redis = redis
        self._outage_s = outage_s
        self._cards: dict[str, ModelCard] = {}
        self._tokenizers: dict[str, Tokenizer] = {}

    def aliases(self) -> list[str]:
        """Return the aliases that have a card, sorted."""
        return insist(self._read_aliases, self._outage_s)

    def card(self, alias: str, *, refresh: bool = False) -> ModelCard:
        """Return the card behind *alias*; raises UnknownModel, which lists the known ones."""
        if refresh or alias not in self._cards:
            data = self._get(keys.model_card_key(alias))
            if data is None:
                self._cards.pop(alias, None)
                raise UnknownModel(self._unknown(alias))
            self._cards[alias] = ModelCard.decode(data)
        return self._cards[alias]

    def tokenizer(self, alias: str) -> Tokenizer:
        """Return the tokenizer of the model behind *alias*.

        Raises UnknownModel, and TokenizationError when the worker has announced none.
        """
        fingerprint = self.card(alias).tokenizer_fingerprint
        if fingerprint not in self._tokenizers:
            data = self._get(keys.tokenizer_key(fingerprint))
            if data is None:
                raise TokenizationError(
                    f"the tokenizer of model {alias!r} is not announced: is its worker running?"
                    " Or give a tokenizer directory"
                )
            self._tokenizers[fingerprint] = Tokenizer(TokenizerFiles.decompress(data))
        return self._tokenizers[fingerprint]

    def _read_aliases(self) -> list[str]:
        now_s, _ = self._redis.time()
        found: Any = self._redis.zrange(keys.models_key(), now_s, "+inf", byscore=True)
        return sorted(alias.decode() for alias in found)

    def _get(self, key: str) -> Any:
        return insist(lambda: self._redis.get(key), self._outage_s)

    def _unknown(self, alias: str) -> str:
        try:
            known = self.aliases()
        except NoPermissionError:  # a user who only submits need not see what else is there
            return f"unknown model {alias!r}: no worker has announced it"
        if not known:
            return f"unknown model {alias!r}: no worker has announced a model; start one first"
        listed = ", ".join(known[:_MAX_LISTED])
        return f"unknown model {alias!r}; known: {listed}"


def fit_to_card(job: GenerationJob, card: ModelCard) -> GenerationJob:
    """Return *job* with the tokenizer's fingerprint filled in.

    Raises InvalidRequest for token ids outside the vocabulary or another tokenizer, and
    PromptTooLong.
    """
    if job.num_tokens_at_most > card.context_length:
        num_prompt = len(job.prompt_token_ids)
        rest = "the longest continuation" if job.continuations else f"max_tokens ({job.max_tokens})"
        raise PromptTooLong(
            f"prompt ({num_prompt} tokens) + {rest} is over the context of"
            f" model {job.model!r} ({card.context_length} tokens)"
        )
    _check_abilities(job, card)
    for index, continuation in enumerate(job.continuations):
        _check_vocabulary(f"continuations[{index}]", continuation, card)
    _check_vocabulary("prompt_token_ids", job.prompt_token_ids, card)
    _check_vocabulary("stop_token_ids", job.stop_token_ids, card)
    _check_vocabulary("sampling.bad_token_ids", job.sampling.bad_token_ids, card)
    largest = max(job.sampling.logit_bias, default=0)
    if largest >= card.vocab_size:
        raise InvalidRequest(
            f"sampling.logit_bias names token {largest}; model {card.alias!r} has token ids 0 to"
            f" {card.vocab_size - 1}"
        )
    if job.tokenizer_fingerprint is None:
        return job.model_copy(update={"tokenizer_fingerprint": card.tokenizer_fingerprint})
    if job.tokenizer_fingerprint != card.tokenizer_fingerprint:
        raise InvalidRequest(
            f"the prompt was made with another tokenizer ({job.tokenizer_fingerprint}) than"
            f" model {job.model!r} has ({card.tokenizer_fingerprint})"
        )
    return job


def _check_abilities(job: GenerationJob, card: ModelCard) -> None:
    if job.adapter is not None and job.adapter not in card.adapters:
        known = ", ".join(card.adapters) or "none"
        raise InvalidRequest(
            f"model {card.alias!r} has no adapter {job.adapter!r}; it has: {known}"
        )
    if job.forced_tools and not card.enforces_tool_calls:
        raise UnsupportedToolChoice(
            f"model {card.alias!r} does not write its tool calls as JSON between markers, so none"
            ' can be forced: leave tool_choice at "auto"'
        )


def _check_vocabulary(field: str, token_ids: tuple[int, ...], card: ModelCard) -> None:
    if token_ids and max(token_ids) >= card.vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= card.vocab_size)
        raise InvalidRequest(
            f"{field}[{index}] is {token_ids[index]}; model {card.alias!r} has token ids 0 to"
            f" {card.vocab_size - 1}"
        )
