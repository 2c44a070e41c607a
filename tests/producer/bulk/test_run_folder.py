from pathlib import Path
from typing import Any

import pytest
from headwater.producer.bulk.run_folder import RunFolder, RunRefused

IDENTITY: dict[str, dict[str, Any]] = {
    "input": {"sha256": "abc"},
    "settings": {"seed": None, "defaults": {"stop": ("x",)}},
}
MODEL = {"model": {"source": "tiny", "vocab_size": 256}}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def folder(output: Path, *, force: bool = False) -> RunFolder:
    return RunFolder(output, output.with_suffix(".errors"), force=force)


def test_the_same_run_goes_on_under_its_id(output: Path) -> None:
    with folder(output) as first:
        first.check(IDENTITY)
        run_id = first.enter(IDENTITY | MODEL)
    output.write_text("{}\n")

    with folder(output) as second:
        second.check(IDENTITY)
        assert second.enter(IDENTITY | MODEL) == run_id


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("input", {"sha256": "abd"}, "input changed"),
        ("settings", {"seed": 1, "defaults": {"stop": ("x",)}}, "seed was None, is 1"),
        ("settings", {"seed": None, "defaults": {}}, "settings changed"),
        ("model", {"source": "tiny", "vocab_size": 300}, "model changed"),
    ],
)
def test_a_changed_input_model_or_setting_is_refused_unless_forced(
    output: Path, section: str, values: dict[str, Any], said: str
) -> None:
    with folder(output) as first:
        run_id = first.enter(IDENTITY | MODEL)
    output.write_text("{}\n")
    changed = IDENTITY | MODEL | {section: values}

    with folder(output) as second, pytest.raises(RunRefused, match=said):
        second.enter(changed)
    assert output.exists()

    with folder(output, force=True) as third:
        assert third.enter(changed) != run_id
    assert not output.exists()


def test_a_file_that_no_run_wrote_is_not_touched(output: Path) -> None:
    output.write_text("precious\n")

    with folder(output) as run, pytest.raises(RunRefused, match="no run of ours"):
        run.check(IDENTITY)

    assert output.read_text() == "precious\n"


def test_two_processes_do_not_do_one_run(output: Path) -> None:
    with folder(output), pytest.raises(RunRefused, match="another process"):
        folder(output)


def test_a_note_that_is_none_is_refused(output: Path) -> None:
    with folder(output) as run:
        (run.path / "run.json").write_bytes(b"\0\0")

        with pytest.raises(RunRefused, match="begin anew"):
            run.check(IDENTITY)


def test_an_ended_run_keeps_its_note_and_its_logs_only(output: Path) -> None:
    with folder(output) as run:
        run.enter(IDENTITY)
        (run.path / "server").mkdir()
        (run.path / "server" / "data").touch()
        (run.path / "worker-1.log").touch()
        (run.path / "input").touch()

        run.clear()

        left = {child.name for child in run.path.iterdir()}
    assert left == {".lock", "run.json", "worker-1.log"}


def test_a_run_of_which_nothing_came_leaves_no_folder(output: Path) -> None:
    with folder(output) as run:
        assert run.path.exists()

    assert not run.path.exists()
