"""What ends a choice, what its deltas say, and how a later attempt goes on."""

import random

import pytest
from headwater.schemas import DeltaPart, FinishReason, StreamMode
from headwater.worker.text import SequenceText, Stop, TextDiverged, Vocabulary

LENGTH = Stop(FinishReason.LENGTH)
EOS = Stop(FinishReason.STOP)


def stopped(matched: str | int) -> Stop:
    return Stop(FinishReason.STOP, matched)


def push_all(text: SequenceText, token_ids: list[int]) -> Stop | None:
    """Push until the choice ends; the last pushed token is the one that ended it."""
    for token_id in token_ids:
        stop = text.push(token_id)
        if stop is not None:
            return stop
    return None


def shown(text: SequenceText) -> str:
    part = text.take()
    return "".join(span.text for span in part.text) if part else ""


def test_a_delta_lists_every_token_since_the_last_and_the_text_now_certain(plain, make_job):
    the, own, fly = plain.ids(["The br", "own", " fly"])
    text = plain.sequence_text(make_job(stop=("own fox",)))
    assert text.take() is None
    text.push(the)
    text.push(own)
    first = text.take()
    assert (first.start, first.token_ids) == (0, (the, own))
    assert [(span.text_start, span.text) for span in first.text] == [(0, "The br")]
    text.push(fly)
    second = text.take()
    assert (second.start, second.token_ids) == (2, (fly,))
    assert [(span.text_start, span.text) for span in second.text] == [(6, "own fly")]
    assert text.take() is None


def test_a_token_whose_text_is_held_is_listed_without_text(plain, make_job):
    (head,) = plain.ids(["<|"])
    text = plain.sequence_text(make_job(stop=("<|end|>",)), choice=2)
    text.push(head)
    part = text.take()
    assert (part.choice, part.token_ids, part.text) == (2, (head,), ())


def test_deltas_survive_the_wire(plain, make_job):
    ids = plain.ids(["a", "b"])
    text = plain.sequence_text(make_job())
    push_all(text, ids)
    part = text.take()
    assert DeltaPart.decode(part.encode()) == part


def test_an_end_of_sequence_token_ends_without_text_and_is_listed(plain, make_job):
    (word,) = plain.ids(["hi"])
    text = plain.sequence_text(make_job(), eos_token_ids=[plain.eos])
    assert push_all(text, [word, plain.eos]) == EOS
    part = text.take()
    assert part.token_ids == (word, plain.eos)
    assert part.text[0].text == "hi"
    assert text.num_tokens == 2
    assert text.stop == EOS


def test_an_end_of_sequence_token_first_is_an_end_with_an_empty_text(plain, make_job):
    text = plain.sequence_text(make_job(), eos_token_ids=[plain.eos])
    assert text.push(plain.eos) == EOS
    part = text.take()
    assert (part.token_ids, part.text) == ((plain.eos,), ())


def test_ignore_eos_makes_it_an_ordinary_token(plain, make_job):
    ids = plain.ids(["a", "b"])
    text = plain.sequence_text(make_job(ignore_eos=True), eos_token_ids=[plain.eos])
    assert push_all(text, [ids[0], plain.eos, ids[1]]) is None
    assert shown(text) == "ab"


def test_ignore_eos_leaves_stop_tokens_alone(plain, make_job):
    job = make_job(ignore_eos=True, stop_token_ids=(plain.eos,))
    text = plain.sequence_text(job, eos_token_ids=[plain.eos])
    assert text.push(plain.eos) == stopped(plain.eos)


def test_a_stop_token_is_named_and_its_text_left_out(plain, make_job):
    word, stop = plain.ids(["a", "stop!"])
    text = plain.sequence_text(make_job(stop_token_ids=(stop,)))
    assert push_all(text, [word, stop]) == stopped(stop)
    assert shown(text) == "a"


def test_a_stop_string_is_named_and_cut_and_its_tokens_are_listed(plain, make_job):
    ids = plain.ids(["The br", "own", " foxes"])
    text = plain.sequence_text(make_job(stop=("own fox",)))
    assert push_all(text, ids) == stopped("own fox")
    part = text.take()
    assert part.token_ids == tuple(ids)
    assert part.text[0].text == "The br"


def test_max_tokens_ends_by_length_with_the_held_text(plain, make_job):
    ids = plain.ids(["a", "<|"])
    text = plain.sequence_text(make_job(stop=("<|end|>",), max_tokens=2))
    assert push_all(text, ids) == LENGTH
    assert shown(text) == "a<|"


def test_a_stop_at_the_last_allowed_token_is_a_stop(plain, make_job):
    (word,) = plain.ids(["END"])
    text = plain.sequence_text(make_job(stop=("END",), max_tokens=1))
    assert text.push(word) == stopped("END")
    text = plain.sequence_text(make_job(max_tokens=1), eos_token_ids=[plain.eos])
    assert text.push(plain.eos) == EOS


def test_tokens_before_min_tokens_do_not_end_the_text(plain, make_job):
    word, stop = plain.ids(["a", "b"])
    job = make_job(min_tokens=3, stop_token_ids=(stop,))
    text = plain.sequence_text(job, eos_token_ids=[plain.eos])
    assert push_all(text, [plain.eos, stop, word]) is None
    assert shown(text) == "ba"
    assert text.push(stop) == stopped(stop)
    assert shown(text) == ""


def test_a_stop_string_that_ended_before_min_tokens_is_text(plain, make_job):
    ids = plain.ids(["END", "a", "xEND"])
    text = plain.sequence_text(make_job(min_tokens=2, stop=("END",)))
    assert push_all(text, ids) == stopped("END")
    assert shown(text) == "ENDax"


def test_a_stop_string_that_straddles_min_tokens_is_cut_whole(plain, make_job):
    ids = plain.ids(["aE", "N", "D"])
    text = plain.sequence_text(make_job(min_tokens=2, stop=("END",)))
    assert push_all(text, ids) == stopped("END")
    assert shown(text) == "a"


@pytest.mark.parametrize("ending", ["eos", "stop_token", "length", "finish"])
def test_every_exit_lets_the_held_text_out(ending, vocabularies, make_job):
    """Half an emoji, and a head of a stop string, are held when the end comes."""
    vocabulary = vocabularies["byte_level"]
    lead, letter = vocabulary.pieces.index(b"\xf0"), vocabulary.pieces.index("x")
    job = make_job(
        stop=("x\ufffdz",), stop_token_ids=(letter + 1,), max_tokens=2 if ending == "length" else 9
    )
    text = SequenceText(vocabulary, job, eos_token_ids=[2])
    assert text.push(letter) is None
    assert shown(text) == ""
    text.push(lead)
    match ending:
        case "eos":
            assert text.push(2) == EOS
        case "stop_token":
            assert text.push(letter + 1) == stopped(letter + 1)
        case "length":
            assert text.stop == LENGTH
        case "finish":
            text.finish()
    assert shown(text) == "x\ufffd"
    text.finish()
    assert text.take() is None


def test_a_stop_string_that_only_the_flush_completes_is_cut(vocabularies, make_job):
    vocabulary = vocabularies["byte_level"]
    lead, letter = vocabulary.pieces.index(b"\xf0"), vocabulary.pieces.index("x")
    text = SequenceText(vocabulary, make_job(stop=("x\ufffd",)), eos_token_ids=[2])
    assert push_all(text, [letter, lead, 2]) == stopped("x\ufffd")
    assert shown(text) == ""


def test_a_stop_string_that_the_flush_completes_before_min_tokens_is_text(vocabularies, make_job):
    vocabulary = vocabularies["byte_level"]
    lead, letter = vocabulary.pieces.index(b"\xf0"), vocabulary.pieces.index("x")
    text = SequenceText(vocabulary, make_job(stop=("x\ufffd",), min_tokens=2))
    push_all(text, [letter, lead])
    text.finish()
    assert shown(text) == "x\ufffd"


def test_a_final_job_gets_tokens_without_text_and_the_whole_text_at_the_end(plain, make_job):
    ids = plain.ids(["a", "b", "END"])
    text = plain.sequence_text(make_job(stop=("END",), stream=StreamMode.FINAL))
    text.push(ids[0])
    part = text.take()
    assert (part.token_ids, part.text) == ((ids[0],), ())
    assert push_all(text, ids[1:]) == stopped("END")
    assert text.take().text == ()
    assert text.whole_text == "ab"


# Resume


def random_case(draw: random.Random, vocabulary: Vocabulary, make_job):
    size = min(len(vocabulary.pieces), 2_000)
    prompt = draw.choices(range(size), k=draw.randint(1, 5))
    tokens = draw.choices(range(size), k=draw.randint(1, 25))
    texts = [piece for piece in vocabulary.pieces[:size] if isinstance(piece, str) and piece]
    stops = ["".join(draw.choices(texts, k=2)), draw.choice(texts)]
    if draw.random() < 0.5:
        stops.append("z".join(stops))
    job = make_job(
        prompt,
        stop=tuple(dict.fromkeys(stops)),
        max_tokens=draw.choice([len(tokens), 1000]),
        min_tokens=draw.choice([0, 3]) if len(tokens) > 3 else 0,
        stop_token_ids=(draw.randrange(size),),
        stream=draw.choice(list(StreamMode)),
    )
    return job, tokens


def generate(text: SequenceText, tokens: list[int], draw: random.Random) -> list[DeltaPart]:
    """Push *tokens* from where *text* stands, with deltas at random places."""
    parts = []
    while text.stop is None and text.num_tokens < len(tokens):
        text.push(tokens[text.num_tokens])
        if draw.random() < 0.6:
            parts.append(text.take())
    return [part for part in parts if part]


def close(text: SequenceText) -> list[DeltaPart]:
    text.finish()
    part = text.take()
    return [part] if part else []


def check_resume(num_cases: int, vocabulary: Vocabulary, make_job, joined) -> None:
    draw = random.Random(3)
    num_stopped = 0
    for _ in range(num_cases):
        job, tokens = random_case(draw, vocabulary, make_job)
        undisturbed = SequenceText(vocabulary, job, eos_token_ids=[1])
        parts = generate(undisturbed, tokens, draw)
        stop = undisturbed.stop
        ending = close(undisturbed)
        expected = joined([*parts, *ending])
        for cut in range(len(parts) + 1):
            resumed = SequenceText.resume(vocabulary, job, parts[:cut], eos_token_ids=[1])
            assert resumed.num_tokens == sum(len(part.token_ids) for part in parts[:cut])
            later = generate(resumed, tokens, draw)
            assert resumed.stop == stop
            assert joined([*parts[:cut], *later, *close(resumed)]) == expected
            if job.stream is StreamMode.FINAL:
                assert resumed.whole_text == undisturbed.whole_text
        num_stopped += stop is not None
    assert 0 < num_stopped < num_cases


def test_a_resume_at_every_cut_continues_as_if_undisturbed(vocabulary, make_job, joined):
    check_resume(200, vocabulary, make_job, joined)


@pytest.mark.long
def test_two_thousand_resumes_at_every_cut_continue_as_if_undisturbed(vocabulary, make_job, joined):
    check_resume(2_000, vocabulary, make_job, joined)


def test_a_stop_string_that_straddles_the_seam_is_found(plain, make_job):
    ids = plain.ids(["The br", "own", " fox"])
    job = make_job(stop=("own fox",))
    first = plain.sequence_text(job)
    push_all(first, ids[:2])
    resumed = plain.resume(job, [first.take()])
    assert resumed.stop is None
    assert resumed.push(ids[2]) == stopped("own fox")
    part = resumed.take()
    assert (part.start, part.token_ids, part.text) == (2, (ids[2],), ())


def test_a_character_that_straddles_the_seam_is_whole(vocabularies, make_job):
    vocabulary = vocabularies["byte_fallback"]
    tokens = [vocabulary.pieces.index(bytes([byte])) for byte in "🙂".encode()]
    first = SequenceText(vocabulary, make_job())
    push_all(first, tokens[:3])
    resumed = SequenceText.resume(vocabulary, make_job(), [first.take()])
    resumed.push(tokens[3])
    assert shown(resumed) == "🙂"


def test_a_resume_after_the_last_token_knows_the_end(plain, make_job):
    ids = plain.ids(["a", "END"])
    job = make_job(stop=("END",))
    first = plain.sequence_text(job)
    push_all(first, ids)
    resumed = plain.resume(job, [first.take()])
    assert resumed.stop == stopped("END")
    assert resumed.take() is None


def test_a_resume_counts_published_tokens_against_max_tokens(plain, make_job):
    ids = plain.ids(["a", "b", "c"])
    job = make_job(max_tokens=3)
    first = plain.sequence_text(job)
    push_all(first, ids[:2])
    resumed = plain.resume(job, [first.take()])
    assert resumed.push(ids[2]) == LENGTH


def test_a_resume_takes_its_own_choices_parts_only(plain, make_job):
    ids = plain.ids(["a", "b"])
    other = DeltaPart(choice=1, start=0, token_ids=(ids[1],), text=())
    first = plain.sequence_text(make_job())
    first.push(ids[0])
    assert plain.resume(make_job(), [other, first.take(), other]).num_tokens == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"token_ids": (0, 0)}, "differs at character 0"),
        ({"start": 1}, "token 1 follows token 0"),
        ({"text": ({"text_start": 4, "text": "ab"},)}, "character 4 follows 0"),
        ({"text": ({"text_start": 0, "text": "abc"},)}, "differs at character 2"),
    ],
)
def test_published_text_that_its_tokens_do_not_give_is_told(change, word, plain, make_job):
    ids = plain.ids(["a", "b"])
    first = plain.sequence_text(make_job())
    push_all(first, ids)
    published = DeltaPart.parse(first.take().model_dump() | change)
    with pytest.raises(TextDiverged, match=word):
        plain.resume(make_job(), [published])


def test_published_tokens_after_an_end_are_told(plain, make_job):
    ids = plain.ids(["a", "b", "c"])
    part = DeltaPart(choice=0, start=0, token_ids=tuple(ids), text=())
    with pytest.raises(TextDiverged, match="go on after the end at 2"):
        plain.resume(make_job(max_tokens=2), [part])
