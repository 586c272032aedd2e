"""The jitted programs that are measured, for one device of one cluster; both clusters run the same.

Each is built for a number of bytes and answers with a function of a *state* that runs once and returns the next state,
so that a program may donate its operand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hetccl as hetccl
from gpu_bench import iterations

AXIS = "data"
JOINS = "HETCCL_COORDINATOR" in os.environ  # else it is stock JAX alone


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def ranks() -> tuple[int, int]:
    """How many ranks there are, and the first one here."""
    if not JOINS:
        return jax.device_count(), int(os.environ.get("GLOO_RANK", "0")) * jax.device_count()
    world = hetccl.world()
    return world.size, world.clusters[world.cluster].first_rank


def operand(nbytes: int, rank: int) -> jax.Array:
    """Small whole numbers, other ones in each cluster: sums of many steps stay exact."""
    value = np.arange(nbytes // 4, dtype=np.float32) % 13 + 1 + rank
    return jax.make_array_from_callback(
        (jax.device_count(), value.size), NamedSharding(mesh(), P(AXIS)), lambda _: value[None]
    )


def _mapped(f: Callable[..., Any], out: P, donate: bool = False) -> Callable[..., Any]:
    mapped = jax.shard_map(f, mesh=mesh(), in_specs=P(AXIS), out_specs=out, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0,) if donate else ())


def _halved(x: Any) -> Any:
    """A sum of two clusters, halved: it can be repeated without end."""
    return lax.psum(x, AXIS) * 0.5


def _swapped(x: Any) -> Any:
    return lax.ppermute(x, AXIS, [(0, 1), (1, 0)])


def _one_way(x: Any) -> Any:
    return lax.ppermute(x, AXIS, [(0, 1)])


def _loop(f: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    return lambda x: lax.fori_loop(0, n, lambda _, y: f(y), x)


def build(op: str, nbytes: int) -> Callable[[Any], Any]:
    """The program of an operation; see :data:`OPS`."""
    return _BUILD[op](iterations(op, nbytes))


def _sent(n: int) -> Callable[[Any], Any]:
    """One way, rank 0 to rank 1: the two programs differ."""
    if hetccl.world().cluster == 0:
        send = lambda x: hetccl.send(x, 1)  # noqa: E731
        return jax.jit(send if n == 1 else lambda x: lax.fori_loop(0, n, lambda _, z: z + send(x), jnp.zeros(())))
    receive = lambda x: hetccl.recv(jax.ShapeDtypeStruct(x.shape, x.dtype), 0)  # noqa: E731
    return jax.jit(receive if n == 1 else _loop(receive, n))


_BUILD: dict[str, Callable[[int], Callable[[Any], Any]]] = {
    "psum": lambda n: _mapped(lambda x: lax.psum(x, AXIS), P()),
    # Doubles what it has: exact for as often as it is run.
    "psum_donated": lambda n: _mapped(lambda x: lax.psum(x, AXIS), P(AXIS), donate=True),
    "all_gather": lambda n: _mapped(lambda x: lax.all_gather(x, AXIS, axis=0, tiled=True), P()),
    "psum_scatter": lambda n: _mapped(
        lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True), P(None, AXIS)
    ),
    "swap": lambda n: _mapped(_swapped, P(AXIS)),
    "ppermute": lambda n: _mapped(_one_way, P(AXIS)),
    "send_recv": _sent,
    "psum_loop": lambda n: _mapped(_loop(_halved, n), P(AXIS), donate=True),
    "swap_loop": lambda n: _mapped(_loop(_swapped, n), P(AXIS), donate=True),
    "ppermute_loop": lambda n: _mapped(_loop(lambda x: x + _one_way(x), n), P(AXIS), donate=True),
    "send_recv_loop": _sent,
}
DONATED = ("psum_donated", "psum_loop", "swap_loop", "ppermute_loop")
OPS = tuple(_BUILD)


def expected(op: str, nbytes: int, rank: int) -> np.ndarray | None:
    """What the first run gives on a rank; None where the result says nothing."""
    mine, other = (np.arange(nbytes // 4, dtype=np.float32) % 13 + 1 + r for r in (rank, 1 - rank))
    first, second = (mine, other) if rank == 0 else (other, mine)
    half = mine.size // 2
    results = {
        "psum": mine + other,
        "psum_donated": mine + other,
        "psum_loop": (mine + other) / 2,
        "all_gather": np.stack([first, second]),
        "psum_scatter": (mine + other)[rank * half : (rank + 1) * half],
        "swap": other,
        "swap_loop": mine,  # an even number of times
        "ppermute": first if rank == 1 else np.zeros_like(mine),
        "ppermute_loop": mine + iterations(op, nbytes) * first if rank == 1 else mine,
        "send_recv": first if rank == 1 else np.zeros(()),
        "send_recv_loop": first if rank == 1 else np.zeros(()),
    }
    return results.get(op)
