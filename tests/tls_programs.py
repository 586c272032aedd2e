"""A sum over both clusters of values that can be found on a wire: called in worker processes, see `harness.worker`."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

TEXT = b"a gradient in plain text. "


def summed(repeats: int) -> dict[str, Any]:
    """psum over "data" of `repeats` times the text as integers; returns what the sum is."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec()
    sum_ = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=spec))
    result = np.asarray(sum_(np.frombuffer(TEXT * repeats, np.uint16)))
    return {"sum": hashlib.sha256(result.tobytes()).hexdigest(), "first": int(result[0])}
