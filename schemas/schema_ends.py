"""Whether a JSON schema can be satisfied by a value of finite depth."""

from collections.abc import Iterable
from typing import Any, Final

from .schema_tree import Node, SchemaTree, members

_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_MAX_VISITS: Final = 50_000
"""Some tenths of a second. What is not judged by then passes: its grammar would be refused for
its size long before."""
_MAX_DEPTH: Final = 100
"""Of references and combinations that lead to each other; far below Python's own limit."""


def endless_reference(schema: Node) -> str | None:
    """Return a reference of *schema* whose value would never end; None where all can.

    An output that enters such a definition can only be cut off. It is looked for wherever a
    value may come to, not only where one must. References that are no pointers into the schema
    itself, and keywords that a grammar can't enforce, count as what can end.
    """
    try:
        return _Judge(schema).endless()
    except _TooLarge:
        return None


class _TooLarge(Exception):
    """Too much to judge."""


class _Judge:
    """Finds the schemas that can end as a least fixpoint: at first none can."""

    def __init__(self, root: Node) -> None:
        self._tree = SchemaTree(root)
        self._num_visits = 0
        self._can_end: set[int] = set()
        """By identity: parts of the schema, which lives as long as we do."""

    def endless(self) -> str | None:
        """Return the first reference, in the order of the schema, whose target can't end."""
        nodes = self._reachable()
        order = nodes
        is_changed = True
        while is_changed:
            # To and fro: a chain of references is done in one round, whichever way it runs.
            order = order[::-1]
            is_changed = False
            for node in order:
                if not self._ends(node) and self._judge(node):
                    self._can_end.add(id(node))
                    is_changed = True
        references = (node["$ref"] for node in nodes if isinstance(node.get("$ref"), str))
        targets = ((each, self._tree.target(each)) for each in [*references, "#"])
        return next((each for each, node in targets if not self._ends(node)), None)

    def _ends(self, schema: Any) -> bool:
        # Nothing but an object can refer to itself.
        return not isinstance(schema, dict) or id(schema) in self._can_end

    def _visit(self) -> None:
        self._num_visits += 1
        if self._num_visits > _MAX_VISITS:
            raise _TooLarge

    def _reachable(self) -> list[Node]:
        """Return every schema that a part of the value may have to keep to, from the root down."""
        found: dict[int, Node] = {}
        waiting: list[Any] = [self._tree.root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict) and id(node) not in found:
                self._visit()
                found[id(node)] = node
                waiting += [] if self._tree.is_opaque(node) else self._tree.below(node)
        return list(found.values())

    def _judge(self, node: Node) -> bool:
        """Return whether *node* can end, by what is known of the others so far."""
        if self._tree.is_opaque(node):
            return True
        together: dict[int, Node] = {}
        if not self._conjoin(node, together, set()):
            return False
        parts = list(together.values())
        if not all(self._has_way_out(part) for part in parts):
            return False
        types = frozenset.intersection(*map(_types, parts))
        # What contradicts itself is another's to refuse.
        return not types or any(self._can_end_as(kind, parts) for kind in types)

    def _conjoin(self, node: Node, found: dict[int, Node], path: set[int]) -> bool:
        """Collect the schemas that a value of *node* has to keep to; False if they are a circle."""
        self._visit()
        if id(node) in path:
            return False
        if len(path) >= _MAX_DEPTH:
            raise _TooLarge
        if id(node) in found or self._tree.is_opaque(node):
            return True
        found[id(node)] = node
        path.add(id(node))
        also = [self._tree.target(node.get("$ref")), *members(node.get("allOf"))]
        is_sound = all(self._conjoin(e, found, path) for e in also if isinstance(e, dict))
        path.discard(id(node))
        return is_sound

    def _has_way_out(self, part: Node) -> bool:
        for name in ("anyOf", "oneOf"):
            choices = list(members(part.get(name)))
            if choices and not any(map(self._ends, choices)):
                return False
        return True

    def _can_end_as(self, kind: str, parts: list[Node]) -> bool:
        if kind == "object":
            least = max(_count(part.get("minProperties")) for part in parts)
            required = _required(parts)
            return all(self._object_ends(part, required, least) for part in parts)
        if kind == "array":
            least = max(_count(part.get("minItems")) for part in parts)
            return all(self._array_ends(part, least) for part in parts)
        return True

    def _object_ends(self, part: Node, required: set[str], least: int) -> bool:
        properties = part.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        if not all(self._ends(properties[name]) for name in required & properties.keys()):
            return False
        others = part.get("additionalProperties", True)
        if "patternProperties" in part or (others is not False and self._ends(others)):
            # Whether a pattern takes a name in is not looked at: it might.
            return True
        num_ending = sum(map(self._ends, properties.values()))
        return num_ending >= least and (others is False or required <= properties.keys())

    def _array_ends(self, part: Node, least: int) -> bool:
        items, rest = part.get("items"), part.get("additionalItems")
        first = list(members(part.get("prefixItems")))
        if isinstance(items, list):
            first = items
        else:
            rest = items
        return all(map(self._ends, first[:least])) and (least <= len(first) or self._ends(rest))


def _required(parts: Iterable[Node]) -> set[str]:
    return {n for part in parts for n in members(part.get("required")) if isinstance(n, str)}


def _types(part: Node) -> frozenset[str]:
    values = list(members(part.get("enum"))) + ([part["const"]] if "const" in part else [])
    if values:
        # A value that is written down ends, whatever it is.
        return frozenset({"null"})
    kinds = part.get("type")
    named = [kinds] if isinstance(kinds, str) else list(members(kinds))
    return frozenset(kind for kind in named if isinstance(kind, str)) if named else _TYPES


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
