"""PrefixKeys: the names of a token sequence's prefixes on disk."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

_KEY_BYTES = 20


class PrefixKeys:
    """Hashes of the prefixes of one sequence, in one pass over its tokens."""

    def __init__(self, fingerprint: str, namespace: str, token_ids: Sequence[int]) -> None:
        # With their lengths, so that no two pairs run together into the same bytes.
        root = b"".join(
            len(part).to_bytes(8, "little") + part
            for part in (fingerprint.encode(), namespace.encode())
        )
        self._hash = hashlib.blake2b(root, digest_size=_KEY_BYTES)
        self._tokens = array("I", token_ids).tobytes()
        self._item = array("I").itemsize
        self._position = 0

    def at(self, ends: Iterable[int]) -> dict[int, str]:
        """Return the keys of the prefixes that end at *ends*, ascending from the last call's."""
        keys: dict[int, str] = {}
        for end in ends:
            chunk = self._tokens[self._position * self._item : end * self._item]
            self._hash.update(chunk)
            self._position = end
            keys[end] = self._hash.hexdigest()
        return keys
