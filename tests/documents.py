"""The project's documents, taken apart: their code blocks and their tables."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PROTOCOL = "ops/PROTOCOL.md"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    line: int
    """Where its first line stands."""
    language: str
    text: str


def read(name: str) -> str:
    """Return a document's text, `read("ops/PROTOCOL.md")`."""
    return (ROOT / name).read_text("utf-8")


def blocks(name: str, language: str) -> list[Block]:
    """Return a document's blocks in *language*."""
    text = read(name)
    return [
        Block(name, text.count("\n", 0, found.start(2)) + 1, language, found.group(2))
        for found in _BLOCK.finditer(text)
        if found.group(1) == language
    ]


def write_javascript(folder: Path) -> None:
    """Write the protocol's JavaScript, each block into the file that its first line names."""
    for block in blocks(PROTOCOL, "js"):
        name = block.text.removeprefix("// ").partition(":")[0]
        (folder / name).write_text(block.text)


def node() -> str:
    """Return the program that runs it; skips the test where there is none."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("no node here: install Node.js 18 or later to run the documents' JavaScript")
    return program


def sections(text: str) -> dict[str, str]:
    """Return what stands under each heading, up to the next one."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_cells(text: str) -> list[str]:
    """Return what stands in backticks in the first column of the tables in *text*."""
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
