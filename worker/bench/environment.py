"""Where a benchmark ran: machine, versions, threads, commit."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ..engine.blas import preload

_DISTRIBUTIONS = ("headwater", "mlx", "mlx-lm", "tokenizers", "transformers", "redis", "rq", "mkl")
_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge the figures."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "blas": preload().name,
        "versions": {name: found for name in _DISTRIBUTIONS if (found := version(name))},
        "threads": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }


def version(distribution: str) -> str | None:
    """Return the installed version of *distribution*, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit that runs, `-dirty` after it when files differ; None outside git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    folder = Path(__file__).resolve().parent
    result = subprocess.run(  # noqa: S603 - fixed arguments, no shell
        [git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
