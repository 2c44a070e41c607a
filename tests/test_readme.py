"""The README's promises that can be checked without running its demo."""

import re
from pathlib import Path

from headwater.producer.api.settings import settings_table as api_settings_table
from headwater.producer.cli.app import command_names
from headwater.producer.settings_table import settings_table as producer_settings_table
from headwater.worker.settings import settings_table

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_the_settings_tables_are_the_codes_own() -> None:
    assert settings_table() in README
    assert api_settings_table() in README
    assert producer_settings_table() in README


def test_every_command_is_in_the_readme_and_every_command_in_it_exists() -> None:
    listed = re.findall(r"^\| `headwater (\w+)", README, re.MULTILINE)

    assert sorted(listed) == sorted(command_names())


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text("utf-8")

    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
