"""Collectives over all ranks, as a child: one cluster of a world if the environment names one, else stock JAX alone.

``{"op", "bytes", "reps", "segments"}`` builds and checks a program, then gives the seconds of each run and the ranks
there are. ``bytes`` is each rank's operand. With segments a sum is made of that many, each of a part of the operand, so
that the local collectives of one can run while another one crosses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_hetccl as hetccl
from gpu_bench import iterations
from gpu_bench.children import serve
from gpu_bench.programs import AXIS, JOINS, mesh, ranks


def _pairs(n: int) -> list[tuple[int, int]]:
    """Every rank sends; with two equal clusters, to the other one."""
    return [(r, (r + n // 2) % n) for r in range(n)]


def _sent(n: int) -> list[tuple[int, int]]:
    """One way only: the first half sends."""
    return [(r, r + n // 2) for r in range(n // 2)]


def _halves(n: int) -> Callable[[Any], Any]:
    return lambda x: lax.psum(x, AXIS) * (1 / n)


def _loop(f: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    return lambda x: lax.fori_loop(0, times, lambda _, y: f(y), x)


def _program(op: str, n: int, nbytes: int, segments: int) -> Callable[[Any], Any]:
    times = iterations(op, nbytes)
    programs: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "psum": (lambda x: [lax.psum(part, AXIS) for part in jnp.split(x, segments, axis=1)], P()),
        "all_gather": (lambda x: lax.all_gather(x, AXIS, axis=0, tiled=True), P()),
        "psum_scatter": (lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True), P(None, AXIS)),
        "ppermute": (lambda x: lax.ppermute(x, AXIS, _pairs(n)), P(AXIS)),
        "send": (lambda x: lax.ppermute(x, AXIS, _sent(n)), P(AXIS)),
        "psum_loop": (_loop(_halves(n), times), P(AXIS)),
        "send_loop": (_loop(lambda x: x + lax.ppermute(x, AXIS, _sent(n)), times), P(AXIS)),
        "ppermute_loop": (_loop(lambda x: lax.ppermute(x, AXIS, _pairs(n)), times), P(AXIS)),
    }
    f, out = programs[op]
    return jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=P(AXIS), out_specs=out, check_vma=False))


def _values(nbytes: int, rank: int) -> np.ndarray:
    return np.arange(nbytes // 4, dtype=np.float32) % 13 + 1 + rank


def expected(op: str, nbytes: int, n: int, rank: int) -> np.ndarray:
    """What a rank gets, as one vector."""
    every = [_values(nbytes, r) for r in range(n)]
    if op in ("psum", "psum_scatter", "psum_loop"):
        total = np.sum(every, axis=0)
        part = total.size // n
        if op == "psum_scatter":
            return total[rank * part : (rank + 1) * part]
        return total if op == "psum" else total / n
    if op == "all_gather":
        return np.concatenate(every)
    if op in ("send", "send_loop"):
        got = every[rank - n // 2] if rank in range(n // 2, 2 * (n // 2)) else np.zeros_like(every[0])
        return got if op == "send" else every[rank] + iterations(op, nbytes) * got
    back = {to: source for source, to in _pairs(n)}
    for _ in range(iterations(op, nbytes)):
        rank = back[rank]
    return every[rank]


def _check(op: str, nbytes: int, results: Any) -> None:
    n, first = ranks()
    results = results if isinstance(results, list) else [results]
    for i in range(jax.device_count()):
        got = np.concatenate([np.asarray(r.addressable_shards[i].data).ravel() for r in results])
        want = expected(op, nbytes, n, first + i)
        if not np.allclose(got, want, rtol=1e-5):
            raise AssertionError(f"{op} of {nbytes} bytes: wrong values on rank {first + i}")


def measure(op: str, nbytes: int, reps: int, segments: int) -> dict[str, Any]:
    n, first = ranks()
    program = _program(op, n, nbytes, segments)
    sharding = jax.sharding.NamedSharding(mesh(), P(AXIS))
    rows = np.stack([_values(nbytes, first + i) for i in range(jax.device_count())])
    x = jax.device_put(rows, sharding)
    _check(op, nbytes, jax.block_until_ready(program(x)))
    if JOINS:
        hetccl.barrier("benchmark")
    times = []
    for i in range(reps + 2):
        begin = time.perf_counter()
        jax.block_until_ready(program(x))
        if i >= 2:
            times.append(time.perf_counter() - begin)
    return {"times": times}


def main() -> None:
    if JOINS:
        hetccl.initialize(axes=("data",))
    device = jax.devices()[0]
    facts = {"kind": device.device_kind, "devices": jax.device_count(), "jax": jax.__version__, "ranks": ranks()[0]}
    serve(facts, lambda q: measure(q["op"], q["bytes"], q["reps"], q.get("segments", 1)))
    if JOINS:
        hetccl.shutdown()


if __name__ == "__main__":
    main()
