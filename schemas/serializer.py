"""The serializer handed to RQ: orjson instead of its default, pickle."""

from typing import Any

import orjson


class OrjsonSerializer:
    """RQ's serializer protocol over orjson; nothing that came from Redis is unpickled."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Return *value* as JSON bytes."""
        return orjson.dumps(value)

    @staticmethod
    def loads(data: bytes) -> Any:
        """Parse JSON bytes; raises orjson.JSONDecodeError (a ValueError)."""
        return orjson.loads(data)
