"""Grammars: compiles what jobs enforce for the model's vocabulary, and follows outputs by it."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final

from headwater.schemas import GenerationJob
from headwater.schemas.grammar import GrammarError, check, start_matcher
from headwater.schemas.reply_grammar import Layout, Marker, Markers, reply_grammar
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from .channel_family import ChannelFamily, MarkerPair
from .errors import JobRejected
from .text import Vocabulary, reply_shape

_NUM_KEPT: Final = 128
"""Jobs of one application share their formats; each is compiled once."""
_SPECIAL: Final = b"\xff"
"""How llguidance marks a token that is no text; UTF-8 has no such byte."""


class GrammarConstraint:
    """Follows one output by its grammar. What it needs to know are the output's tokens."""

    def __init__(self, matcher: LLMatcher) -> None:
        """*matcher* stands at the start and is this output's own."""
        self._matcher = matcher
        self._num_consumed = 0

    def allowed(self, output_token_ids: list[int]) -> bytes:
        """Return which tokens may come next: one bit each, the lowest of a byte first.

        The output only ever grows between calls. No bit is set when nothing can follow.
        """
        # One at a time: of several, the matcher would not take an end where nothing else can come.
        for token_id in output_token_ids[self._num_consumed :]:
            self._matcher.consume_token(token_id)
        self._num_consumed = len(output_token_ids)
        mask: bytes = self._matcher.compute_bitmask()
        return bytes(len(mask)) if self._matcher.is_error() else mask

    def error(self) -> str | None:
        """Return why the output can't go on, if it can't."""
        try:
            check(self._matcher)
        except GrammarError as error:
            return str(error)
        return None


class Grammars:
    """Makes constraints for one model. Not shared between threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: Collection[int],
        family: ChannelFamily | None = None,
    ) -> None:
        """*vocab_size* is the model's own, which may exceed the tokenizer's."""
        self._vocabulary = vocabulary
        self._family = family
        ends = sorted(token for token in eos_token_ids if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        if vocabulary.pieces is not None and ends:
            wrapper = TokenizerWrapper(_Tokens(vocabulary, vocab_size, ends))
            self._tokenizer = LLTokenizer(wrapper, eos_token=ends)
        self._compiled = lru_cache(maxsize=_NUM_KEPT)(self._compile)

    def start(self, job: GenerationJob) -> GrammarConstraint:
        """Return a constraint at the start of an output of *job*, which is enforced.

        Raises JobRejected.
        """
        try:
            grammar = reply_grammar(job, self._layout(job))
            assert grammar is not None
            matcher = self._compiled(grammar)
        except (GrammarError, ValueError) as error:
            raise _rejected(job, error) from error
        return GrammarConstraint(matcher.deep_copy())

    def _layout(self, job: GenerationJob) -> Layout:
        shape = reply_shape(self._vocabulary, self._family, job)
        return Layout(
            self._markers(shape.reasoning), shape.is_reasoning, self._markers(shape.calls)
        )

    def _markers(self, pair: MarkerPair | None) -> Markers | None:
        if pair is None:
            return None
        return Markers(*(_marker(self._vocabulary.special_texts, text) for text in pair))

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarError(
                "this model's tokenizer gives its tokens no texts of their own, or it has no"
                " end-of-sequence token"
            )
        return start_matcher(grammar, self._tokenizer)


def _marker(special_texts: Mapping[int, str], text: str) -> Marker:
    """Return *text* as a grammar has it: special tokens by their ids, all else as text."""
    ids = {special: token_id for token_id, special in special_texts.items()}
    found = sorted((special for special in ids if special in text), key=len, reverse=True)
    if not found:
        return Marker.of_text(text)
    before, special, behind = text.partition(found[0])
    around = [_marker(special_texts, part).lark if part else "" for part in (before, behind)]
    parts = (around[0], f"<[{ids[special]}]>", around[1])
    return Marker(" ".join(part for part in parts if part), is_text=False)


def _rejected(job: GenerationJob, error: Exception) -> JobRejected:
    if job.response_format is None:
        return JobRejected("bad_tool_choice", f"tool_choice can't be enforced: {error}")
    return JobRejected(
        "bad_response_format",
        f"response_format ({job.response_format.type}) can't be enforced: {error}",
    )


class _Tokens:
    """The vocabulary as llguidance asks for it: every token's bytes, as our own text has them."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = vocabulary.tokenizer
        self.eos_token_id = eos_token_ids[0]
        texts = [vocabulary.token_bytes(token_id) for token_id in range(vocab_size)]
        # A token without text changes nothing and may come for ever: it is none of a grammar's.
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self.tokens = [text or _SPECIAL + b"%d" % i for i, text in enumerate(texts)]
        for token_id in eos_token_ids:
            self.tokens[token_id] = _SPECIAL + b"%d" % token_id

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize *text*: where only one text can follow, these tokens are to be taken."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        # A text that looks like a special token is not one: that would have no text.
        self._tokenizer.encode_special_tokens = True
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = False
        return ids
