"""One JAX process, one device, one cluster of two, as a child.

``{"op", "bytes", "reps"}`` builds and checks a program, then gives the seconds of each run; ``{"overlap": …}``,
``{"profile": …}`` and ``{"stats": true}`` see :mod:`gpu_bench.overlap` and below.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

import jax_hetccl as hetccl
from gpu_bench import overlap, programs
from gpu_bench.children import serve


def facts() -> dict[str, Any]:
    device = jax.local_devices()[0]
    return {"platform": device.platform, "kind": device.device_kind, "jax": jax.__version__}


def measure(op: str, nbytes: int, reps: int) -> dict[str, Any]:
    """Runs a program once to compile and check it, twice to warm up, and ``reps`` times with a clock."""
    rank = hetccl.world().cluster
    program, x = programs.build(op, nbytes), programs.operand(nbytes, rank)
    donated = op in programs.DONATED
    y = jax.block_until_ready(program(x))
    want = programs.expected(op, nbytes, rank)
    got = np.asarray(y.addressable_data(0))
    if want is not None and not np.array_equal(got.reshape(want.shape), want):
        bad = int((got.reshape(want.shape) != want).sum())
        raise AssertionError(f"{op} of {nbytes} bytes: {bad} of {want.size} values are wrong on rank {rank}")
    del got
    x, times = (y if donated else x), []
    hetccl.barrier("benchmark")
    for i in range(reps + 2):
        begin = time.perf_counter()
        y = jax.block_until_ready(program(x))
        seconds = time.perf_counter() - begin
        x = y if donated else x
        if i >= 2:
            times.append(seconds)
    return {"times": times}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    if "overlap" in request:
        return overlap.measure(**request["overlap"])
    if "profile" in request:
        return overlap.measure_profile(**request["profile"])
    if "stats" in request:
        return {"devices": hetccl.world().engine.stats().get("devices", {})}
    return measure(request["op"], request["bytes"], request["reps"])


def main() -> None:
    hetccl.initialize(axes=("data",))
    serve(facts(), handle)
    hetccl.shutdown()


if __name__ == "__main__":
    main()
