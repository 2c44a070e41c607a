import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from headwater.producer.cli import app
from headwater.schemas import HeadwaterError
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_help_of_the_whole_lists_every_command_module() -> None:
    result = run_python("from headwater.producer.cli import main; main(['--help'])")

    assert result.returncode == 0
    for name in app.command_names():
        assert name in result.stdout


@pytest.mark.parametrize("name", app.command_names())
def test_a_commands_help_has_an_example_and_imports_nothing_slow(name: str) -> None:
    code = (
        "import sys, atexit\n"
        "slow = {'mlx', 'mlx_lm', 'redis', 'rq', 'tokenizers', 'transformers', 'numpy'}\n"
        "atexit.register(lambda: print('loaded', sorted(slow & set(sys.modules))))\n"
        "from headwater.producer.cli import main\n"
        f"main([{name!r}, '--help'])\n"
    )

    result = run_python(code)

    assert result.returncode == 0, result.stderr
    assert "headwater " + name in result.stdout
    assert "Example" in result.stdout
    assert result.stdout.endswith("loaded []\n")


@pytest.mark.parametrize("name", ["bulk", "submit", "worker"])
def test_a_long_help_lists_every_option_in_one_group(name: str) -> None:
    """Only what all commands have stands in a group without a topic, at the end."""
    shown = CliRunner().invoke(app.build([name]), [name, "--help"]).stdout
    titles = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert len(titles) >= 4
    assert titles[-1] == "Options"
    (last,) = re.findall(r"^Options:\n(.*?)\n\n", shown, re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^  --", last, re.MULTILINE)) <= 4

    command = typer.main.get_command(app.build([name])).commands[name]
    flags = [opt for param in command.params for opt in param.opts if opt.startswith("--")]
    listed = re.findall(r"^  (--\S+)", shown, re.MULTILINE)
    assert sorted(listed) == sorted([*flags, "--help"])


def test_the_list_of_commands_holds_whole_sentences() -> None:
    """A first sentence that is too long for the list would be cut off with dots."""
    shown = CliRunner().invoke(app.build(["--help"]), ["--help"], terminal_width=80).stdout

    assert set(app.command_names()) <= set(re.findall(r"^  (\w+)", shown, re.MULTILINE))
    assert "..." not in shown.partition("Commands:")[2]


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as leaving:
        app.main(["nonsense"])

    assert leaving.value.code == 2


def test_our_errors_become_one_line() -> None:
    assert app.explain(HeadwaterError("first\nsecond")) == "first second"


def test_a_missing_extra_says_what_to_install() -> None:
    error = ModuleNotFoundError("No module named 'mlx_lm.utils'", name="mlx_lm.utils")

    assert app.explain(error) == (
        "this needs mlx_lm: pip install 'headwater[worker]',"
        " or in a checkout pip install '.[worker]'"
    )


def test_every_package_of_an_extra_that_is_missing_says_which_extra() -> None:
    """Whatever a module happens to import first."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = setup["project"]["optional-dependencies"]
    modules = {"python_multipart": "multipart"}

    for requirement in [*extras["worker"], *extras["api"], *extras["embedded"]]:
        package = re.split(r"[\[<>=;]", requirement)[0].replace("-", "_")
        module = modules.get(package, package)
        assert app.explain(ModuleNotFoundError(name=module)) is not None, module


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    assert (
        app.explain(ModuleNotFoundError("No module named 'headwater.x'", name="headwater.x"))
        is None
    )
    assert app.explain(KeyError("x")) is None
