"""Bytes that leave a cluster, against the formulas of docs/algorithms.md, which are written out here once more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from harness.case import OFF, case
from harness.env import D, Env

SMALL, LARGE = 300, 40_001  # elements; 64 KiB of float32 are between


def _ring(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def _some(n: int) -> list[tuple[int, int]]:
    """The first rank to the last, the last to the second: the rest gets nothing."""
    return [(0, n - 1), (n - 1, 1)]


def _inside(n: int) -> list[tuple[int, int]]:
    """A pair of the first cluster only: nothing crosses."""
    return [(0, 1)]


def _halves(n: int) -> list[list[int]]:
    """Two uneven groups, both across clusters: even and odd ranks."""
    return [list(range(0, n, 2)), list(range(1, n, 2))]


def _cluster_of(sizes: Sequence[int], rank: int) -> int:
    return next(c for c in range(len(sizes)) if rank < sum(sizes[: c + 1]))


# --- the formulas: bytes sent by cluster c of clusters with `sizes` ranks, for an operand of `n` elements on each rank ---


def _whole(sizes: Sequence[int], c: int, n: int, width: int) -> int:
    return sum(k for i, k in enumerate(sizes) if i != c) * n * width


def _pieces(sizes: Sequence[int], c: int, n: int, width: int) -> int:
    return _padded(n, math.lcm(*sizes)) * width


def _owned(sizes: Sequence[int], c: int, n: int, width: int, result: int) -> int:
    count = len(sizes)
    return _padded(n, count * math.lcm(*sizes)) * (count - 1) // count * (width + result)


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _reduction(env: Env, c: int, n: int, width: int, result: int) -> int:
    """Which way a reduction goes, and what that costs."""
    sizes = env.sizes
    if n * width <= 64 << 10:
        return _whole(sizes, c, n, width)
    return _pieces(sizes, c, n, width) if len(sizes) == 2 else _owned(sizes, c, n, width, result)


def _all_gather(env: Env, c: int, n: int, width: int) -> int:
    return (len(env.sizes) - 1) * env.sizes[c] * n * width


def _psum_scatter(env: Env, c: int, n: int, width: int) -> int:
    return sum(k for i, k in enumerate(env.sizes) if i != c) * (n // env.size) * width


def _all_to_all(env: Env, c: int, n: int, width: int) -> int:
    return env.sizes[c] * sum(k for i, k in enumerate(env.sizes) if i != c) * (n // env.size) * width


def _permute(perm: Callable[[int], list[tuple[int, int]]]) -> Callable[..., int]:
    def sent(env: Env, c: int, n: int, width: int) -> int:
        clusters = [(_cluster_of(env.sizes, s), _cluster_of(env.sizes, d)) for s, d in perm(env.size)]
        return sum(a == c != b for a, b in clusters) * n * width

    return sent


def _grouped(env: Env, c: int, n: int, width: int) -> int:
    groups = [[_cluster_of(env.sizes, r) for r in group] for group in _halves(env.size)]
    return sum(sum(k != c for k in group) for group in groups if c in group) * n * width


def _turned(n: int) -> list[list[int]]:
    """All ranks in one group, in another order."""
    return [[*range(1, n), 0]]


def _each(n: int) -> list[list[int]]:
    """Groups of one, which stay inside."""
    return [[r] for r in range(n)]


def _broadcast(source: int) -> Callable[..., int]:
    """The source's cluster sends the operand to each other cluster once."""

    def sent(env: Env, c: int, n: int, width: int) -> int:
        return (len(env.sizes) - 1) * n * width if c == _cluster_of(env.sizes, source % env.size) else 0

    return sent


def _in_groups(groups: Callable[[int], list[list[int]]], pairs: Callable[[list[int], int], int]) -> Callable[..., int]:
    """``pairs`` counts the messages that one cluster sends, given the clusters of a group's members."""

    def sent(env: Env, c: int, n: int, width: int) -> int:
        placed = [[_cluster_of(env.sizes, r) for r in group] for group in groups(env.size)]
        return sum(pairs(group, c) for group in placed if c in group) * n * width

    return sent


def _shards_out(group: list[int], c: int) -> int:
    return group.count(c) * (len(set(group)) - 1)


def _chunks_out(group: list[int], c: int) -> int:
    return sum(k != c for k in group)


def _pairs_out(group: list[int], c: int) -> int:
    return group.count(c) * sum(k != c for k in group)


def _row(n: int, f: Callable[[Env, Any], Any], sent: Callable[..., int], dtype: str = "float32", **kw: int) -> Any:
    width = kw.get("width", jnp.dtype(dtype).itemsize)
    more = {"result": kw["result"]} if "result" in kw else {}
    return {"n": n, "op": f, "dtype": dtype, "sent": lambda env, c, n: sent(env, c, n, width, **more)}


def _share(sent: Callable[..., int]) -> Callable[..., int]:
    """The same where each message is one rank's share of the operand."""
    return lambda env, c, n, width: sent(env, c, n // env.size, width)


def _nothing(env: Env, c: int, n: int, width: int) -> int:
    return 0


def _psum(env: Env, x: Any) -> Any:
    return lax.psum(x, D)


def _pmax(env: Env, x: Any) -> Any:
    return lax.pmax(x, D)


_TABLE = {
    "psum whole": _row(SMALL, _psum, _reduction, result=4),
    "psum large": _row(LARGE, _psum, _reduction, result=4),
    # Sums of narrow floats cross as float32, the rounded result in its own type; a maximum needs no more than its own.
    "psum bf16 large": _row(LARGE, _psum, _reduction, "bfloat16", width=4, result=2),
    "psum i32 large": _row(LARGE, _psum, _reduction, "int32", result=4),
    "pmax whole": _row(SMALL, _pmax, _reduction, result=4),
    "pmax bf16 large": _row(LARGE, _pmax, _reduction, "bfloat16", result=2),
    "psum groups": _row(SMALL, lambda e, x: lax.psum(x, D, axis_index_groups=_halves(e.size)), _grouped),
    "all_gather": _row(301, lambda e, x: lax.all_gather(x, D), _all_gather),
    "all_gather large tiled": _row(LARGE, lambda e, x: lax.all_gather(x, D, tiled=True), _all_gather),
    "all_gather i8": _row(301, lambda e, x: lax.all_gather(x, D), _all_gather, "int8"),
    "psum_scatter": _row(7 * 60, lambda e, x: lax.psum_scatter(x, D, tiled=True), _psum_scatter),
    "psum_scatter large": _row(40_020, lambda e, x: lax.psum_scatter(x, D, tiled=True), _psum_scatter),
    "psum_scatter bf16": _row(420, lambda e, x: lax.psum_scatter(x, D, tiled=True), _psum_scatter, "bfloat16", width=4),
    "all_to_all": _row(420, lambda e, x: lax.all_to_all(x, D, 0, 0, tiled=True), _all_to_all),
    "all_to_all large": _row(40_020, lambda e, x: lax.all_to_all(x, D, 0, 0, tiled=True), _all_to_all, "int16"),
    "all_gather turned": _row(301, lambda e, x: lax.all_gather(x, D, axis_index_groups=_turned(e.size)), _in_groups(_turned, _shards_out)),
    "psum_scatter turned": _row(420, lambda e, x: lax.psum_scatter(x, D, tiled=True, axis_index_groups=_turned(e.size)), _share(_in_groups(_turned, _chunks_out))),
    "all_to_all turned": _row(420, lambda e, x: lax.all_to_all(x, D, 0, 0, tiled=True, axis_index_groups=_turned(e.size)), _share(_in_groups(_turned, _pairs_out))),
    "all_gather each": _row(301, lambda e, x: lax.all_gather(x, D, axis_index_groups=_each(e.size)), _nothing),
    "psum_scatter each": _row(420, lambda e, x: lax.psum_scatter(x, D, tiled=True, axis_index_groups=_each(e.size)), _nothing),
    "all_to_all each": _row(420, lambda e, x: lax.all_to_all(x, D, 0, 0, tiled=True, axis_index_groups=_each(e.size)), _nothing),
    "ppermute ring": _row(SMALL, lambda e, x: lax.ppermute(x, D, _ring(e.size)), _permute(_ring)),
    "ppermute some": _row(LARGE, lambda e, x: lax.ppermute(x, D, _some(e.size)), _permute(_some), "int8"),
    "ppermute inside": _row(SMALL, lambda e, x: lax.ppermute(x, D, _inside(e.size)), _permute(_inside)),
    "pbroadcast first": _row(301, lambda e, x: lax.pbroadcast(x, (D,), 0), _broadcast(0)),
    "pbroadcast last": _row(LARGE, lambda e, x: lax.pbroadcast(x, (D,), e.size - 1), _broadcast(-1), "bfloat16"),
    "axis_index": _row(4, lambda e, x: x + lax.axis_index(D), _nothing),
}  # fmt: skip


@case("bytes", vma=OFF, table=_TABLE)
def counted(env: Env) -> Any:
    """Runs a program three times and counts what each run sent."""
    import jax_hetccl

    n, op = env.params["n"], env.params["op"]
    f = jax.jit(env.smap(lambda x: op(env, x), P(D), P(D)))
    x = env.put(np.ones(env.size * n, np.float32).astype(env.params["dtype"]), P(D))
    engine = jax_hetccl.world().engine
    cluster = jax_hetccl.world().cluster
    wanted = env.params["sent"](env, cluster, n)
    jax.block_until_ready(f(x))
    for _ in range(3):
        before = engine.stats()["bytes_sent"]
        jax.block_until_ready(f(x))
        sent = engine.stats()["bytes_sent"] - before
        assert sent == wanted, f"cluster {cluster} of {env.sizes} sent {sent} bytes, the formula says {wanted}"
    return [np.int32(0)]


@case("bytes", vma=OFF)
def received(env: Env) -> Any:
    """What one cluster counts as sent to a rank, that rank counts as received."""
    import jax_hetccl

    world = jax_hetccl.world()
    x = env.put(np.ones(env.size * LARGE, np.float32), P(D))
    jax.block_until_ready(jax.jit(env.smap(lambda x: lax.psum(x, D), P(D), P()))(x))
    stats = world.engine.stats()
    mine = {str(rank): peer for rank, peer in stats["peers"].items()}
    assert sum(p["bytes_sent"] for p in mine.values()) == stats["bytes_sent"]
    assert sum(p["bytes_received"] for p in mine.values()) == stats["bytes_received"]
    here = set(world.ranks_of_cluster(world.cluster))
    assert not here & set(stats["peers"]), "ranks of one cluster talk to each other through exchanges"
    return [np.int32(0)]
