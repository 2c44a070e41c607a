"""The contestants of scenario bulk: the command from file to file, and mlx-lm on the same file."""

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from mlx_lm.generate import batch_generate

from ..engine.loading import LoadedModel
from .bulk import BulkSettings
from .environment import version
from .report import Figures
from .scenario import BenchError, Contest, Peer
from .sides import Lab

_WORDS = ("river", "spring", "rain", "mill", "bridge", "boat", "stone", "reed", "bank", "delta")


@dataclass
class _Files:
    """The rows, and the texts that each side made of them."""

    settings: BulkSettings
    loaded: LoadedModel
    folder: Path

    def __post_init__(self) -> None:
        self.rows = self.folder / "rows.jsonl"
        self.texts: dict[str, list[str]] = {}
        system = self._system_prompt()
        rows = [
            {
                "prompt": f"{system}\nVisitor {index}: where is the {_WORDS[index % 10]}?\nGuide:",
                "max_tokens": self.settings.new_tokens,
            }
            for index in range(self.settings.rows)
        ]
        self.rows.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))

    def _system_prompt(self) -> str:
        dice = random.Random(0)  # noqa: S311 - the same text in every run
        words: list[str] = []
        while len(self.loaded.tokenizer.encode(" ".join(words)).ids) < self.settings.shared_tokens:
            words.append(dice.choice(_WORDS))
        return " ".join(words)

    def run_ours(self) -> Figures:
        """Run the command: the start of its server and the load of its model included."""
        output = self.folder / "out.jsonl"
        command = [sys.executable, "-m", "headwater.producer.cli", "bulk", str(self.rows)]
        options = ["--model", self.settings.model, "--json", "--force", "--ordered"]
        started = time.perf_counter()
        done = subprocess.run(  # noqa: S603 - our own command
            [*command, str(output), *options], capture_output=True, check=False
        )
        wall_s = time.perf_counter() - started
        if done.returncode:
            raise BenchError(f"headwater bulk failed: {done.stderr.decode().strip()}")
        rows = map(orjson.loads, output.read_bytes().splitlines())
        self.texts["ours"] = [row["response"]["body"]["choices"][0]["text"] for row in rows]
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
        rows = [orjson.loads(line) for line in self.rows.read_bytes().splitlines()]
        tokenizer = self.loaded.tokenizer
        prompts = [tokenizer.encode(row["prompt"]).ids for row in rows]
        token_ids: list[list[int]] = []
        for start in range(0, len(prompts), self.settings.peer_batch):
            reply = batch_generate(
                self.loaded.model,
                _PeerTokenizer(self.loaded),
                prompts[start : start + self.settings.peer_batch],
                max_tokens=self.settings.new_tokens,
                return_token_ids=True,
            )
            token_ids += reply.token_ids or []
        wall_s = time.perf_counter() - started
        self.texts["peer"] = [tokenizer.decode(ids) for ids in token_ids]
        num_prompt_tokens = sum(map(len, prompts))
        return {
            "wall_s": wall_s,
            "rows_wall_s": wall_s,
            "prompt_tokens": num_prompt_tokens,
            "generated_tokens": sum(map(len, token_ids)),
            "reused_share": 0.0,
        }

    def ratio(self, ours: Figures, peer: Figures) -> Figures:
        """Return what a reader compares first."""
        pairs = list(zip(self.texts["ours"], self.texts["peer"], strict=True))
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
    """Write the file, and load the peer's model."""
    lab = Lab(settings.model)
    folder: Any = tempfile.TemporaryDirectory(prefix="headwater-bench-")
    files = _Files(settings, lab.loaded, Path(folder.name))

    def ours() -> Figures:
        # The folder lives as long as this function does.
        assert folder
        return files.run_ours()

    peer = Peer("mlx-lm batch_generate in a loop", version("mlx-lm") or "", files.run_peer)
    return Contest(ours, (peer,), files.ratio)
