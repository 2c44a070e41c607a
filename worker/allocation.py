"""Allocation: in what pieces a runner takes memory for the tokens of its rows."""

from typing import Final, NamedTuple


class Allocation(NamedTuple):
    """What rows hold above what they use, in tokens."""

    page_tokens: int = 1
    """Memory of a row grows by so many tokens."""
    tail_tokens: int = 0
    """Room of a row's newest tokens, beside full pages."""
    spare_tokens: int = 0
    spare_share: float = 0.0
    """What is kept of rows that have gone, at most: the larger of the two, the share being of what
    the rows that are left hold."""

    def held_tokens(self, num_tokens: int) -> int:
        """Tokens that fit into the memory of a row that uses *num_tokens*, at most."""
        return num_tokens // self.page_tokens * self.page_tokens + self.tail_tokens


EXACT: Final = Allocation()
"""Nothing is held that is not used."""
