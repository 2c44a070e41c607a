"""The BLAS under MLX on a Linux CPU: loaded before mlx, the fastest of those found.

The mlx wheel for Linux links the reference BLAS, about 100 times slower than a tuned one. A
library that is loaded first, with global symbols, takes over its `cblas_sgemm`. This module
imports nothing of MLX, and must be used before anything does.
"""

import ctypes
import ctypes.util
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import structlog
from headwater.schemas.errors import install_hint

log = structlog.get_logger()

_MKL = "libmkl_rt.so.3"
_OPENBLAS = ("libopenblas.so.0", "libopenblas.so")

_CORE_TYPES = (("avx512bw", "SkylakeX"), ("avx2", "Haswell"))
"""OpenBLAS releases that do not know a CPU fall back to its oldest kernels; by CPU flag."""


class BlasChoice(NamedTuple):
    """Which BLAS serves MLX's matrix products on the CPU."""

    name: str
    """`mkl`, `openblas`, `reference`, or `system` where MLX brings its own good one."""
    path: str | None = None

    @property
    def is_reference(self) -> bool:
        """Whether products run about 100 times slower than they could."""
        return self.name == "reference"


class BlasLoadedTooLate(RuntimeError):
    """mlx.core was imported before a BLAS could be put under it."""


_chosen: BlasChoice | None = None


def preload(num_threads: int | None = None) -> BlasChoice:
    """Load the fastest BLAS found, for this process; later calls return the first one's choice.

    *num_threads* limits its threads; None leaves the library's default, all cores. Raises
    BlasLoadedTooLate when mlx.core is imported already.
    """
    global _chosen
    if _chosen is None:
        _chosen = _load(num_threads) if sys.platform == "linux" else BlasChoice("system")
    return _chosen


def _load(num_threads: int | None) -> BlasChoice:
    if "mlx.core" in sys.modules:
        raise BlasLoadedTooLate(
            "mlx.core is imported already; call blas.preload() before anything imports mlx"
        )
    _limit_threads(num_threads)
    _let_threads_sleep()
    for name, path in _candidates():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return BlasChoice(name, path)
    if _has_cuda_backend():
        return BlasChoice("reference")
    log.warning(
        "reference_blas",
        advice="CPU inference will be about 100 times slower than it could be: "
        + advice(platform.machine()),
    )
    return BlasChoice("reference")


def _has_cuda_backend() -> bool:
    """Whether MLX is installed with CUDA: it then has no need of this where there is a GPU.

    Without a GPU it computes on the CPU all the same, and `headwater doctor` finds that out.
    """
    names = {str(one.metadata["Name"]).lower() for one in metadata.distributions()}
    return any(name.startswith("mlx-cuda") for name in names)


def advice(machine: str) -> str:
    """Return what to install for a fast BLAS on a CPU of kind *machine*."""
    if machine == "x86_64":
        return install_hint("cpu")
    return "install OpenBLAS (Debian: apt-get install libopenblas0-pthread)"


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield (name, path) of what may be there, fastest first."""
    mkl = Path(sys.prefix) / "lib" / _MKL
    yield "mkl", str(mkl) if mkl.exists() else _MKL
    _pick_openblas_kernels()
    for soname in _OPENBLAS:
        yield "openblas", soname
    found = ctypes.util.find_library("openblas")
    if found:
        yield "openblas", found


# These libraries read their settings from the environment when they are loaded, and offer no
# other way that works for all of their builds.


def _limit_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        for variable in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ[variable] = str(num_threads)


def _let_threads_sleep() -> None:
    """Have MKL's threads wait asleep, after a millisecond, for the next product.

    By default they spin for 200 ms, on cores that the threads who speak to Redis need.
    """
    os.environ.setdefault("KMP_BLOCKTIME", "1")


def _pick_openblas_kernels() -> None:
    if "OPENBLAS_CORETYPE" in os.environ:
        return
    flags = _cpu_flags()
    for flag, core_type in _CORE_TYPES:
        if flag in flags:
            os.environ["OPENBLAS_CORETYPE"] = core_type
            return


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
