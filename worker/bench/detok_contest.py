"""The contestants of scenario detok: our text stage, mlx-lm's detokenizer, DecodeStream."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from headwater.schemas import GenerationJob
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..engine.demo_model import DEMO_ALIAS, fetch_demo
from ..text import SequenceText, Vocabulary, start_detokenizer
from ..text.detokenizer import ByteDetokenizer
from ..text.vocabulary import to_bytes
from .detok import DetokSettings
from .environment import version
from .report import Figures
from .scenario import BenchError, Contest, Peer

Step: TypeAlias = Callable[[int], Any]
Start: TypeAlias = Callable[[], Step]
"""Makes a fresh detokenizer and returns its step for one token."""

_TEXT = """\
def greet(name: str = "세계") -> str:
    # 한국어 주석: 이름을 받아 인사말을 돌려줍니다.
    emoji = "🙂👩‍👩‍👧🌶️"
    return f"안녕하세요, {name}! {emoji}" if name else "…"

The quick brown fox jumps over the lazy dog; naïve café, ďábelské ódy.
"""


class _Work(NamedTuple):
    """The same *edge* tokens over and over: head and tail differ in their history only."""

    tokenizer: Tokenizer
    edge: list[int]
    num_edges: int


def prepare(settings: DetokSettings) -> Contest:
    """Tokenize the text and start the peers."""
    folder = _model_folder(settings.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = tokenizer.encode(_TEXT, add_special_tokens=False).ids
    edge = (token_ids * (settings.edge // len(token_ids) + 1))[: settings.edge]
    work = _Work(tokenizer, edge, max(2, settings.num_tokens // settings.edge))
    vocabulary = Vocabulary(tokenizer)
    return Contest(
        ours=lambda: _ours(work, vocabulary),
        peers=(_mlx_lm(work, folder), _decode_stream(work)),
        ratio=_ratio,
    )


def _ratio(ours: Figures, peer: Figures) -> Figures:
    return {
        "speedup": peer["host_us_per_token"] / ours["host_us_per_token"],
        "tail_over_head": ours["tail_over_head"],
    }


def _ours(work: _Work, vocabulary: Vocabulary) -> Figures:
    prompt = work.edge[:8]
    job = GenerationJob(
        job_id="bench",
        model="bench",
        prompt_token_ids=tuple(prompt),
        max_tokens=len(work.edge) * work.num_edges + 1,
        stop=("</answer>", "\n\n\n"),
    )

    def start_whole_stage() -> Step:
        text = SequenceText(vocabulary, job)

        def step(token_id: int) -> None:
            text.push(token_id)
            text.take()

        return step

    return {
        **_timed(work, lambda: start_detokenizer(vocabulary, prompt).push),
        "with_stops_and_delta_us_per_token": _timed(work, start_whole_stage)["host_us_per_token"],
        **_decoded_bytes(work, vocabulary),
    }


def _timed(work: _Work, start: Start) -> Figures:
    """Return the mean cost of a token, and the last edge's time over the first one's."""
    _run_edge(start(), work.edge)
    step = start()
    times = [_run_edge(step, work.edge) for _ in range(work.num_edges)]
    num_tokens = len(work.edge) * work.num_edges
    return {
        "host_us_per_token": sum(times) / num_tokens * 1e6,
        "tail_over_head": times[-1] / times[0],
    }


def _run_edge(step: Step, token_ids: list[int]) -> float:
    started = time.perf_counter()
    for token_id in token_ids:
        step(token_id)
    return time.perf_counter() - started


def _decoded_bytes(work: _Work, vocabulary: Vocabulary) -> Figures:
    """Return the bytes handed to the decoder per token, held ones again, at both edges."""
    if vocabulary.pieces is None:
        return {}
    detokenizer = ByteDetokenizer(vocabulary.pieces)
    sizes = []
    for token_id in work.edge * work.num_edges:
        piece = to_bytes(vocabulary.pieces[token_id])
        sizes.append(detokenizer.num_held_bytes + len(piece))
        detokenizer.push(token_id)
    length = len(work.edge)
    return {
        "bytes_per_token_head": sum(sizes[:length]) / length,
        "bytes_per_token_tail": sum(sizes[-length:]) / length,
    }


def _decode_stream(work: _Work) -> Peer:
    def start() -> Step:
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(work.tokenizer, token_id)

    return Peer("DecodeStream", version("tokenizers") or "", lambda: _timed(work, start))


def _mlx_lm(work: _Work, folder: Path) -> Peer:
    from mlx_lm.tokenizer_utils import load

    tokenizer = load(folder)

    def start() -> Step:
        detokenizer = tokenizer.detokenizer
        detokenizer.reset()

        def step(token_id: int) -> str:
            detokenizer.add_token(token_id)
            segment: str = detokenizer.last_segment
            return segment

        return step

    return Peer("mlx-lm", version("mlx-lm") or "", lambda: _timed(work, start))


def _model_folder(model: str) -> Path:
    folder = fetch_demo() if model == DEMO_ALIAS else Path(model)
    if not (folder / "tokenizer.json").is_file():
        raise BenchError(f"no tokenizer.json in {folder}: give --model a model directory")
    return folder
