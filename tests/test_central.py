"""A CPU device and an accelerator add: the accelerator computes. The exchanges of that on CPU devices; the values on
real ones are those of test_spanning_ops.py with ``HETCCL_TEST_PLATFORMS``."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from harness.asserted import run_asserted
from harness.case import Case, module
from harness.pool import Pool
from jax_hetccl.decompose.reduce import choose


@pytest.mark.parametrize("case", module("central"), ids=lambda case: case.name)
def test_sums_of_one_computing_cluster(pool: Pool, case: Case) -> None:
    run_asserted(pool, "1/1", "shm", case, vma=False)


@pytest.mark.parametrize(
    ("op", "dtype", "sizes", "platforms", "way"),
    [
        ("psum", jnp.float32, (1, 1), ("cuda", "cpu"), "central"),
        ("psum", jnp.complex64, (1, 1), ("cpu", "rocm"), "central"),
        ("psum", jnp.float32, (1, 1), ("cuda", "rocm"), "owned"),
        ("psum", jnp.float32, (1, 2), ("cuda", "cpu"), "owned"),
        ("psum", jnp.float32, (1, 1, 1), ("cuda", "cpu", "cpu"), "owned"),
        ("psum", jnp.float32, (1, 1), ("cuda", "cuda"), "whole"),
        ("psum", jnp.int32, (1, 1), ("cuda", "cpu"), "whole"),
        ("pmax", jnp.float32, (1, 1), ("cuda", "cpu"), "whole"),
    ],
)
def test_choice(op: str, dtype: type, sizes: tuple[int, ...], platforms: tuple[str, ...], way: str) -> None:
    for nbytes in (4096, 1 << 28):
        assert choose(op, np.dtype(dtype), nbytes, sizes, platforms) == way
