from pathlib import Path

import pytest
from headwater import schemas
from headwater.schemas.export import json_schemas

FOLDER = Path(schemas.__file__).parent / "json"


def test_every_file_belongs_to_a_schema() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(json_schemas())


@pytest.mark.parametrize("name", json_schemas())
def test_the_exported_schema_is_in_step_with_the_code(name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == json_schemas()[name], "run ops/export-schemas"
