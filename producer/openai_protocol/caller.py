"""Caller: on whose behalf a request becomes jobs, and what it may do."""

from typing import Annotated, Final

from headwater.schemas import Priority, WireModel
from headwater.schemas.keys import PRIORITIES
from pydantic import Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Caller(WireModel):
    """A caller and its limits: one line of the key file."""

    name: Name
    sha256: Hash
    """Of the key. A key is 256 random bits, so a slow hash would protect nothing more."""
    namespace: Name = "default"
    """Where its jobs, files and batches live, apart from other namespaces'."""
    priority: Priority = Priority.NORMAL
    """The class of its jobs; it may ask for a lower one."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    max_queued: int | None = Field(default=None, ge=1)
    """Jobs of its that may wait in one queue."""

    @property
    def may_choose(self) -> bool:
        """Whether it may choose any namespace and priority: only where nobody needs a key."""
        return self == ANYONE

    def allows(self, priority: Priority) -> bool:
        """Whether it may submit jobs of this class."""
        return self.may_choose or PRIORITIES.index(priority) >= PRIORITIES.index(self.priority)


ANYONE: Final = Caller(name="anyone", sha256="0" * 64)
"""The caller of a server without a key file."""
