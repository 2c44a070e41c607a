import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import pytest
from headwater.worker.prefix_cache import Match, Node, PrefixCache, shared_length
from headwater.worker.segment import CacheKind

STATE_NBYTES = 100


@dataclass(frozen=True)
class TextSegment:
    """Stands for keys and values: remembers which tokens it was computed for."""

    tokens: tuple[int, ...]
    first: int = 0
    """A segment depends on the tokens before it, so it remembers where it began."""
    kind: CacheKind = CacheKind.SEGMENTS
    is_resumable: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        has_state = self.kind is CacheKind.SNAPSHOTS and self.is_resumable
        return 10 * len(self.tokens) + (STATE_NBYTES if has_state else 0)

    def split(self, position: int) -> tuple[Self, Self]:
        assert 0 < position < len(self.tokens)
        first = replace(
            self, tokens=self.tokens[:position], is_resumable=self.kind is CacheKind.SEGMENTS
        )
        rest = replace(self, tokens=self.tokens[position:], first=self.first + position)
        return first, rest

    def resumable_as(self, other: Self) -> Self:
        assert self.first + len(self.tokens) == other.first + len(other.tokens)
        return replace(self, is_resumable=other.is_resumable)


Cache = PrefixCache[TextSegment]


def segments_cache() -> Cache:
    return PrefixCache(CacheKind.SEGMENTS)


def snapshots_cache() -> Cache:
    return PrefixCache(CacheKind.SNAPSHOTS)


def insert(cache: Cache, text: str, start: int = 0, key: str = "k") -> Node[TextSegment]:
    tokens = tuple(map(ord, text))
    return cache.insert(key, tokens, start, TextSegment(tokens[start:], start, cache.kind))


def match(cache: Cache, text: str, key: str = "k") -> Match[TextSegment]:
    return cache.match(key, tuple(map(ord, text)), len(text) - 1)


def held_text(cache: Cache, node: Node[TextSegment] | None) -> str:
    return "".join(chr(token) for part in cache.segments(node) for token in part.tokens)


def test_shared_length_agrees_with_counting_one_by_one() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        first = [rng.randrange(2) for _ in range(rng.randrange(70))]
        second = first[: rng.randrange(70)] + [rng.randrange(2) for _ in range(rng.randrange(9))]
        counted = 0
        for one, other in zip(first, second, strict=False):
            if one != other:
                break
            counted += 1

        assert shared_length(first, second) == counted


def test_an_empty_cache_matches_nothing() -> None:
    cache = segments_cache()

    assert match(cache, "abc") == Match(0, None)
    assert cache.pin(Match(0, None)) is None
    assert cache.segments(None) == []


def test_the_same_prompt_again_leaves_one_token_to_compute() -> None:
    for cache in (segments_cache(), snapshots_cache()):
        insert(cache, "hell")

        found = match(cache, "hello")
        assert found.num_tokens == 4
        assert match(cache, "hell").num_tokens == (3 if cache.kind is CacheKind.SEGMENTS else 0)


def test_a_prompt_of_one_token_never_matches() -> None:
    cache = segments_cache()
    insert(cache, "abc")

    assert match(cache, "a").num_tokens == 0


def test_a_match_may_end_inside_a_node_and_its_segments_end_there_too() -> None:
    cache = segments_cache()
    insert(cache, "hello world")

    node = cache.pin(match(cache, "hello there"))

    assert held_text(cache, node) == "hello "
    cache.check_integrity()


def test_states_match_at_the_deepest_one_and_never_in_between() -> None:
    cache = snapshots_cache()
    insert(cache, "he")
    insert(cache, "hello world")

    found = match(cache, "hello there")
    assert found.num_tokens == 2
    assert held_text(cache, cache.pin(found)) == "he"


def test_states_share_the_keys_and_values_before_them() -> None:
    cache = snapshots_cache()
    insert(cache, "he")
    insert(cache, "hello", start=2)
    insert(cache, "hello world")

    node = cache.pin(match(cache, "hello!"))

    assert [part.num_tokens for part in cache.segments(node)] == [2, 3]
    assert cache.nbytes == 10 * len("hello world") + 3 * STATE_NBYTES


def test_a_cut_between_states_is_no_place_to_go_on_until_it_gets_a_state() -> None:
    cache = snapshots_cache()
    insert(cache, "hello world")
    insert(cache, "help")
    assert match(cache, "help!").num_tokens == 4
    assert match(cache, "held!").num_tokens == 0

    insert(cache, "hel")

    assert match(cache, "held!").num_tokens == 3
    assert cache.nbytes == 10 * len("hello worldp") + 3 * STATE_NBYTES
    cache.check_integrity()


def test_existing_parts_are_kept_and_only_the_tail_is_stored() -> None:
    cache = segments_cache()
    first = insert(cache, "abcd")
    kept = first.held

    insert(cache, "abcdef")
    insert(cache, "abcdef", start=2)

    assert first.held is kept
    assert cache.nbytes == 60
    cache.check_integrity()


def test_a_key_longer_than_its_segment_is_refused() -> None:
    cache = segments_cache()

    with pytest.raises(ValueError, match=r"3 tokens for \[0, 4\)"):
        cache.insert("k", [1, 2, 3, 4], 0, TextSegment((1, 2, 3)))
    assert cache.nbytes == 0


def test_a_segment_without_what_comes_before_it_is_refused() -> None:
    cache = segments_cache()
    insert(cache, "ab")

    with pytest.raises(ValueError, match=r"\[1, 3\) before the segment"):
        insert(cache, "axyz", start=3)
    with pytest.raises(ValueError, match=r"\[0, 3\)"):
        insert(cache, "axyz", start=3, key="other")
    cache.check_integrity()


def test_roots_are_strangers_to_each_other() -> None:
    cache = segments_cache()
    insert(cache, "secret prompt", key="tenant a")

    assert match(cache, "secret prompt", key="tenant b").num_tokens == 0


def test_a_pin_survives_a_later_split_above_it() -> None:
    cache = segments_cache()
    insert(cache, "abcdef")
    node = cache.pin(match(cache, "abcdef!"))
    insert(cache, "abcxyz")

    cache.unpin(node)
    cache.check_integrity()
    assert cache.pinned_nbytes == 0
    assert cache.evict(1_000) == 90
    assert cache.nbytes == cache.num_nodes == 0


def test_pinned_nodes_and_those_above_them_are_never_evicted() -> None:
    cache = segments_cache()
    insert(cache, "abcdef")
    insert(cache, "abcxyz")
    node = cache.pin(match(cache, "abcdef!"))

    assert cache.evictable_nbytes == 30
    assert cache.evict(1_000) == 30
    assert held_text(cache, node) == "abcdef"


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = segments_cache()
    for text in ("aaa", "bbb", "ccc"):
        insert(cache, text)
    cache.unpin(cache.pin(match(cache, "aaa!")))

    cache.evict(1)

    assert [match(cache, text + "!").num_tokens for text in ("aaa", "bbb", "ccc")] == [3, 0, 3]


def test_eviction_stops_as_soon_as_enough_is_free() -> None:
    cache = segments_cache()
    for text in ("aaa", "bbb", "ccc"):
        insert(cache, text)

    assert cache.evict(31) == 60
    assert cache.evict(0) == 0


def test_a_node_that_only_led_to_an_evicted_state_goes_with_it() -> None:
    cache = snapshots_cache()
    insert(cache, "abcd")
    insert(cache, "abxy")

    cache.evict(1_000)

    assert cache.num_nodes == 0
    cache.check_integrity()


@pytest.mark.parametrize("make_cache", [segments_cache, snapshots_cache])
def test_unsound_tokens_are_dropped_with_all_that_continues_them(
    make_cache: Callable[[], Cache],
) -> None:
    cache = make_cache()
    for text in ("ab", "abcd", "abcdef", "abxy"):
        insert(cache, text)

    cache.discard("k", tuple(map(ord, "abcd")), 2)

    assert [match(cache, text).num_tokens for text in ("abcdef!", "abxy!")] == [2, 4]
    cache.check_integrity()


def test_discarding_leaves_what_is_pinned() -> None:
    cache = segments_cache()
    insert(cache, "abcd")
    node = cache.pin(match(cache, "abcd!"))
    insert(cache, "abcdef")

    cache.discard("k", tuple(map(ord, "abcdef")), 0)
    cache.discard("nobody", (1, 2), 0)

    assert held_text(cache, node) == "abcd"
    assert match(cache, "abcdef!").num_tokens == 4
    cache.check_integrity()


def test_a_hit_counts_when_it_is_used_not_when_it_is_found() -> None:
    cache = segments_cache()
    insert(cache, "abcdef")
    found = match(cache, "abcdef")
    assert cache.statistics.num_hits == 0

    cache.pin(found)

    assert cache.statistics.num_hits == 1
    assert cache.statistics.num_reused_tokens == 5


class NaiveCache:
    """The oracle: which (root, token) paths are held, as a plain set of prefixes."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.held: set[tuple[str, str]] = set()

    def insert(self, key: str, text: str) -> None:
        ends = [len(text)]
        if self.cache.kind is CacheKind.SEGMENTS:
            ends = list(range(1, len(text) + 1))
        self.held |= {(key, text[:end]) for end in ends}

    def match(self, key: str, text: str) -> int:
        return max(
            (end for end in range(1, len(text)) if (key, text[:end]) in self.held), default=0
        )

    @property
    def nbytes(self) -> int:
        if self.cache.kind is CacheKind.SEGMENTS:
            return 10 * len(self.held)
        paths = {(key, text[:end]) for key, text in self.held for end in range(1, len(text) + 1)}
        return 10 * len(paths) + STATE_NBYTES * len(self.held)

    def forget_evicted(self) -> None:
        """Take over what an eviction left, after checking that it only took away."""
        left = {
            (key, text)
            for key, text in self.held
            if match(self.cache, text + "!", key).num_tokens == len(text)
        }
        self.held = left
        assert self.cache.nbytes == self.nbytes


def run_random_operations(seed: int, kind: CacheKind) -> None:
    rng = random.Random(seed)
    cache: Cache = PrefixCache(kind)
    oracle = NaiveCache(cache)
    pinned: list[tuple[str, str, Node[TextSegment]]] = []
    for _ in range(rng.randrange(5, 60)):
        key = rng.choice("KL")
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 12)))
        match rng.choice(["insert", "insert", "pin", "unpin", "evict"]):
            case "insert":
                covered = cache.match(key, tuple(map(ord, text)), len(text)).num_tokens
                start = min(rng.randint(0, covered), len(text) - 1)
                node = insert(cache, text, start, key)
                assert node.end == len(text)
                oracle.insert(key, text)
            case "pin":
                tokens = tuple(map(ord, text))
                found = cache.match(key, tokens, len(text) - 1)
                assert found.num_tokens == oracle.match(key, text)
                if (node_pinned := cache.pin(found)) is not None:
                    pinned.append((key, text[: found.num_tokens], node_pinned))
            case "unpin" if pinned:
                cache.unpin(pinned.pop(rng.randrange(len(pinned)))[2])
            case "evict":
                wanted, before = rng.randrange(1, 200), cache.nbytes
                possible = cache.evictable_nbytes
                freed = cache.evict(wanted)
                assert freed == before - cache.nbytes
                assert freed >= min(wanted, possible)
                oracle.forget_evicted()
        cache.check_integrity()
        assert cache.nbytes == oracle.nbytes
        for _, held, node in pinned:
            assert held_text(cache, node) == held
    for _, _, node in pinned:
        cache.unpin(node)
    cache.evict(10**9)
    cache.check_integrity()
    assert cache.nbytes == cache.num_nodes == 0


@pytest.mark.parametrize("kind", CacheKind)
def test_random_operations_agree_with_a_naive_cache(kind: CacheKind) -> None:
    for seed in range(100):
        run_random_operations(seed, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", CacheKind)
def test_a_thousand_random_operation_sequences_agree_with_a_naive_cache(kind: CacheKind) -> None:
    for seed in range(1_000, 2_000):
        run_random_operations(seed, kind)
