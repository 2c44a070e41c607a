"""The yardstick: a prompt alone, without any cache, and what counts as equal to it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np
from headwater.schemas import SamplingParams
from headwater.worker.engine.draws import stream_key, uniforms
from headwater.worker.sequence import Sequence

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


def adjust_alone(
    logits: np.ndarray, params: SamplingParams, prompt: Seq[int], output: Seq[int]
) -> np.ndarray:
    """Change one row of *logits* in float64 as the parameters say, token by token."""
    logits = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    history = [*prompt, *output]
    for token in set(history[-params.repetition_window :] if params.repetition_window else history):
        factor = params.repetition_penalty
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    for token in set(output):
        logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * list(output).count(token)
    logits[list(params.bad_token_ids)] = -np.inf
    return logits


class Draw(NamedTuple):
    """The yardstick's draw: its token, and how far the number was from another one's share."""

    token: int
    margin: float


def draw_alone(logits: np.ndarray, params: SamplingParams, uniform: float) -> Draw:
    """Draw from one row of *logits* in float64, step by step as DESIGN describes it.

    The margin of a greedy choice is its lead over the second best.
    """
    logits = logits.astype(np.float64)
    if params.temperature == 0:
        second, best = np.argsort(logits, kind="stable")[-2:]
        return Draw(int(best), float(logits[best] - logits[second]))
    order = np.lexsort((np.arange(logits.size), -logits))
    below_peak = logits[order] - logits.max()
    mass = np.exp(below_peak)
    is_kept = np.arange(logits.size) < (params.top_k or logits.size)
    if params.top_p < 1:
        is_kept &= np.cumsum(mass) - mass < params.top_p * mass.sum()
    if params.min_p > 0:
        is_kept &= mass >= params.min_p
    edges = np.cumsum(np.exp(below_peak / params.temperature) * is_kept)
    edges /= edges[-1]
    rank = int(np.searchsorted(edges, uniform, side="right"))
    lower = edges[rank - 1] if rank else 0.0
    return Draw(int(order[rank]), min(uniform - lower if rank else 1.0, edges[rank] - uniform))


@dataclass
class ExactnessReport:
    """Counts rows compared with the yardstick, and judges them together at the end."""

    num_rows: int = 0
    near_tie: float = NEAR_TIE
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
            (self.near_ties if second and gap < self.near_tie else self.failures).append(where)
            return

    def compare_drawn(self, model: Any, row: Sequence, label: str = "") -> None:
        """Compare the drawn output of *row* with the same draws from its prompt alone."""
        self.num_rows += 1
        prompt, output = row.job.prompt_token_ids, row.output_token_ids
        if not output:
            return
        logits = np.array(logits_alone(model, [*prompt, *output])[len(prompt) - 1 : -1])
        keys = np.full(len(output), stream_key(row.job, row.choice), np.uint64)
        numbers = uniforms(keys, np.arange(len(output), dtype=np.uint64))
        for step, token in enumerate(output):
            adjusted = adjust_alone(logits[step], row.job.sampling, prompt, output[:step])
            expected = draw_alone(adjusted, row.job.sampling, float(numbers[step]))
            if token != expected.token:
                where = f"{label} step {step}: {token} for {expected}"
                is_near = abs(expected.margin) < NEAR_TIE
                (self.near_ties if is_near else self.failures).append(where)
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
