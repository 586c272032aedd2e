"""Sums that one of two clusters computes alone: how a CPU device and an accelerator add, here on any two devices."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from harness.case import OFF, case
from harness.env import D, Env

N = 40_001
_DTYPES = ("float32", "bfloat16", "float64", "complex64")


@case("central", vma=OFF, table={dtype: {"dtype": dtype} for dtype in _DTYPES})
def summed(env: Env) -> Any:
    """A sum, a sum that depends on it, and another exchange between them; what each cluster sends is one operand."""
    import jax_hetccl
    from jax_hetccl.decompose import reduce

    dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(env.params["dtype"]))
    each = [(np.arange(N) % 13 + 1 + rank).astype(np.float32) for rank in range(env.size)]
    x = env.put(np.concatenate(each).astype(dtype), P(D))
    first = env.smap(lambda x: lax.psum(x, D), P(D), P(None))
    chained = env.smap(lambda x: lax.psum(lax.psum(x, D) + lax.ppermute(x, D, [(0, 1), (1, 0)]), D), P(D), P(None))
    with mock.patch.object(reduce, "choose", lambda *_: "central"):
        first, chained = jax.jit(first).lower(x).compile(), jax.jit(chained).lower(x).compile()
    stats = jax_hetccl.world().engine.stats
    before = stats()["bytes_sent"]
    result = np.asarray(jax.block_until_ready(first(x)).addressable_data(0))
    sent = stats()["bytes_sent"] - before
    total = sum(each)
    assert np.array_equal(result, total.astype(dtype)), result
    assert sent == N * dtype.itemsize, f"{sent} bytes were sent"
    result = np.asarray(jax.block_until_ready(chained(x)).addressable_data(0))
    assert np.array_equal(result, (3 * total).astype(dtype)), result
    return [np.int32(0)]
