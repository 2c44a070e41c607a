"""The contestants of scenario kv-bits: the same model over quantized keys and values and floats."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..assembly import LoopSettings
from ..engine.kv_quantization import KVQuantization, QuantizedRunner, choose_quantization
from ..engine.segments import flatten, is_plain, state_arrays
from .kv_bits import KvBitsSettings
from .report import Figures
from .scenario import BenchError, Contest, Peer
from .sides import Lab, run_ours
from .workload import ALIAS, Arrivals, Prompts, make_job

_MODULES: Final = ("argparse", "asyncio", "decimal", "doctest", "email", "logging", "pickle")
_MODULES_TOO: Final = ("random", "string", "tarfile", "textwrap", "typing", "unittest", "zipfile")


class _Reading(NamedTuple):
    """What the model says of one text."""

    logprobs: mx.array
    """Of each next token, (tokens - 1,)."""
    likeliest: mx.array
    """The likeliest next token after each, (tokens,)."""
    bytes_per_token: float


def prepare(settings: KvBitsSettings) -> Contest:
    """Let the model read texts and decode, over floats first."""
    lab = Lab(settings.model)
    quantization = choose_quantization(lab.loaded.model, settings.bits)
    bench = _Bench(settings, lab, quantization)
    peer = Peer("headwater, floats", "this commit", bench.floats)
    return Contest(bench.quantized, (peer,), bench.ratio)


class _Bench:
    def __init__(self, settings: KvBitsSettings, lab: Lab, quantization: KVQuantization) -> None:
        self._settings = settings
        self._lab = lab
        self._quantization = quantization
        self._texts = list(_texts(lab, settings))
        self._expected = [_read(lab.loaded.model, text, None) for text in self._texts]

    def quantized(self) -> Figures:
        """Read and decode with codes; how far is it from floats?"""
        model = self._lab.loaded.model
        readings = [_read(model, text, self._quantization) for text in self._texts]
        pairs = list(zip(readings, self._expected, strict=True))
        same = [mx.mean(one.likeliest == other.likeliest) for one, other in pairs]
        off = [mx.mean(mx.abs(one.logprobs - other.logprobs)) for one, other in pairs]
        return {
            **_figures(readings),
            "greedy_tokens_equal": _mean(same),
            "mean_logprob_difference": _mean(off),
            **self._speed(QuantizedRunner(model, self._quantization)),
        }

    def floats(self) -> Figures:
        """Do the same without."""
        exact = {"greedy_tokens_equal": 1.0, "mean_logprob_difference": 0.0}
        return _figures(self._expected) | exact | self._speed(self._lab.runner)

    def ratio(self, ours: Figures, peer: Figures) -> Figures:
        """Return ours over the peer's."""
        return {
            "kv_bytes": ours["kv_bytes_per_token"] / peer["kv_bytes_per_token"],
            "perplexity": ours["perplexity"] / peer["perplexity"],
            "throughput": ours["generated_tokens_per_s"] / peer["generated_tokens_per_s"],
        }

    def _speed(self, runner: Any) -> Figures:
        prompts = Prompts(self._lab.loaded.vocab_size)
        jobs = [
            (0.0, make_job(f"job-{index}", prompts.tokens(32), self._settings.new_tokens))
            for index in range(self._settings.rows)
        ]
        record = run_ours(self._lab.with_runner(runner), Arrivals(jobs), LoopSettings(alias=ALIAS))
        return {"generated_tokens_per_s": record.figures()["generated_tokens_per_s"]}


def _texts(lab: Lab, settings: KvBitsSettings) -> Iterator[list[int]]:
    """Yield tokens of English that is on every machine: what Python says of its own modules."""
    found = (inspect.getdoc(import_module(name)) or "" for name in _MODULES + _MODULES_TOO)
    whole = lab.loaded.tokenizer.encode("\n\n".join(found)).ids
    whole = [token for token in whole if token < lab.loaded.vocab_size]
    needed = settings.texts * settings.tokens
    if len(whole) < needed:
        raise BenchError(f"there are {len(whole)} tokens of text, not {needed}: ask for fewer")
    for start in range(0, needed, settings.tokens):
        yield whole[start : start + settings.tokens]


def _read(model: Any, tokens: list[int], quantization: KVQuantization | None) -> _Reading:
    caches = quantization.make_caches(model) if quantization else make_prompt_cache(model)
    logits = model(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs[:-1], mx.array(tokens[1:])[:, None], axis=-1)[:, 0]
    likeliest = mx.argmax(logits, axis=-1)
    plain = [leaf for leaf in flatten(caches) if is_plain(leaf)]
    sizes = (array.nbytes / array.shape[2] for array in state_arrays(plain))
    reading = _Reading(chosen, likeliest, sum(sizes))
    mx.eval(chosen, likeliest)
    return reading


def _figures(readings: list[_Reading]) -> Figures:
    logprob = _mean([mx.mean(reading.logprobs) for reading in readings])
    return {
        "kv_bytes_per_token": readings[0].bytes_per_token,
        "perplexity": float(mx.exp(mx.array(-logprob))),
    }


def _mean(values: list[mx.array]) -> float:
    return float(mx.mean(mx.stack(values)))
