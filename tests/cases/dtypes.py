"""Every dtype that lax.psum takes, and the rounding and wrapping rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

from harness.case import OFF, Program, case
from harness.env import D, Env

_INTS = ("int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32")
_FLOATS = ("float16", "bfloat16", "float32")
_FP8 = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e3m4",
    "float8_e4m3",
)
_RARE = ("float8_e8m0fnu", "float4_e2m1fn")
_WIDE = ("int64", "uint64", "float64", "complex128")


def _values(env: Env, dtype: str, cols: int = 5) -> jax.Array:
    """Small values, exact in every dtype and in every partial sum."""
    rng = np.random.default_rng(3)
    low, high = (
        (0, 2) if dtype in ("bool", "uint4", *_RARE) else (-1, 2) if "4" in dtype and "int" in dtype else (-2, 3)
    )
    if dtype.startswith("uint"):
        low = 0
    value = rng.integers(low, high, (env.size * 3, cols))
    if dtype == "float8_e8m0fnu":  # powers of two only
        value = np.ones_like(value)
    if dtype.startswith("complex"):
        value = value + 1j * rng.integers(-2, 3, value.shape)
    return env.put(
        value.astype(np.float32).astype(dtype) if dtype not in ("complex64", "complex128") else value.astype(dtype),
        P(D),
    )


def _each(dtypes: tuple[str, ...], **more: Any) -> dict[str, dict[str, Any]]:
    return {d: {"dtype": d, **more} for d in dtypes}


def _sum_like(env: Env, x: jax.Array, ops: tuple[str, ...] = ("psum", "pmean", "pmax", "pmin")) -> Any:
    return Program(env.smap(lambda x: [getattr(env.api, op)(x, D) for op in ops], P(D), P()), (x,))


@case("core", "wire", exact=True, rounded=("[1]",), table=_each(("bool", *_INTS, *_FLOATS, *_FP8)))
def real(env: Env) -> Any:
    """All four reductions of one array. The mean is a division after the sum."""
    return _sum_like(env, _values(env, env.params["dtype"]))


@case("core", exact=True, vma=OFF, table=_each(_RARE))
def rare(env: Env) -> Any:
    """Formats without sign or zero, and four-bit floats."""
    return _sum_like(env, _values(env, env.params["dtype"]), ("psum", "pmax", "pmin"))


@case("core", exact=True, vma=OFF, table=_each((*_FP8, *_RARE)))
def short_and_large(env: Env) -> Any:
    """Arrays large enough for pieces, which each cluster gathers: floats of eight bits as bytes, others as they are."""
    return _sum_like(env, _values(env, env.params["dtype"], 30_000), ("psum", "pmax", "pmin"))


@case("core", "wire", exact=True, rounded=("[1]",))
def complex64(env: Env) -> Any:
    """Complex numbers add; they have no order."""
    return _sum_like(env, _values(env, "complex64"), ("psum", "pmean"))


@case("core", vma=OFF, rejects=OFF, table={op: {"op": op} for op in ("pmax", "pmin")})
def complex_order(env: Env) -> Any:
    """pmax of complex numbers is an error in stock JAX."""
    return _sum_like(env, _values(env, "complex64"), (env.params["op"],))


@case("core", "wire", exact=True, table=_each(_WIDE))
def wide(env: Env) -> Any:
    """64-bit types with x64 enabled."""
    with jax.enable_x64(True):
        dtype = env.params["dtype"]
        x = _values(env, dtype)
        if dtype != "complex128":
            x = x * (2**40)
        assert str(x.dtype) == dtype
        return _sum_like(env, x, ("psum", "pmean") if dtype == "complex128" else ("psum", "pmean", "pmax", "pmin"))


@case("core", exact=True, table=_each(("int8", "uint8", "int16", "uint16", "int32", "uint32", "int4", "uint4")))
def wraps(env: Env) -> Any:
    """Integer sums wrap around in their own width."""
    dtype = ml_dtypes.iinfo(env.params["dtype"])
    x = env.put(np.full((env.size, 7), int(dtype.max) - 1).astype(env.params["dtype"]), P(D))
    return Program(env.smap(lambda x: env.psum(x, D), P(D), P()), (x,))


@case("core", exact=True)
def bool_counts(env: Env) -> Any:
    """psum of bool counts in int32, against the count itself."""
    value = np.random.default_rng(5).integers(0, 2, (env.size, 9)).astype(bool)
    if env.oracle:
        return (
            env.same(value.sum(0, dtype=np.int32)[None]),
            env.same(value.any(0)[None]),
            env.same(value.all(0)[None]),
        )
    f = env.smap(lambda x: (env.psum(x, D), env.pmax(x, D), env.pmin(x, D)), P(D), P())
    return Program(f, (env.put(value, P(D)),))


# One large value, then ones: adding in the narrow type would lose every one of them. The expected value is the sum in
# float32, rounded once; that is what lax does in bfloat16 and fp8, and what this project does in float16 too.
_ROUNDING = {"bfloat16": 256, "float16": 2048, "float8_e4m3fn": 16, "float8_e5m2": 8}


@case("core", exact=True, table={d: {"dtype": d, "top": t} for d, t in _ROUNDING.items()})
def rounds_once(env: Env) -> Any:
    """Narrow floats add in float32 and round once, wherever the large value sits."""
    dtype, n = env.params["dtype"], env.size
    value = np.ones((n, n), np.float32) + (env.params["top"] - 1) * np.eye(n, dtype=np.float32)
    if env.oracle:
        return env.same(value.sum(0, keepdims=True).astype(dtype))
    return Program(env.smap(lambda x: env.psum(x, D), P(D), P()), (env.put(value.astype(dtype), P(D)),))


@case("core", vma=OFF, exact=True, table=_each(("float32", "float16", "bfloat16", "complex64")))
def infinities_and_nan(env: Env) -> Any:
    """Special values travel: inf + -inf is nan, on every rank with the same bits."""
    n = env.size
    value = np.ones((n, 4), np.float32)
    value[0] = [np.inf, -np.inf, np.nan, np.inf]
    value[-1, 3] = -np.inf
    x = env.put(value.astype(env.params["dtype"]), P(D))
    return Program(env.smap(lambda x: env.psum(x, D), P(D), P()), (x,))


@case("core", vma=OFF, exact=True)
def infinities_minmax(env: Env) -> Any:
    """pmax and pmin with infinities."""
    value = np.ones((env.size, 2), np.float32)
    value[0], value[-1] = [np.inf, 3], [-np.inf, -np.inf]
    return _sum_like(env, env.put(value, P(D)), ("pmax", "pmin"))


@case("core", "wire", replicas_only=True, table={"small": {"n": 33}, "large": {"n": 50_021}})
def narrow_then_wide(env: Env) -> Any:
    """Narrow sums that the program widens at once: a compiler that skips the rounding must do so on every rank."""
    x = env.normal(1, env.params["n"])

    def f(x: jax.Array) -> Any:
        return {k: env.psum(x.astype(k), D).astype(jnp.float32) * 3 for k in ("bfloat16", "float16", "float8_e5m2")}

    return Program(env.smap(f, P(D), P()), (x,))


@case("core", "wire", replicas_only=True, table={"small": {"n": 33}, "large": {"n": 50_021}})
def products_summed(env: Env) -> Any:
    """Products that are summed: a compiler that fuses multiply and add must do so on every rank or on none."""
    x, y = env.normal(1, env.params["n"]), env.normal(1, env.params["n"], seed=1)

    def f(x: jax.Array, y: jax.Array) -> Any:
        return (
            env.psum(x * y, D),
            env.psum(x * x + y, D) * 3,
            env.psum(jnp.sin(x) * y, D),
            env.pmean(x * 0.1, D),
        )

    return Program(env.smap(f, P(D), P()), (x, y))


@case("core", table=_each(("float16", "bfloat16", "float32")))
def normal(env: Env) -> Any:
    """Random normal values: within tolerance of the oracle, and equal on all ranks."""
    return _sum_like(env, env.normal(33, 17, dtype=np.dtype(env.params["dtype"])))


@case("core", "wire", exact=True)
def mixed_tree(env: Env) -> Any:
    """One psum over leaves of many dtypes."""
    x = env.rows()
    kinds = ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e5m2")
    f = env.smap(
        lambda x: env.psum({k: (jnp.abs(x) > 1 if k == "bool" else jnp.abs(x).astype(k)) for k in kinds}, D),
        P(D),
        P(),
    )
    return Program(f, (x,))
