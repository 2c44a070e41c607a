"""The contestants of scenario bulk: the command from file to file, and mlx-lm on the same file."""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
from mlx_lm.generate import batch_generate

from ..engine.loading import LoadedModel
from .bulk import BulkSettings
from .environment import version
from .report import Figures
from .scenario import BenchError, Contest, Peer
from .sides import Lab

_WORDS = ("river", "spring", "rain", "mill", "bridge", "boat", "stone", "reed", "bank", "delta")


class _Sides:
    """The file's rows, and the texts that each side made of them."""

    def __init__(self, settings: BulkSettings, loaded: LoadedModel) -> None:
        self._settings = settings
        self._loaded = loaded
        self._texts: dict[str, list[str]] = {}
        system = self._system_prompt()
        rows = [
            {
                "prompt": f"{system}\nVisitor {index}: where is the {_WORDS[index % 10]}?\nGuide:",
                "max_tokens": settings.new_tokens,
            }
            for index in range(settings.rows)
        ]
        self._file = b"".join(orjson.dumps(row) + b"\n" for row in rows)

    def _system_prompt(self) -> str:
        dice = random.Random(0)  # noqa: S311 - the same text in every run
        words: list[str] = []
        tokenizer = self._loaded.tokenizer
        while len(tokenizer.encode(" ".join(words)).ids) < self._settings.shared_tokens:
            words.append(dice.choice(_WORDS))
        return " ".join(words)

    def run_ours(self) -> Figures:
        """Run the command: the start of its server and the load of its model included."""
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
            source, output = Path(folder) / "rows.jsonl", Path(folder) / "out.jsonl"
            source.write_bytes(self._file)
            command = [sys.executable, "-m", "headwater.producer.cli", "bulk", str(source)]
            options = ["--model", self._settings.model, "--json", "--ordered"]
            started = time.perf_counter()
            done = subprocess.run(  # noqa: S603 - our own command
                [*command, str(output), *options], capture_output=True, check=False
            )
            wall_s = time.perf_counter() - started
            if done.returncode:
                raise BenchError(f"headwater bulk failed: {done.stderr.decode().strip()}")
            rows = list(map(orjson.loads, output.read_bytes().splitlines()))
        self._texts["ours"] = [row["response"]["body"]["choices"][0]["text"] for row in rows]
        summary = orjson.loads(done.stdout)
        return {
            "wall_s": wall_s,
            "rows_wall_s": summary["wall_s"],
            "prompt_tokens": summary["prompt_tokens"],
            "generated_tokens": summary["generated_tokens"],
            "reused_share": summary["reused_share"],
        }

    def run_peer(self) -> Figures:
        """Run the loop: its model is loaded already."""
        started = time.perf_counter()
        tokenizer = self._loaded.tokenizer
        rows = map(orjson.loads, self._file.splitlines())
        prompts = [tokenizer.encode(row["prompt"]).ids for row in rows]
        token_ids: list[list[int]] = []
        for start in range(0, len(prompts), self._settings.peer_batch):
            reply = batch_generate(
                self._loaded.model,
                _PeerTokenizer(self._loaded),
                prompts[start : start + self._settings.peer_batch],
                max_tokens=self._settings.new_tokens,
                return_token_ids=True,
            )
            token_ids += reply.token_ids or []
        wall_s = time.perf_counter() - started
        self._texts["peer"] = [tokenizer.decode(ids) for ids in token_ids]
        return {
            "wall_s": wall_s,
            "rows_wall_s": wall_s,
            "prompt_tokens": sum(map(len, prompts)),
            "generated_tokens": sum(map(len, token_ids)),
            "reused_share": 0.0,
        }

    def ratio(self, ours: Figures, peer: Figures) -> Figures:
        """Return what a reader compares first."""
        pairs = list(zip(self._texts["ours"], self._texts["peer"], strict=True))
        return {
            "speedup": peer["wall_s"] / ours["wall_s"],
            "speedup_without_start": peer["wall_s"] / ours["rows_wall_s"],
            "same_text": sum(mine == theirs for mine, theirs in pairs) / len(pairs),
        }


class _PeerTokenizer:
    """What batch_generate asks of mlx-lm's tokenizer."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.eos_token_ids = loaded.eos_token_ids
        self._tokenizer = loaded.tokenizer

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def prepare(settings: BulkSettings) -> Contest:
    """Make the file's rows, and load the peer's model."""
    sides = _Sides(settings, Lab(settings.model).loaded)
    peer = Peer("mlx-lm batch_generate in a loop", version("mlx-lm") or "", sides.run_peer)
    return Contest(sides.run_ours, (peer,), sides.ratio)
