"""A radix tree from token ids to the keys and values computed for them.

    root ─ "system prompt" ─┬─ "question A"
                            └─ "question B"

A node holds its edge's tokens and the keys and values of just these, so what prompts share is
held once. With CacheKind.SNAPSHOTS, where only some layers have such, a node may hold the state
of the others at its end besides: a match ends at such a node.
A pin counts on a node and on all above it. It is named by its deepest node and never by its
path: a later split puts a new node in between, with the count of the one below it.
Pure Python, no clock: "recently used" is a counter.
"""

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from .segment import CacheKind, Segment

S = TypeVar("S", bound=Segment)


@dataclass(slots=True, eq=False)
class Node(Generic[S]):
    """Tokens [start, end) of a path. Only the cache changes one."""

    tokens: tuple[int, ...]
    end: int
    parent: "Node[S] | None"
    held: S | None = None
    """What was computed for *tokens*; only a root holds nothing."""
    children: "dict[int, Node[S]]" = field(default_factory=dict)
    num_pins: int = 0
    """Pins of this node and of all below it."""
    last_used: int = 0
    is_candidate: bool = False
    """Whether the eviction heap knows it."""
    num_hits: int = 0
    """Times that somebody went on exactly at its end."""

    @property
    def start(self) -> int:
        """Tokens before this node's own."""
        return self.end - len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that the node itself holds."""
        return 0 if self.held is None else self.held.nbytes

    @property
    def is_resumable(self) -> bool:
        """Whether a row can go on at this node's end."""
        return self.held is not None and self.held.is_resumable


class Match(NamedTuple, Generic[S]):
    """The longest cached prefix, named by its deepest node, which may reach beyond it."""

    num_tokens: int
    node: Node[S] | None
    """None when nothing matched."""


class SavingPrefix(NamedTuple):
    """A prefix that is held and was hit."""

    root_key: Hashable
    node: "Node[Any]"
    num_saved_tokens: int


@dataclass(slots=True)
class CacheStatistics:
    """Counters since the start. A hit counts when it is pinned for use, not when it is found."""

    num_hits: int = 0
    num_reused_tokens: int = 0
    num_evicted_nodes: int = 0
    num_splits: int = 0
    """A split replaces a segment by two: rows that refer to it can be told."""


class PrefixCache(Generic[S]):
    """Cached prefixes below one root per key (model fingerprint and namespace, say)."""

    def __init__(self, kind: CacheKind) -> None:
        self.kind = kind
        self.nbytes = 0
        """Bytes of everything held."""
        self.pinned_nbytes = 0
        """Bytes that cannot be evicted now."""
        self.num_nodes = 0
        self.statistics = CacheStatistics()
        self._roots: dict[Hashable, Node[S]] = {}
        self._clock = 0
        self._candidates: list[tuple[int, int, Node[S]]] = []

    @property
    def evictable_nbytes(self) -> int:
        """Bytes that `evict` could free now."""
        return self.nbytes - self.pinned_nbytes

    def match(self, root_key: Hashable, token_ids: Sequence[int], max_tokens: int) -> Match[S]:
        """Find the longest usable prefix of the first *max_tokens* of *token_ids*.

        Callers pass at most len(token_ids) - 1: somebody has to compute the last token's logits.
        Changes nothing; the match is good until the next insert, pin or evict.
        """
        root = self._roots.get(root_key)
        if root is None:
            return Match(0, None)
        node, num_tokens = _descend(root, tuple(token_ids[: max(0, max_tokens)]))
        if self.kind is CacheKind.SNAPSHOTS:
            node = _deepest_resumable(node, num_tokens)
            num_tokens = node.end
        return Match(num_tokens, node) if num_tokens else Match(0, None)

    def num_held(self, root_key: Hashable, token_ids: Sequence[int]) -> int:
        """Return how many of the first *token_ids* are held; perhaps no row can go on there."""
        root = self._roots.get(root_key)
        return 0 if root is None else _descend(root, tuple(token_ids))[1]

    def pin(self, match: Match[S]) -> Node[S] | None:
        """Keep a match from eviction; return the node that ends where it ends.

        Cuts a node that reaches beyond the match, so that its segments can be taken whole.
        """
        if match.node is None:
            return None
        node = self._node_ending_at(match.node, match.num_tokens)
        self.pin_node(node)
        node.num_hits += 1
        self.statistics.num_hits += 1
        self.statistics.num_reused_tokens += match.num_tokens
        return node

    def pin_node(self, node: Node[S]) -> None:
        """Keep *node* and all above it from eviction; counts."""
        self._touch(node)
        for above in _path_up(node):
            if above.num_pins == 0:
                self.pinned_nbytes += above.nbytes
            above.num_pins += 1

    def unpin(self, node: Node[S] | None) -> None:
        """Undo one pin of *node*; None is the pin of an empty match."""
        if node is None:
            return
        assert node.num_pins > 0, "unpin of a node that nobody has pinned"
        for above in _path_up(node):
            above.num_pins -= 1
            if above.num_pins == 0:
                self.pinned_nbytes -= above.nbytes
        self._note_candidate(node)

    def segments(self, node: Node[S] | None) -> list[S]:
        """Return the adjacent segments that rebuild tokens [0, node.end)."""
        return [each.held for each in self.path(node) if each.held is not None]

    def path(self, node: Node[S] | None) -> list[Node[S]]:
        """Return the nodes from the first token to the end of *node*."""
        return [] if node is None else list(_path_up(node))[::-1]

    def insert(
        self, root_key: Hashable, token_ids: Sequence[int], start: int, segment: S
    ) -> Node[S]:
        """Store *segment*, computed for tokens [start, end) of *token_ids*; return their node.

        What is already held stays, only the tail beyond it is stored; and the state at its end.
        Raises ValueError when the segment's length is not that of its tokens, or when the tokens
        before *start* are not held.
        """
        tokens = tuple(token_ids)
        if not tokens or segment.num_tokens != len(tokens) - start:
            raise ValueError(
                f"a segment of {segment.num_tokens} tokens for [{start}, {len(tokens)})"
            )
        root = self._roots.get(root_key)
        if root is None:
            root = self._roots[root_key] = Node((), 0, None)
        found, num_tokens = _descend(root, tokens)
        if num_tokens < start:
            self._drop_empty_root(root)
            raise ValueError(f"tokens [{num_tokens}, {start}) before the segment are not held")
        node = self._extend(self._node_ending_at(found, num_tokens), tokens, start, segment)
        self._touch(node)
        self._note_candidate(node)
        return node

    def evict(self, num_bytes: int) -> int:
        """Drop least recently used leaves until *num_bytes* are free; return what was freed."""
        freed = 0
        while freed < num_bytes and self._candidates:
            last_used, _, node = heapq.heappop(self._candidates)
            node.is_candidate = False
            if last_used != node.last_used:
                self._note_candidate(node)
            elif _is_evictable(node):
                freed += self._remove(node)
                self.statistics.num_evicted_nodes += 1
        return freed

    def most_saving(self, count: int) -> list[SavingPrefix]:
        """Return the prefixes held whose hits saved most tokens, at most *count*, most first."""
        found = (
            SavingPrefix(root_key, node, node.num_hits * node.end)
            for root_key, root in self._roots.items()
            for node in _subtree(root)
            if node.num_hits
        )
        return heapq.nlargest(count, found, key=lambda each: each.num_saved_tokens)

    def discard(self, root_key: Hashable, token_ids: Sequence[int], start: int) -> None:
        """Drop what is held beyond the first *start* of *token_ids*, and what continues it.

        For keys and values that turned out to be unsound. Pinned nodes stay.
        """
        root = self._roots.get(root_key)
        if root is None:
            return
        node, _ = _descend(root, tuple(token_ids))
        beyond = [above for above in _path_up(node) if above.end > start]
        if beyond:
            for below in reversed(list(_subtree(beyond[-1]))):
                if _is_evictable(below):
                    self._remove(below)

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, keys and pins agree with what is really held."""
        nodes = list(self._nodes())
        assert self.num_nodes == len(nodes)
        assert self.nbytes == sum(node.nbytes for node in nodes)
        assert self.pinned_nbytes == sum(node.nbytes for node in nodes if node.num_pins)
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.tokens[0]] is node
            assert node.start == node.parent.end
            assert node.num_pins >= sum(child.num_pins for child in node.children.values())
            assert node.is_candidate or not _is_evictable(node)
            assert node.held is not None
            assert node.held.num_tokens == len(node.tokens)
            assert node.children or node.is_resumable

    def _extend(self, node: Node[S], tokens: tuple[int, ...], start: int, segment: S) -> Node[S]:
        """Return the node at the end of *tokens*, of which the path to *node* is a prefix."""
        if node.end < len(tokens):
            if node.end > start:
                _, segment = segment.split(node.end - start)
            return self._add_leaf(node, tokens, segment)
        assert node.held is not None
        if segment.is_resumable and not node.is_resumable:
            self._hold(node, node.held.resumable_as(segment))
        return node

    def _add_leaf(self, parent: Node[S], tokens: tuple[int, ...], held: S) -> Node[S]:
        leaf: Node[S] = Node(tokens[parent.end :], len(tokens), parent)
        parent.children[leaf.tokens[0]] = leaf
        self.num_nodes += 1
        self._hold(leaf, held)
        return leaf

    def _hold(self, node: Node[S], held: S | None) -> None:
        """Replace what *node* holds; the one place that changes byte counts upwards."""
        change = (0 if held is None else held.nbytes) - node.nbytes
        node.held = held
        self.nbytes += change
        if node.num_pins:
            self.pinned_nbytes += change

    def _node_ending_at(self, node: Node[S], position: int) -> Node[S]:
        """Return the node that ends at *position* on the way to *node*, cutting it there."""
        while node.parent is not None and position <= node.start:
            node = node.parent
        if node.end == position:
            return node
        return self._split(node, position)

    def _split(self, node: Node[S], position: int) -> Node[S]:
        """Put a new node above *node* that ends at *position*, and return it."""
        cut = position - node.start
        upper: Node[S] = Node(node.tokens[:cut], position, node.parent)
        upper.num_pins, upper.last_used = node.num_pins, node.last_used
        assert node.parent is not None
        node.parent.children[upper.tokens[0]] = upper
        upper.children[node.tokens[cut]] = node
        node.parent, node.tokens = upper, node.tokens[cut:]
        self.num_nodes += 1
        assert node.held is not None
        first, second = node.held.split(cut)
        self._hold(upper, first)
        self._hold(node, second)
        self.statistics.num_splits += 1
        return upper

    def _touch(self, node: Node[S]) -> None:
        self._clock += 1
        for above in _path_up(node):
            above.last_used = self._clock

    def _note_candidate(self, node: Node[S]) -> None:
        # One heap entry a node: a use in between is noticed when the entry comes up.
        if _is_evictable(node) and not node.is_candidate:
            node.is_candidate = True
            heapq.heappush(self._candidates, (node.last_used, id(node), node))

    def _remove(self, node: Node[S]) -> int:
        """Drop a leaf, and the nodes above it that only led to it: no row can go on there."""
        freed = 0
        parent: Node[S] | None = node
        while parent is not None and parent.parent is not None and _is_evictable(parent):
            leaf, parent = parent, parent.parent
            freed += leaf.nbytes
            self.num_nodes -= 1
            self._hold(leaf, None)
            del parent.children[leaf.tokens[0]]
            leaf.parent = None
            if parent.is_resumable:
                break
        if parent is not None:
            self._note_candidate(parent)
            self._drop_empty_root(parent)
        return freed

    def _drop_empty_root(self, node: Node[S]) -> None:
        if node.parent is None and not node.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not node}

    def _nodes(self) -> Iterator[Node[S]]:
        """Yield every node but the roots."""
        for root in self._roots.values():
            yield from (node for node in _subtree(root) if node is not root)


def tokens_to(node: Node[Any]) -> tuple[int, ...]:
    """Return the tokens from the first one to the end of *node*."""
    edges = [above.tokens for above in _path_up(node)]
    return tuple(token for edge in reversed(edges) for token in edge)


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two sequences of the same type share.

    Compares slices that double in length: early differences are cheap, long runs go at C speed.
    """
    limit = min(len(first), len(second))
    position, step = 0, 16
    while position < limit:
        end = min(limit, position + step)
        if first[position:end] == second[position:end]:
            position, step = end, step * 2
        elif end - position == 1:
            return position
        else:
            limit, step = end, max(1, (end - position) // 2)
    return position


def _descend(root: Node[S], tokens: tuple[int, ...]) -> tuple[Node[S], int]:
    """Follow *tokens*; return the last node touched and the number of tokens found."""
    node, position = root, 0
    while position < len(tokens):
        child = node.children.get(tokens[position])
        if child is None:
            break
        ahead = tokens[position : position + len(child.tokens)]
        node = child
        if ahead != child.tokens:
            return node, position + shared_length(ahead, child.tokens)
        position = child.end
    return node, position


def _deepest_resumable(node: Node[S], max_tokens: int) -> Node[S]:
    """Return the deepest node on the path that ends in a state at *max_tokens* at most."""
    while node.parent is not None and not (node.is_resumable and node.end <= max_tokens):
        node = node.parent
    return node


def _subtree(top: Node[S]) -> Iterator[Node[S]]:
    """Yield *top* and all below it, parents before their children."""
    pending = [top]
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node


def _path_up(node: Node[S]) -> Iterator[Node[S]]:
    """Yield *node* and all above it, but not the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _is_evictable(node: Node[S]) -> bool:
    return node.parent is not None and not node.children and node.num_pins == 0
