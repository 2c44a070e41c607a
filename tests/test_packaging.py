"""That what is installed is whole, and stands beside a user's own modules."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "producer", "worker")


def test_the_list_of_packages_is_complete() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = (
        path.parent.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    )

    found = {"headwater." + ".".join(folder.parts) for folder in folders}
    assert set(setup["tool"]["setuptools"]["packages"]) == found


def test_every_module_lies_in_a_package() -> None:
    orphans = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert orphans == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from what git would take along and unpacked like an installation."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("site")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "README.md").touch()
    pip = [sys.executable, "-m", "pip", "install", "--verbose", "--no-deps", "--no-index"]
    command = [*pip, "--no-build-isolation", "--target", str(target), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # Who installs from source would read setuptools' pages of advice.
    assert "BuildBackendWarning" not in result.stdout + result.stderr
    return target


def test_the_wheel_holds_every_module_and_data_file(installed: Path) -> None:
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for pattern in ("*.py", "*.typed", "*.json", "*.lua")
        for path in (ROOT / package).rglob(pattern)
    }

    root = installed / "headwater"
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert wanted - found == set()


def test_the_wheel_owns_no_other_top_level_name(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}

    assert names == {"headwater", "bin"}


def test_the_wheel_imports_beside_a_users_own_worker_and_schemas(
    installed: Path, tmp_path: Path
) -> None:
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    code = (
        "import worker, schemas, producer\n"
        "assert worker.MINE and schemas.MINE and producer.MINE\n"
        "import headwater.schemas, headwater.worker.sequence\n"
        "from headwater.producer import client, tail\n"
        "from headwater.producer.cli import main\n"
        "print(headwater.schemas.__file__)\n"
        "main(['--version'])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    where, version = result.stdout.splitlines()
    assert where.startswith(str(installed))
    assert version.startswith("headwater ")
