"""RateLimit: a token bucket a caller. Plain Python with the time passed in."""

from dataclasses import dataclass

_WINDOW_S = 60.0


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class RateLimit:
    """Lets each name make so many requests a minute, the first of them at once.

    It counts in this process: two servers let twice as many through.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, name: str, per_minute: int, now_s: float) -> float:
        """Count one request if it may be made now: 0. Else return the seconds until it may."""
        bucket = self._buckets.setdefault(name, _Bucket(per_minute, now_s))
        gained = (now_s - bucket.at_s) * per_minute / _WINDOW_S
        bucket.tokens = min(per_minute, bucket.tokens + gained)
        bucket.at_s = now_s
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return 0.0
        return (1 - bucket.tokens) * _WINDOW_S / per_minute
