"""What of JSON schemas takes far more time to compile than their size tells, counted beforehand."""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import prod
from typing import Any, Final, NamedTuple

from . import limits
from .schema_tree import Node, SchemaTree, inside, members

_MAX_TOGETHER: Final = 12
"""Patterns that one string has to keep to: each doubles the time, 12 take some hundredths of a
second, 20 half a minute."""
_MAX_MULTIPLE: Final = 100_000
"""Of all multipleOf together: each takes a state for every remainder, so many take 0.6 s and
50 MB."""
_MAX_PATTERN_CHARS: Final = 2 * limits.MAX_REGEX_CHARS
"""Of all patterns together, those of names too: twice what a format may have that is one."""
_MAX_VALUES: Final = 10_000
"""Of all enum together: where a pattern holds for them, too, it is tried on each, at 0.1 ms."""
_MAX_PATTERN_PAIRS: Final = 5_000
"""Of the patterns of names in one object any two are compared, so many pairs in 0.3 s."""


class _Load(NamedTuple):
    """What the parts of a value may have to keep to, at the place where it is most."""

    patterns: int = 0
    """Of one string."""
    multiple: int = 0
    """Of one number, counted in its last decimal; 0 where there is none."""
    names: int = 0
    """Patterns of names in one object."""


_NONE: Final = _Load()


def excess(schemas: Iterable[Node]) -> str | None:
    """Return what *schemas*, all together, have too much of to be compiled; None where nothing.

    Where keywords lead to the same value, as allOf and $ref do, their loads add up, whichever of
    the value's parts they are for: a bound, and at times more than there is.
    """
    total = _Total()
    for schema in schemas:
        for node, load in _Meter(SchemaTree(schema)).loads():
            if load.patterns > _MAX_TOGETHER:
                return (
                    f"{load.patterns} patterns, formats and lengths hold for one string; at most"
                    f" {_MAX_TOGETHER}: put them into one pattern"
                )
            total.add(node, load)
    return total.excess()


class _Total:
    """What the schemas of one grammar hold together."""

    def __init__(self) -> None:
        self._multiple = 0
        self._num_pairs = 0
        self._num_chars = 0
        self._num_values = 0

    def add(self, node: Node, load: _Load) -> None:
        """Count *node*."""
        self._multiple += load.multiple if _adds("multipleOf", node) else 0
        self._num_pairs += load.names**2 if _adds("patternProperties", node) else 0
        names = node.get("patternProperties")
        patterns = [node.get("pattern"), *(names if isinstance(names, dict) else ())]
        self._num_chars += sum(len(each) for each in patterns if isinstance(each, str))
        self._num_values += len(list(members(node.get("enum"))))

    def excess(self) -> str | None:
        """Return what is too much."""
        counted = (
            (self._multiple, _MAX_MULTIPLE, "multipleOf, in units of its last decimal, comes to"),
            (self._num_pairs, _MAX_PATTERN_PAIRS, "pairs of patternProperties come to"),
            (self._num_chars, _MAX_PATTERN_CHARS, "characters of all patterns come to"),
            (self._num_values, _MAX_VALUES, "values of all enum come to"),
        )
        for count, most, what in counted:
            if count > most:
                return f"{what} more than {most}: use less, or leave some of it free"
        return None


def _adds(keyword: str, node: Node) -> bool:
    """Whether *node* has a *keyword* compiled for it, and not by another node alone."""
    return keyword in node or "allOf" in node or ("$ref" in node and len(node) > 1)


class _Meter:
    """Counts from the leaves to the root, without recursion: references may be long chains."""

    def __init__(self, tree: SchemaTree) -> None:
        self._tree = tree
        self._loads: dict[int, _Load] = {}
        self._decimals = 0

    def loads(self) -> Iterator[tuple[Node, _Load]]:
        """Yield every schema that a part of the value may have to keep to, with its load."""
        nodes = list(self._leaves_first())
        self._decimals = max(_num_decimals(node.get("multipleOf")) for node in nodes)
        for node in nodes:
            load = self._loads[id(node)] = self._load(node)
            yield node, load

    def _leaves_first(self) -> Iterator[Node]:
        """Yield each part once, behind those below it, as far as there is no circle."""
        root = self._tree.root
        seen = {id(root)}
        path = [(root, self._below(root))]
        while path:
            node, below = path[-1]
            child = next(below, None)
            if child is None:
                path.pop()
                yield node
            elif id(child) not in seen:
                seen.add(id(child))
                path.append((child, self._below(child)))

    def _below(self, node: Node) -> Iterator[Node]:
        found = () if self._tree.is_opaque(node) else self._tree.below(node)
        return (each for each in found if isinstance(each, dict))

    def _load(self, node: Node) -> _Load:
        own = _largest([_own(node), *map(self._of, inside(node))])
        target = self._of(self._tree.target(node.get("$ref")))
        choices = [map(self._of, members(node.get(name))) for name in ("anyOf", "oneOf")]
        also = map(self._of, members(node.get("allOf")))
        return self._sum([own, target, *map(_largest, choices), *also])

    def _of(self, part: Any) -> _Load:
        return self._loads.get(id(part), _NONE)

    def _sum(self, loads: list[_Load]) -> _Load:
        """Return the load of a value that has to keep to all of them."""
        multiples = [load.multiple for load in loads if load.multiple]
        # Of numbers with and without decimals the least common multiple is larger by as much.
        shift = 10**self._decimals if len(multiples) > 1 else 1
        return _Load(
            sum(load.patterns for load in loads),
            min(prod(multiples) * shift, _MAX_MULTIPLE + 1) if multiples else 0,
            sum(load.names for load in loads),
        )


def _own(node: Node) -> _Load:
    kinds = (("pattern",), ("format",), ("minLength", "maxLength"))
    num_patterns = sum(any(name in node for name in names) for names in kinds)
    names = node.get("patternProperties")
    num_names = len(names) if isinstance(names, dict) else 0
    value = node.get("multipleOf")
    multiple = int(Decimal(repr(value)).scaleb(_num_decimals(value))) if _is_number(value) else 0
    return _Load(num_patterns, min(multiple, _MAX_MULTIPLE + 1), num_names)


def _num_decimals(value: Any) -> int:
    exponent = Decimal(repr(value)).as_tuple().exponent if _is_number(value) else 0
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _largest(loads: Iterable[_Load]) -> _Load:
    """Return the load of a value that has to keep to one of them."""
    return _Load(*map(max, zip(*(_NONE, *loads), strict=True)))
