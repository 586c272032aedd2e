"""Derivatives, inside and outside shard_map, explicit and inserted by JAX itself; all compared by value."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from harness.case import BOTH, OFF, ON, Program, case
from harness.env import D, Env


def _params(env: Env) -> dict[str, jax.Array]:
    return {"w": env.weights(6, 3), "b": env.weights(3, seed=8)}


def _loss(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


@case("core", "smoke", vma=ON)
def implicit_gradient_of_pmean(env: Env) -> Any:
    """Replicated parameters, loss by pmean: JAX inserts the gradient's reduction."""

    def f(p: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: env.pmean(_loss(p, x), D))(p)

    return Program(env.smap(f, (P(), P(D)), (P(), P())), (_params(env), env.rows()))


@case("core", "smoke", vma=ON)
def implicit_gradient_of_local_loss(env: Env) -> Any:
    """The loss stays local; the gradient of replicated parameters is summed by JAX's own psum_invariant."""

    def f(p: Any, x: jax.Array) -> Any:
        return jax.grad(lambda p: _loss(p, x))(p)

    return Program(env.smap(f, (P(), P(D)), P()), (_params(env), env.rows()))


@case("core", vma=ON)
def implicit_gradient_eager(env: Env) -> Any:
    """The same without jit."""
    return env.smap(lambda p, x: jax.grad(lambda p: env.pmean(_loss(p, x), D))(p), (P(), P(D)), P())(
        _params(env), env.rows()
    )


@case("core", "smoke", vma=OFF)
def explicit_gradient(env: Env) -> Any:
    """The classic form: local gradients, then pmean of the tree."""

    def f(p: Any, x: jax.Array) -> Any:
        loss, g = jax.value_and_grad(_loss)(p, x)
        return env.pmean(loss, D), env.pmean(g, D)

    return Program(env.smap(f, (P(), P(D)), (P(), P())), (_params(env), env.rows()))


@case("core", vma=ON)
def explicit_gradient_pcast(env: Env) -> Any:
    """Local gradients of parameters that were cast to varying, then pmean."""

    def f(p: Any, x: jax.Array) -> Any:
        g = jax.grad(_loss)(jax.tree.map(lambda t: jax.lax.pcast(t, D, to="varying"), p), x)
        return env.pmean(g, D)

    return Program(env.smap(f, (P(), P(D)), P()), (_params(env), env.rows()))


@case("core", "smoke")
def outside_params(env: Env) -> Any:
    """grad around the shard_map, with respect to replicated parameters."""
    f = env.smap(lambda p, x: env.pmean(_loss(p, x), D), (P(), P(D)), P())
    return Program(jax.value_and_grad(lambda p, x: f(p, x)), (_params(env), env.rows()))


@case("core")
def outside_params_of_psum(env: Env) -> Any:
    """The same through psum and a non-linear function behind it."""
    f = env.smap(lambda p, x: jnp.sin(env.psum(_loss(p, x), D)), (P(), P(D)), P())
    return Program(jax.value_and_grad(lambda p, x: f(p, x) ** 2), (_params(env), env.rows()))


@case("core")
def outside_batch(env: Env) -> Any:
    """grad around the shard_map, with respect to the sharded operand."""
    f = env.smap(lambda x: jnp.sin(env.psum(jnp.sum(x**2), D) / 64), P(D), P())
    return Program(jax.grad(lambda x: f(x)), (env.rows(),))


@case("core")
def outside_both(env: Env) -> Any:
    """With respect to both at once."""
    f = env.smap(lambda p, x: env.pmean(_loss(p, x), D), (P(), P(D)), P())
    return Program(jax.grad(lambda p, x: f(p, x), argnums=(0, 1)), (_params(env), env.rows()))


@case("core")
def outside_eager(env: Env) -> Any:
    """grad around, without jit."""
    f = env.smap(lambda p, x: env.pmean(_loss(p, x), D), (P(), P(D)), P())
    return jax.grad(lambda p, x: f(p, x))(_params(env), env.rows())


@case("core")
def outside_vjp(env: Env) -> Any:
    """vjp around, with a cotangent that has a value of its own in every element."""
    f = env.smap(lambda w, x: env.psum(x @ w, D), (P(), P(D)), P())
    ct = env.weights(4, 3, seed=9)

    def g(w: jax.Array, x: jax.Array) -> Any:
        y, back = jax.vjp(f, w, x)
        return y, back(ct)

    return Program(g, (env.weights(6, 3), env.rows()))


@case("core", table={op: {"op": op} for op in ("psum", "pmean")})
def inside_vjp(env: Env) -> Any:
    """vjp inside, of the reduction itself."""

    def f(x: jax.Array, ct: jax.Array) -> Any:
        y, back = jax.vjp(lambda x: getattr(env.api, env.params["op"])(x, D), x)
        return y, back(ct)[0]

    return Program(env.smap(f, (P(D), P()), (P(), P(D))), (env.rows(), env.weights(4, 6, seed=9)))


@case("core")
def inside_grad_of_batch(env: Env) -> Any:
    """grad inside, with respect to the local rows, of a global scalar."""

    def f(x: jax.Array) -> Any:
        return jax.grad(lambda x: jnp.sin(env.psum(jnp.sum(x**2), D) / 64))(x)

    return Program(env.smap(f, P(D), P(D)), (env.rows(),))


@case("core")
def inside_through_statistics(env: Env) -> Any:
    """Batch normalisation over ranks, differentiated inside."""

    def f(x: jax.Array, ct: jax.Array) -> Any:
        def norm(x: jax.Array) -> jax.Array:
            mean = env.pmean(jnp.mean(x, 0), D)
            return (x - mean) / jnp.sqrt(env.pmean(jnp.mean((x - mean) ** 2, 0), D) + 1e-3)

        return jax.grad(lambda x: jnp.sum(norm(x) * ct))(x)

    return Program(env.smap(f, (P(D), P(D)), P(D)), (env.normal(8, 6), env.normal(8, 6, seed=1)))


@case("core")
def jvp_inside_and_outside(env: Env) -> Any:
    """Forward mode."""
    f = env.smap(lambda x: env.psum(jnp.sin(x), D), P(D), P())
    inner = env.smap(lambda x, t: jax.jvp(lambda x: env.pmean(jnp.sin(x), D), (x,), (t,)), (P(D), P(D)), P())
    x, t = env.rows(), env.rows(seed=1)
    return Program(lambda x, t: (jax.jvp(f, (x,), (t,)), inner(x, t)), (x, t))


@case("core")
def linearize_outside(env: Env) -> Any:
    """linearize, then the linear part twice."""
    f = env.smap(lambda x: env.psum(jnp.cos(x), D), P(D), P())
    x, t = env.rows(), env.rows(seed=1)

    def g(x: jax.Array, t: jax.Array) -> Any:
        y, lin = jax.linearize(f, x)
        return y, lin(t), lin(2 * t)

    return Program(g, (x, t))


@case("core", table={f.__name__: {"jac": f.__name__} for f in (jax.jacfwd, jax.jacrev)})
def jacobian_inside(env: Env) -> Any:
    """Jacobians: vmap of jvp and of vjp."""
    jac = getattr(jax, env.params["jac"])
    x = env.rows(1, 3)
    f = env.smap(lambda x: jac(lambda v: env.psum(jnp.sin(v) * v[0], D))(x[0]), P(D), P(D))
    return Program(f, (x,))


@case("core")
def second_order_outside(env: Env) -> Any:
    """grad of grad: the Hessian's diagonal of a global loss."""
    f = env.smap(lambda w, x: env.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), D), (P(), P(D)), P())

    def g(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) ** 2))(w)

    return Program(g, (env.weights(6, 2), env.rows()))


@case("core", rejects=BOTH, table={op: {"op": op} for op in ("pmax", "pmin")})
def minmax_has_no_derivative(env: Env) -> Any:
    """Stock lax refuses to differentiate pmax and pmin."""
    return Program(
        env.smap(lambda x: jax.grad(lambda x: jnp.sum(getattr(env.api, env.params["op"])(x, D)))(x), P(D), P(D)),
        (env.rows(),),
    )


@case("core", vma=OFF)
def custom_vjp_explicit(env: Env) -> Any:
    """A custom rule with psums of its own, forward and backward."""

    @jax.custom_vjp
    def h(x: jax.Array) -> jax.Array:
        return env.psum(x, D)

    h.defvjp(lambda x: (env.psum(x, D), None), lambda _, ct: (env.psum(ct * 2, D),))
    return Program(env.smap(lambda x: jax.grad(lambda x: jnp.sum(h(x) ** 2))(x), P(D), P(D)), (env.rows(),))


@case("core", vma=ON)
def custom_vjp_typed(env: Env) -> Any:
    """A custom rule under vma types: the identity forward, a psum backward."""

    @jax.custom_vjp
    def h(w: jax.Array) -> jax.Array:
        return jax.lax.pcast(w, D, to="varying")

    h.defvjp(lambda w: (h(w), None), lambda _, ct: (env.psum(ct, D),))
    f = env.smap(lambda w, x: jax.grad(lambda w: jnp.sum((x @ h(w)) ** 2))(w), (P(), P(D)), P())
    return Program(f, (env.weights(6, 3), env.rows()))


@case("core")
def custom_jvp(env: Env) -> Any:
    """A custom forward rule around a psum."""

    @jax.custom_jvp
    def h(x: jax.Array) -> jax.Array:
        return env.psum(x, D) * 2

    h.defjvp(lambda p, t: (h(*p), env.psum(t[0], D) * 3))
    f = env.smap(lambda x, t: jax.jvp(lambda x: jnp.sin(h(x)), (x,), (t,)), (P(D), P(D)), P())
    return Program(f, (env.rows(), env.rows(seed=1)))


@case("core", vma=ON)
def remat_implicit(env: Env) -> Any:
    """checkpoint around a psum: computed again in the backward pass."""

    def f(p: Any, x: jax.Array) -> Any:
        inner = jax.checkpoint(lambda p: jnp.sin(env.psum(jnp.sin(x @ p["w"]), D) / 8))
        return jax.grad(lambda p: env.pmean(jnp.sum(inner(p)), D))(p)

    return Program(env.smap(f, (P(), P(D)), P()), ({"w": env.weights(6, 3)}, env.rows()))


@case(
    "core",
    table={
        "all": {"policy": None},
        "nothing": {"policy": "nothing_saveable"},
        "dots": {"policy": "dots_saveable"},
    },
)
def remat_outside(env: Env) -> Any:
    """checkpoint inside, grad around; several policies."""
    policy = env.params["policy"] and getattr(jax.checkpoint_policies, env.params["policy"])

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda h: jnp.tanh(h @ w) - env.pmean(jnp.mean(h), D), policy=policy)
        return env.pmean(jnp.mean(layer(layer(x)) ** 2), D)

    g = env.smap(f, (P(), P(D)), P())
    return Program(jax.value_and_grad(lambda w, x: g(w, x)), (env.weights(6, 6), env.rows()))


@case("core")
def through_scan(env: Env) -> Any:
    """A scan over layers with a psum in each, differentiated around."""

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, wi: jax.Array) -> Any:
            h = jnp.tanh(h @ wi) - env.pmean(jnp.mean(h, 0), D) * 0.5
            return h, jnp.sum(h)

        h, sums = jax.lax.scan(layer, x, w)
        return env.pmean(jnp.mean(h**2) + jnp.mean(sums), D)

    g = env.smap(f, (P(), P(D)), P())
    return Program(jax.value_and_grad(lambda w, x: g(w, x)), (env.weights(3, 6, 6), env.rows()))


@case("core")
def through_scan_remat(env: Env) -> Any:
    """The same with a checkpointed body."""

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(h: jax.Array, wi: jax.Array) -> Any:
            return jnp.tanh(h @ wi) - env.pmean(jnp.mean(h, 0), D) * 0.5, None

        return env.pmean(jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2), D)

    g = env.smap(f, (P(), P(D)), P())
    return Program(jax.grad(lambda w, x: g(w, x), argnums=(0, 1)), (env.weights(3, 6, 6), env.rows()))


@case("core")
def through_cond(env: Env) -> Any:
    """Branches with different reductions."""

    def f(w: jax.Array, x: jax.Array, k: jax.Array) -> jax.Array:
        y = jax.lax.cond(k > 0, lambda t: env.psum(t**2, D) / 8, lambda t: env.pmean(jnp.sin(t), D), x @ w)
        return jnp.sum(y)

    g = env.smap(f, (P(), P(D), P()), P())
    step = jax.jit(jax.grad(lambda w, x, k: g(w, x, k)))
    return [step(env.weights(6, 3), env.rows(), env.same(np.int32(k))) for k in (0, 1)]


@case("core")
def through_inner_jit(env: Env) -> Any:
    """A jitted function used twice, differentiated."""
    h = jax.jit(lambda y: jnp.sin(env.psum(y, D) / 8))
    f = env.smap(lambda x: jnp.sum(h(x) * h(x * 2)), P(D), P())
    return Program(jax.grad(lambda x: f(x)), (env.rows(),))


@case("core")
def through_vmap(env: Env) -> Any:
    """vmap of grad of a reduction."""

    def f(x: jax.Array) -> Any:
        return jax.vmap(jax.grad(lambda v: jnp.sum(env.psum(v**2, D) ** 2)))(x)

    return Program(env.smap(f, P(D), P(D)), (env.rows(),))


@case("core", vma=ON)
def has_aux_and_closure(env: Env) -> Any:
    """Closed-over parameters and auxiliary outputs."""
    w = env.weights(6, 3)

    def f(w: jax.Array, x: jax.Array) -> Any:
        def loss(b: jax.Array) -> Any:
            y = x @ w + b
            return env.pmean(jnp.mean(y**2), D), env.pmean(jnp.mean(y), D)

        return jax.value_and_grad(loss, has_aux=True)(jnp.zeros(3))

    return Program(env.smap(f, (P(), P(D)), P()), (w, env.rows()))


@case("core", vma=ON)
def accumulation(env: Env) -> Any:
    """Gradient accumulation over micro-batches, one reduction at the end."""

    def f(p: Any, x: jax.Array) -> Any:
        zero = jax.tree.map(lambda t: jax.lax.pcast(jnp.zeros_like(t), D, to="varying"), p)
        local = jax.tree.map(lambda t: jax.lax.pcast(t, D, to="varying"), p)
        total, _ = jax.lax.scan(
            lambda g, xi: (jax.tree.map(jnp.add, g, jax.grad(_loss)(local, xi[None])), None), zero, x
        )
        return env.pmean(total, D)

    return Program(env.smap(f, (P(), P(D)), P()), (_params(env), env.rows()))


@case("core", vma=ON)
def bfloat16_params(env: Env) -> Any:
    """Narrow parameters, wide loss: the inserted reduction is in bfloat16."""

    def f(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: env.pmean(jnp.mean((x @ w.astype(jnp.float32)) ** 2), D))(w)

    return Program(env.smap(f, (P(), P(D)), P()), (env.weights(6, 3).astype(jnp.bfloat16), env.rows()))


@case(
    "core",
    "smoke",
    table={"implicit": {"how": "implicit", "vma": ON}, "explicit": {"how": "explicit", "vma": OFF}},
)
def five_steps(env: Env) -> Any:
    """Five steps of gradient descent: parameters stay equal on all ranks, bit by bit."""

    def grads(p: Any, x: jax.Array) -> Any:
        if env.params["how"] == "implicit":
            return jax.grad(lambda p: env.pmean(_loss(p, x), D))(p)
        return env.pmean(jax.grad(_loss)(p, x), D)

    g = env.smap(grads, (P(), P(D)), P())

    @partial(jax.jit, donate_argnums=0)
    def step(p: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda t, d: t - 0.5 * d, p, g(p, x))

    p = jax.tree.map(jnp.copy, _params(env))
    for i in range(5):
        p = step(p, env.normal(8, 6, seed=i))
    return p


@case("core")
def two_shard_maps_chained(env: Env) -> Any:
    """A gradient through two regions, with a replicated value between them."""
    a = env.smap(lambda x: env.pmean(jnp.mean(x**2, 0), D), P(D), P())
    b = env.smap(lambda m, x: env.psum(jnp.sum(jnp.sin(x * m)), D) / 16, (P(), P(D)), P())
    return Program(jax.grad(lambda x: b(a(x), x)), (env.rows(),))
