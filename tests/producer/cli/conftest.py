"""The command line, run in this process."""

from typing import NamedTuple

import pytest
from headwater.producer.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the command line in this process: `run("tail", "job")`."""
    monkeypatch.setenv("HEADWATER_REDIS", redis_url)

    def run(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        return Outcome(int(leaving.value.code or 0), *capsys.readouterr())

    return run
