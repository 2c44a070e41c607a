"""All that can end a choice at once, against a reader who applies the rules one by one."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from headwater.schemas import FinishReason, GenerationJob
from headwater.worker.text import SequenceText, Stop, Vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

PIECES = ["a", "b", "ab", "ba", "aab", "é", "🙂a", ""]
EOS = len(PIECES)


@pytest.fixture(scope="module")
def letters() -> Vocabulary:
    vocab = {piece or "<silent>": index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<silent>", "<eos>"])
    # The self-check wants a word to stand before the tokens that it samples.
    tokenizer.add_tokens([AddedToken("word", normalized=False)])
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.pieces == (*PIECES, "", "word")
    return vocabulary


class Outcome(NamedTuple):
    text: str
    num_tokens: int
    stop: Stop | None


def apply_rules(job: GenerationJob, token_ids: Sequence[int]) -> Outcome:
    text = ""
    for index, token_id in enumerate(token_ids):
        may_stop = index >= job.min_tokens
        if may_stop and token_id == EOS and not job.ignore_eos:
            return Outcome(text, index + 1, Stop(FinishReason.STOP))
        if may_stop and token_id in job.stop_token_ids:
            return Outcome(text, index + 1, Stop(FinishReason.STOP, token_id))
        for char in PIECES[token_id] if token_id < EOS else "":
            text += char
            found = [stop for stop in job.stop if text.endswith(stop)]
            if may_stop and found:
                longest = max(found, key=len)
                stop = Stop(FinishReason.STOP, longest)
                return Outcome(text.removesuffix(longest), index + 1, stop)
        if index + 1 == job.max_tokens:
            return Outcome(text, index + 1, Stop(FinishReason.LENGTH))
    return Outcome(text, len(token_ids), None)


JOBS = st.builds(
    GenerationJob,
    job_id=st.just("j"),
    model=st.just("m"),
    prompt_token_ids=st.just((0,)),
    max_tokens=st.integers(6, 14),
    min_tokens=st.integers(0, 6),
    stop=st.lists(
        st.text("ab", min_size=1, max_size=4) | st.text("abé🙂", min_size=1, max_size=5), max_size=4
    ).map(tuple),
    stop_token_ids=st.sampled_from([(), (), (EOS,), (5,), (1, EOS)]),
    ignore_eos=st.booleans(),
)
# End-of-sequence is rare, or few texts would get far enough to hold a stop string.
TOKENS = st.lists(st.integers(0, EOS - 1) | st.sampled_from([0, 1, 2, EOS]), max_size=16)


@settings(max_examples=1_000, derandomize=True)
@given(JOBS, TOKENS, st.sets(st.integers(0, 16)))
def test_text_and_end_are_what_the_rules_say_and_do_not_depend_on_the_cuts(
    letters, joined, job, token_ids, cuts
):
    text = SequenceText(letters, job, eos_token_ids=[EOS])
    parts = []
    for index, token_id in enumerate(token_ids):
        if text.push(token_id) is not None:
            break
        if index in cuts:
            parts.append(text.take())
    text.finish()
    parts = [part for part in (*parts, text.take()) if part]
    assert Outcome(joined(parts), text.num_tokens, text.stop) == apply_rules(job, token_ids)
    assert [t for part in parts for t in part.token_ids] == token_ids[: text.num_tokens]


def test_include_stop_str_keeps_the_stop_string_and_nothing_after_it(plain, make_job):
    ids = plain.ids(["a E", "NDing"])
    text = plain.sequence_text(make_job(stop=("END",), include_stop_str=True))

    ends = [text.push(token_id) for token_id in ids]

    assert ends == [None, Stop(FinishReason.STOP, "END")]
    assert "".join(span.text for span in text.take().text) == "a END"
