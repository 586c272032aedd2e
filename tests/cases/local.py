"""hetccl.local(), pmap, donation and names: what a user sees beside the values of lax's collectives."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from harness.case import BOTH, OFF, case
from harness.env import D, Env

DONE = [np.int32(0)]


def _scope(env: Env) -> Any:
    if env.oracle:  # a stock process with as many devices as the cluster
        return contextlib.nullcontext()
    import jax_hetccl

    return jax_hetccl.local()


def _every_collective(x: jax.Array) -> tuple[jax.Array, ...]:
    """All with results that vary, so that both check_vma modes take them."""
    n = lax.axis_size(D)
    return (
        lax.psum(x, D) + x * 0,
        lax.pmean(x, D) + x * 0,
        lax.all_gather(x, D).sum(0) + x * 0,
        lax.psum_scatter(jnp.tile(x, (n, 1)), D, tiled=True),
        lax.all_to_all(jnp.tile(x, (n, 1)), D, 0, 0, tiled=True)[: x.shape[0]],
        lax.ppermute(x, D, [(i, (i + 1) % n) for i in range(n)]),
        x * lax.axis_index(D),
        x * n,
    )


def _own_mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()), (D,), axis_types=(AxisType.Auto,))


def _forward(env: Env, f: Callable[..., Any] = _every_collective) -> Callable[..., Any]:
    def body(x: jax.Array) -> Any:
        with _scope(env):
            return f(x)

    return jax.shard_map(body, mesh=_own_mesh(), in_specs=P(D), out_specs=P(D), check_vma=env.vma)


def _gradient(env: Env) -> Callable[..., Any]:
    def body(x: jax.Array) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            with _scope(env):
                return sum(jnp.sum(jnp.sin(v)) for v in _every_collective(x))

        return jax.grad(loss)(x)

    return jax.shard_map(body, mesh=_own_mesh(), in_specs=P(D), out_specs=P(D), check_vma=env.vma)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _local_rows(first: int = 0) -> np.ndarray:
    n = jax.local_device_count()
    return np.arange(first * 12, (first + n) * 12, dtype=np.float32).reshape(n * 4, 3) / 8


def _results(f: Callable[..., Any]) -> dict[str, Any]:
    """The program as JAX lowers it, and the bits of what it computes."""
    g = jax.jit(f)
    out = {"lowered": _bytes(g.lower(_local_rows()).as_text())}
    for i, leaf in enumerate(jax.tree.leaves(g(_local_rows()))):
        out[f"value {i}"] = _bytes(np.array2string(np.asarray(leaf), threshold=10**6, floatmode="unique"))
    return out


@case("local-text", vma=BOTH)
def forward(env: Env) -> Any:
    """Inside local(): stock JAX's program and values."""
    return _results(_forward(env))


@case("local-text", vma=OFF)
def gradient(env: Env) -> Any:
    """And so are the gradients: program and values."""
    return _results(_gradient(env))


@case("local-text", vma=BOTH)
def compiled(env: Env) -> Any:
    """What XLA compiles of a local collective is what it compiles of stock JAX, without the lines of the source."""
    f = _forward(env, lambda x: (lax.psum(x, D) + x, lax.all_gather(x, D, tiled=True)[: x.shape[0]]))
    text = jax.jit(f).lower(_local_rows()).compile().as_text()
    lines = [line.partition(", metadata=")[0] for line in text.split("\nFileNames")[0].splitlines()]
    assert not any("hetccl" in line for line in lines)
    return {"compiled": _bytes("\n".join(lines))}


@case("local", vma=BOTH)
def mixed(env: Env) -> Any:
    """Local and global collectives in one program, of the same operand and of each other's results."""
    import jax_hetccl

    def f(x: jax.Array) -> Any:
        with jax_hetccl.local():
            here, size = lax.psum(x, D), lax.axis_size(D)
        everywhere = lax.psum(x, D)
        with jax_hetccl.local():
            again = lax.psum(everywhere + x * 0, D)
        return here, everywhere, again, jnp.float32(size), jnp.float32(lax.axis_size(D)), lax.psum(here / size, D)

    value = (np.random.default_rng(1).integers(-8, 8, (env.size, 3)) / 4).astype(np.float32)
    mine = value[env.first : env.first + env.count]
    # What only this cluster's devices share varies over the axis: it is taken out as one row for each device.
    g = env.smap(lambda x: jax.tree.map(lambda v: v + x * 0, f(x)), P(D), P(D))
    got = [np.asarray(v)[0] for v in jax.jit(g)(env.put(value, P(D)))]
    total = value.sum(0)
    of_clusters = [value[sum(env.sizes[:c]) : sum(env.sizes[: c + 1])].sum(0) for c in range(len(env.sizes))]
    wanted = [mine.sum(0), total, total * env.count, env.count + 0 * total, env.size + 0 * total, sum(of_clusters)]
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)
    return DONE


@case("local", vma=OFF)
def mixed_gradients(env: Env) -> Any:
    """The gradient of a local sum stays local, that of a global one does not."""
    import jax_hetccl

    value = (np.random.default_rng(2).integers(-8, 8, (env.size, 3)) / 4).astype(np.float32)

    def grad_of(scope: Callable[[], Any]) -> np.ndarray:
        def loss(x: jax.Array) -> jax.Array:
            with scope():
                return jnp.sum(lax.psum(x, D) ** 2)

        return np.asarray(jax.jit(env.smap(jax.grad(loss), P(D), P(D)))(env.put(value, P(D))))

    # Each device has its own loss, the square of the same sum: 2 * sum, once for each device that takes part.
    mine = value[env.first : env.first + env.count]
    np.testing.assert_allclose(grad_of(jax_hetccl.local), np.tile(2 * mine.sum(0) * env.count, (env.count, 1)))
    np.testing.assert_allclose(
        grad_of(contextlib.nullcontext), np.tile(2 * value.sum(0) * env.size, (env.count, 1)), rtol=1e-6
    )
    return DONE


@case("local", vma=OFF)
def pmap(env: Env) -> Any:
    """pmap over a spanning axis: values and gradients are those of all ranks."""
    value = (np.random.default_rng(3).integers(-8, 8, (env.size, 5)) / 4).astype(np.float32)
    mine = value[env.first : env.first + env.count]

    def f(x: jax.Array) -> Any:
        return lax.psum(x, D), lax.pmax(x, D), lax.all_gather(x, D), lax.axis_index(D), lax.pmean(x, D)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        total, largest, everyone, index, mean = (np.asarray(v) for v in jax.pmap(f, axis_name=D)(mine))
        grads = jax.pmap(lambda x: jax.grad(lambda x: jnp.sum(lax.pmean(x**2, D)))(x), axis_name=D)(mine)
    np.testing.assert_allclose(total, np.tile(value.sum(0), (env.count, 1)))
    np.testing.assert_allclose(largest, np.tile(value.max(0), (env.count, 1)))
    np.testing.assert_allclose(everyone, np.tile(value, (env.count, 1, 1)))
    np.testing.assert_allclose(mean, np.tile(value.mean(0), (env.count, 1)), rtol=1e-6)
    assert index.tolist() == list(range(env.first, env.first + env.count))
    np.testing.assert_allclose(np.asarray(grads), 2 * mine, rtol=1e-6)
    return DONE


@case("local", vma=OFF)
def donated(env: Env) -> Any:
    """A donated operand is reduced in place; one that is not is unchanged, also where the exchange is large."""
    for n in (64, 1 << 18):
        value = np.full((env.size, n), 1.5, np.float32)
        f = env.smap(lambda x: lax.psum(x, D), P(D), P(D))
        kept = env.put(value, P(D))
        jax.block_until_ready(jax.jit(f)(kept))
        assert all((np.asarray(s.data) == 1.5).all() for s in kept.addressable_shards)
        given = env.put(value, P(D)) + 0
        before = [s.data.unsafe_buffer_pointer() for s in given.addressable_shards]
        result = jax.block_until_ready(jax.jit(f, donate_argnums=0)(given))
        assert given.is_deleted()
        assert before == [s.data.unsafe_buffer_pointer() for s in result.addressable_shards], "not in place"
        assert all((np.asarray(s.data) == 1.5 * env.size).all() for s in result.addressable_shards)
    return DONE


# --- names ---


def _named(env: Env) -> Callable[..., Any]:
    def f(x: jax.Array) -> jax.Array:
        with jax.named_scope("train_step"), jax.named_scope("grads"):
            return lax.psum(x, D)

    return jax.jit(env.smap(f, P(D), P()))


@case("local", vma=OFF)
def names_of_pending(env: Env) -> Any:
    """While the other clusters are late, the engine says what it waits for by op, axis and the user's names."""
    import jax_hetccl

    engine, f = jax_hetccl.world().engine, _named(env)
    x = env.put(np.ones((env.size, 4), np.float32), P(D))
    jax.block_until_ready(f(x))
    if env.first:
        time.sleep(1.0)
        jax.block_until_ready(f(x))
        return DONE
    caller = threading.Thread(target=lambda: jax.block_until_ready(f(x)))
    caller.start()
    seen: list[str] = []
    deadline = time.monotonic() + 10
    while caller.is_alive() and time.monotonic() < deadline:
        seen += engine.pending()
        time.sleep(0.02)
    caller.join(10)
    assert any("psum/data float32[1,4]" in line and "train_step/grads" in line for line in seen), seen[:10]
    assert not engine.pending()
    return DONE


@case("local", vma=OFF)
def names_in_the_program(env: Env) -> Any:
    """Profiles show op_name: the exchange's own and, of the local collectives, JAX's."""
    x = env.put(np.ones((env.size, 4), np.float32), P(D))
    text = _named(env).lower(x).compile().as_text()
    lines = [line for line in text.splitlines() if 'custom_call_target="hetccl_exchange_' in line]
    assert len(lines) == 2, lines
    for line in lines:
        name = line.partition('op_name="')[2].partition('"')[0]
        assert "psum/data float32[1,4]" in name, line
        assert "train_step/grads" in name, line
    jax.block_until_ready(_named(env)(x))
    return DONE


@case("local-fails", vma=OFF)
def named(env: Env) -> Any:
    """For a test of an error's text."""
    return _named(env)(env.put(np.ones((env.size, 4), np.float32), P(D)))
