"""Both ways of the codec's loops over rows: NumPy's, and compiled by numba."""

import contextlib

import numba
import pytest

from pipeline.experience import row_kernels

LOOPS = ("numpy", "numba")


@contextlib.contextmanager
def loops_of(way):
    """Have the codec go one of `LOOPS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_DISABLE_JIT", str(int(way == "numpy")))
        patch.setattr(numba.config, "DISABLE_JIT", False)
        row_kernels.kernels.cache_clear()
        try:
            yield
        finally:
            row_kernels.kernels.cache_clear()


@pytest.fixture(scope="module", params=LOOPS)
def loops(request):
    """Run each test of a module both ways."""
    with loops_of(request.param):
        yield request.param
