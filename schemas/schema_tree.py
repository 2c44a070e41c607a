"""How the parts of a JSON schema hang together: what lies below one, and where references lead."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

Node: TypeAlias = dict[str, Any]


class SchemaTree:
    """A schema and its parts. What is no schema, or leads nowhere, is left to others to refuse."""

    def __init__(self, root: Node) -> None:
        self.root = root

    def below(self, node: Node) -> Iterator[Any]:
        """Yield what a part of a value, or the value itself, may have to keep to by *node*."""
        yield self.target(node.get("$ref"))
        for name in ("allOf", "anyOf", "oneOf"):
            yield from members(node.get(name))
        yield from inside(node)

    def target(self, reference: Any) -> Any:
        """Return what a pointer into the schema leads to; None where it is no such pointer."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node: Any = self.root
        path, *names = unquote(reference[1:]).split("/")
        if path:
            return None
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                node = node.get(key) if isinstance(node, dict) else None
        return node

    def is_opaque(self, node: Node) -> bool:
        """Whether pointers below *node* start there: it has a name of its own."""
        return "$id" in node and node is not self.root


def inside(node: Node) -> Iterator[Any]:
    """Yield what the parts of a value have to keep to by *node*."""
    for name in ("properties", "patternProperties"):
        yield from values(node.get(name))
    yield from members(node.get("prefixItems"))
    items = node.get("items")
    yield from members(items) if isinstance(items, list) else [items]
    yield node.get("additionalItems")
    yield node.get("additionalProperties")


def values(value: Any) -> Iterable[Any]:
    """Return the values of *value*, if it is an object."""
    return value.values() if isinstance(value, dict) else ()


def members(value: Any) -> Iterable[Any]:
    """Return the members of *value*, if it is an array."""
    return value if isinstance(value, list) else ()
