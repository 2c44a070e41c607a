"""The yardstick: a prompt alone, without any cache, and what counts as equal to it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

NEAR_TIE: Final = 1e-3
"""Logits closer than this may swap places by rounding."""
MAX_LOGIT_ERROR: Final = 1e-3
MAX_NEAR_TIE_SHARE: Final = 1 / 200


def logits_alone(model: Any, token_ids: Seq[int]) -> mx.array:
    """Return the logits after every token, (tokens, vocabulary), from one uncached forward."""
    return model(mx.array([list(token_ids)]))[0]


def greedy_alone(model: Any, prompt: Seq[int], num_new_tokens: int) -> list[int]:
    """Generate greedily by a whole forward without a cache for every token."""
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        tokens.append(int(mx.argmax(logits_alone(model, tokens)[-1])))
    return tokens[len(prompt) :]


@dataclass
class ExactnessReport:
    """Counts rows compared with the yardstick, and judges them together at the end."""

    num_rows: int = 0
    near_ties: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def compare(self, model: Any, prompt: Seq[int], output: Seq[int], label: str = "") -> None:
        """Compare greedy *output* with the same prompt alone.

        One teacher-forced forward over prompt and output gives the reference's logits at every
        step up to the first difference, which is all that greedy decoding needs.
        """
        self.num_rows += 1
        if not output:
            return
        token_ids = [*prompt, *output]
        logits = logits_alone(model, token_ids)[len(prompt) - 1 : -1]
        expected = mx.argmax(logits, axis=-1).tolist()
        for step, (token, best) in enumerate(zip(output, expected, strict=True)):
            if token == best:
                continue
            gap = float(logits[step, best] - logits[step, token])
            second = int(mx.sum(logits[step] > logits[step, token])) == 1
            where = f"{label} step {step}: {token} for {best}, {gap:.6f} below"
            (self.near_ties if second and gap < NEAR_TIE else self.failures).append(where)
            return

    def check(self) -> None:
        """Fail on any real difference, or on more near ties than rounding explains."""
        assert not self.failures, self.failures
        allowed = max(1, int(self.num_rows * MAX_NEAR_TIE_SHARE))
        assert len(self.near_ties) <= allowed, (self.num_rows, self.near_ties)


def assert_logits_close(actual: mx.array, expected: mx.array) -> None:
    """Fail where any logit is off by more than rounding may make it."""
    error = float(mx.max(mx.abs(actual - expected)))
    assert error <= MAX_LOGIT_ERROR, f"a logit is off by {error}"
