"""FileGroup: the files of one entry, found by their names alone."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_MODEL: Final = re.compile("[0-9a-f]{32}")
_OURS: Final = re.compile(r"([0-9a-f]{40}-\d{1,9}-\d{1,9})\..*(?:json|safetensors|tmp)")
"""Whatever else lies in the directory, models say, is somebody else's and stays."""


class FileGroup(NamedTuple):
    """The files of one entry, or what a dead writer left of one."""

    stem: str
    """The common part of their names."""
    paths: list[Path]
    """The sidecar first, where there is one."""
    has_sidecar: bool
    used_ns: int
    """Time of the last use, Unix nanoseconds."""
    nbytes: int

    @property
    def model(self) -> str:
        """The name of its model's folder."""
        return self.paths[0].parent.name

    def remove(self) -> None:
        """Remove the files, the sidecar first."""
        for path in self.paths:
            path.unlink(missing_ok=True)


def file_groups(root: Path) -> Iterator[FileGroup]:
    """Yield everything of ours below *root*; files that go in the meantime are left out."""
    found: dict[tuple[str, str], list[tuple[Path, os.stat_result]]] = {}
    for path in root.glob("*/*"):
        ours = _OURS.fullmatch(path.name)
        if ours is None or not _MODEL.fullmatch(path.parent.name):
            continue
        with suppress(FileNotFoundError):
            found.setdefault((path.parent.name, ours[1]), []).append((path, path.stat()))
    for (_, stem), members in found.items():
        members.sort(key=lambda member: member[0].suffix != ".json")
        first, status = members[0]
        yield FileGroup(
            stem,
            [path for path, _ in members],
            first.suffix == ".json",
            status.st_mtime_ns,
            sum(each.st_size for _, each in members),
        )
