import os
import subprocess
import sys

import pytest
from headwater.worker.engine import blas


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_second_call_returns_the_same_choice() -> None:
    assert blas.preload() is blas.preload()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS under MLX")
def test_preloading_after_mlx_is_refused_with_what_to_do() -> None:
    result = _run("import mlx.core\nfrom headwater.worker.engine import blas\nblas.preload()")

    assert result.returncode != 0
    assert "call blas.preload() before anything imports mlx" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS under MLX")
def test_without_a_fast_blas_the_worker_says_so_loudly() -> None:
    result = _run(
        "from headwater.worker.engine import blas\n"
        "blas._candidates = lambda: iter([('mkl', 'libnothing.so')])\n"
        "print(blas.preload().is_reference)"
    )

    assert "True" in result.stdout
    assert "reference_blas" in result.stdout + result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS under MLX")
def test_a_gpu_needs_no_blas_and_no_warning() -> None:
    result = _run(
        "from headwater.worker.engine import blas\n"
        "blas._candidates = lambda: iter([])\n"
        "blas._has_cuda_backend = lambda: True\n"
        "print(blas.preload().name)"
    )

    assert result.stdout.strip() == "reference"


def test_advice_fits_the_machine() -> None:
    assert "pip install '.[cpu]'" in blas.advice("x86_64")
    assert "OpenBLAS" in blas.advice("aarch64")
