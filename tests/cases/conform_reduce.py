"""What psum, pmean, pmax and pmin return.

The behaviour is what JAX's tests check: pmap_test.py (means, trees, trees of several dtypes, complex and boolean sums,
constants, equal and uneven groups), shard_map_test.py (pmin, pmax, repeated sums, sums of replicated values) and
batching_test.py (associative reductions).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import each, table, values
from harness.case import BOTH, OFF, ON, Program, case
from harness.env import D, Env

_OPS = ("psum", "pmean", "pmax", "pmin")
_EACH = table(_OPS)


def _op(env: Env) -> Any:
    return getattr(lax, env.params["op"])


@case("conform", "main", table=_EACH)
def value(env: Env) -> Any:
    """An array on every rank, and what is left of it."""
    return each(env, lambda x: (_op(env)(x, D), x - _op(env)(x, D)), 4, 3)


@case("conform", table=_EACH)
def replicated_result(env: Env) -> Any:
    """The result is the same everywhere: an output without the axis."""
    return Program(env.smap(lambda x: _op(env)(x, D), P(D), P()), (values(env, 2, 3),))


@case("conform", table=_EACH)
def replicated_operand(env: Env) -> Any:
    """An operand that is the same everywhere still counts once for each rank."""
    return Program(env.smap(lambda w: _op(env)(w, D), P(), P()), (env.weights(4, 3),))


@case("conform", table=_EACH)
def twice(env: Env) -> Any:
    """The reduction of a reduction."""
    return each(env, lambda x: _op(env)(_op(env)(x, D) + 1, D), 5)


@case("turn", table=_EACH)
def trees(env: Env) -> Any:
    """Nested containers of several dtypes and shapes."""

    def f(x: jax.Array) -> Any:
        return _op(env)({"a": x, "b": [x[0], (x.astype(jnp.int32), jnp.sum(x))], "c": None, "d": {}}, D)

    return each(env, f, 3, 2)


@case("turn", table=_EACH)
def constants(env: Env) -> Any:
    """Python's numbers, NumPy's, and constant arrays."""

    def f(x: jax.Array) -> Any:
        of = [_op(env)(c, D) for c in (2, 2.5, np.float32(0.5), np.int32(3), np.arange(4.0, dtype=np.float32))]
        return [x + jnp.sum(jnp.asarray(c)) for c in of] + [jnp.asarray(c) for c in of]

    return each(env, f, 2)


_DTYPES = (
    "bool", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float8_e5m2",
    "float8_e4m3fn",
)  # fmt: skip


@case("conform", table={d: {"dtype": d} for d in _DTYPES})
def dtypes(env: Env) -> Any:
    """Every operation in every dtype; the result's dtype is lax's."""
    return each(env, lambda x: [getattr(lax, op)(x, D) for op in _OPS], 6, dtype=env.params["dtype"])


@case("conform", table=table(("psum", "pmean")))
def complex_values(env: Env) -> Any:
    """Complex sums."""
    return each(env, lambda x: x - _op(env)(x, D), 4, dtype="complex64")


@case("turn", table=_EACH)
def special_values(env: Env) -> Any:
    """Infinities, negative zeros and, in sums, NaN travel as in one world; XLA's CPU all-reduce may drop a NaN in max
    and min."""
    row = [np.inf, -np.inf, -0.0, 0.0, np.nan if env.params["op"] in ("psum", "pmean") else 5, 1, 3e38]
    special = np.resize(np.array(row, np.float32), (env.size * 7, 2))
    special[:7, 1] = 1
    f = env.smap(lambda x: _op(env)(x, D), P(D), P())
    return Program(f, (env.put(special, P(D)),))


@case("turn", table=_EACH)
def large(env: Env) -> Any:
    """More than the size at which the decomposition changes, not divisible by anything."""
    return each(env, lambda x: _op(env)(x, D), 23, 1009)


@case("turn", table=_EACH)
def empty(env: Env) -> Any:
    """No elements: the shape stays."""
    return each(env, lambda x: (x, jnp.array(_op(env)(x[:, :0], D).shape)), 2, 3)


@case("conform", table=_EACH)
def axes_as_tuple(env: Env) -> Any:
    """A tuple of one axis."""
    return each(env, lambda x: _op(env)(x, (D,)), 3)


# With check_vma some versions of stock JAX want an axis in pmax and pmin.
@case("conform", table={op: {"op": op, "vma": OFF if op in ("pmax", "pmin") else BOTH} for op in _OPS})
def no_axes(env: Env) -> Any:
    """An empty tuple of axes: nothing happens."""
    return each(env, lambda x: _op(env)(x, ()), 3)


def _groups(env: Env, how: str) -> list[list[int]]:
    n = env.size
    return {
        "all": [list(range(n))],
        "each": [[r] for r in range(n)],
        "uneven": [[0], list(range(1, n))],
        "interleaved": [list(range(0, n, 2)), list(range(1, n, 2))],
        "backwards": [list(range(n))[::-1]],
    }[how]


_GROUPS = ("all", "each", "uneven", "interleaved", "backwards")


# With check_vma stock JAX has no grouped psum; pmax and pmin take groups in both modes.
@case("conform", table={f"{op} {how}": {"op": op, "how": how} for op in ("pmax", "pmin") for how in _GROUPS})
def groups(env: Env) -> Any:
    """Groups of global indices: inside of a cluster, across, and of several sizes."""
    return each(env, lambda x: _op(env)(x, D, axis_index_groups=_groups(env, env.params["how"])), 5)


@case(
    "conform", rejects=ON, table={f"{op} {how}": {"op": op, "how": how} for op in ("psum", "pmean") for how in _GROUPS}
)
def groups_of_sums(env: Env) -> Any:
    """The same for sums, and for constants of equal groups."""
    how = _groups(env, env.params["how"])
    return each(env, lambda x: x - _op(env)(x, D, axis_index_groups=how), 5)


@case("conform", table={how: {"how": how} for how in ("all", "each")})
def groups_of_constants(env: Env) -> Any:
    """A constant counts once for each rank of a group."""
    how = _groups(env, env.params["how"])
    return each(env, lambda x: x - lax.psum(2.0, D, axis_index_groups=how), 5)
