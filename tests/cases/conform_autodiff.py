"""Derivatives of every linear collective: forward and reverse, first and second order, inside and outside.

The behaviour is what JAX's tests check: shard_map_test.py (jvp, linearize, grad, transposes of sums and of replicated
operands, grads of gathers and transposes, rematerialisation, custom rules, systematic grads in both check_vma modes),
pmap_test.py (grads of sums, gathers, scatters, permutations, axis swaps; second order) and batching_test.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import LINEAR, PRIMITIVES, each, op, table, values
from harness.case import BOTH, OFF, ON, Program, case
from harness.env import D, Env

_LINEAR_PRIMITIVES = tuple(k for k in PRIMITIVES if k in LINEAR)


def _op(env: Env) -> Any:
    return op(env, env.params["op"])


def _across_outputs(env: Env) -> Any:
    """The scope in which this cluster's part of a cotangent may enter a sharded output."""
    if env.oracle:
        return contextlib.nullcontext()
    import jax_hetccl

    return jax_hetccl.sharded_cotangents()


@case("conform", "main", table=table(LINEAR))
def vjp(env: Env) -> Any:
    """Value and cotangent, inside."""

    def f(x: jax.Array) -> Any:
        y, back = jax.vjp(lambda x: jnp.sin(_op(env)(x)), x)
        return y, back(y * 2)[0]

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(LINEAR))
def jvp(env: Env) -> Any:
    """Value and tangent, inside."""
    f = lambda x, t: jax.jvp(lambda x: jnp.sin(_op(env)(x)), (x,), (t,))  # noqa: E731
    return each(env, f, 2 * env.size, 2, operands=2)


@case("turn", table=table(_LINEAR_PRIMITIVES))
def linearize(env: Env) -> Any:
    """The linear part, applied twice."""

    def f(x: jax.Array, t: jax.Array) -> Any:
        y, linear = jax.linearize(lambda x: jnp.cos(_op(env)(x)), x)
        return y, linear(t), linear(3 * t)

    return each(env, f, 2 * env.size, 2, operands=2)


@case("turn", table=table(LINEAR))
def transpose(env: Env) -> Any:
    """The transpose of the collective itself."""

    def f(x: jax.Array) -> Any:
        return jax.linear_transpose(_op(env), x)(_op(env)(x) + 1)[0]

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(_LINEAR_PRIMITIVES))
def hessian(env: Env) -> Any:
    """Forward over reverse, batched over the basis."""
    return each(env, jax.hessian(lambda x: jnp.sum(jnp.sin(_op(env)(x)) * x[0])), 2 * env.size)


@case(
    "turn",
    table={
        f"{f.__name__} {k}": {"jac": f.__name__, "op": k} for f in (jax.jacfwd, jax.jacrev) for k in _LINEAR_PRIMITIVES
    },
)
def jacobian(env: Env) -> Any:
    """Either mode, batched over the basis."""
    return each(env, getattr(jax, env.params["jac"])(lambda x: jnp.sin(_op(env)(x))), 2 * env.size)


@case("conform", table=table(LINEAR))
def grad_outside(env: Env) -> Any:
    """grad around the region: of replicated weights, and of the sharded operand."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.pmean(jnp.mean(jnp.tanh(_op(env)(x[0] * w)) ** 2), D)

    f = env.smap(loss, (P(), P(D)), P())
    return Program(jax.value_and_grad(f, (0, 1)), (env.weights(2), values(env, 2 * env.size, 2)))


@case("turn", table=table(_LINEAR_PRIMITIVES))
def second_order_outside(env: Env) -> Any:
    """grad of a function of a grad, both around the region."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.pmean(jnp.mean(jnp.tanh(_op(env)(x[0] * w)) ** 2), D)

    f = env.smap(loss, (P(), P(D)), P())
    g = jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2))
    return Program(g, (env.weights(2), values(env, 2 * env.size, 2)))


@case("turn", table=table(LINEAR))
def vjp_outside(env: Env) -> Any:
    """A cotangent for every rank enters a sharded output from outside."""
    f = env.smap(lambda w, x: jnp.sin(_op(env)(x[0] * w))[None], (P(), P(D)), P(D))

    def g(w: jax.Array, x: jax.Array) -> Any:
        with _across_outputs(env):
            y, back = jax.vjp(f, w, x)
            return y, back(y * 2)

    return Program(g, (env.weights(2), values(env, 2 * env.size, 2)))


@case("turn", table=table(_LINEAR_PRIMITIVES))
def jvp_outside(env: Env) -> Any:
    """Forward mode around the region."""
    f = env.smap(lambda x: jnp.sin(_op(env)(x[0]))[None], P(D), P(D))
    x, t = values(env, 2 * env.size, 2), values(env, 2 * env.size, 2, seed=1)
    return Program(lambda x, t: jax.jvp(f, (x,), (t,)), (x, t))


@case("turn", table=table(_LINEAR_PRIMITIVES))
def linearize_outside(env: Env) -> Any:
    """linearize around the region: residuals leave it."""
    f = env.smap(lambda x: jnp.cos(_op(env)(x[0]))[None], P(D), P(D))

    def g(x: jax.Array, t: jax.Array) -> Any:
        y, linear = jax.linearize(f, x)
        return y, linear(t), linear(3 * t)

    return Program(g, (values(env, 2 * env.size, 2), values(env, 2 * env.size, 2, seed=1)))


@case("turn", table=table(_LINEAR_PRIMITIVES))
def remat(env: Env) -> Any:
    """Computed again in the backward pass."""

    def f(x: jax.Array) -> Any:
        y, back = jax.vjp(jax.checkpoint(lambda x: jnp.sin(_op(env)(jnp.sin(x)))), x)
        return y, back(y * 2)[0]

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(_LINEAR_PRIMITIVES))
def through_scan(env: Env) -> Any:
    """The collective in a loop that is differentiated."""

    def f(x: jax.Array) -> Any:
        def loop(x: jax.Array) -> jax.Array:
            body = lambda c, t: (c * 0.5 + jnp.sum(jnp.sin(_op(env)(c * t))) * 0.125, jnp.sum(c))  # noqa: E731
            c, sums = lax.scan(body, x, jnp.arange(1.0, 4.0))
            return jnp.sum(c) + jnp.sum(sums**2)

        return jax.value_and_grad(loop)(x)

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(_LINEAR_PRIMITIVES))
def custom_rule(env: Env) -> Any:
    """The collective in a rule of the user's own, forward and backward."""

    @jax.custom_vjp
    def h(x: jax.Array) -> jax.Array:
        return x + jnp.sum(_op(env)(x))

    h.defvjp(lambda x: (h(x), x), lambda x, ct: (ct * 3 + jnp.sum(_op(env)(ct * x)),))
    return each(env, jax.value_and_grad(lambda x: jnp.sum(h(x) ** 2)), 2 * env.size, 2)


@case(
    "conform", rejects=BOTH, table={f"{f} {k}": {"how": f, "op": k} for f in ("grad", "jvp") for k in ("pmax", "pmin")}
)
def no_derivative(env: Env) -> Any:
    """pmax and pmin have none."""
    f = lambda x: jnp.sum(_op(env)(x))  # noqa: E731
    return each(env, jax.grad(f) if env.params["how"] == "grad" else lambda x: jax.jvp(f, (x,), (x,)), 2 * env.size)


@case("conform")
def zero_cotangents(env: Env) -> Any:
    """A sum of which only a part matters: the rest has no cotangent."""

    def inner(meta: jax.Array, params: Any) -> jax.Array:
        net, rate = lax.psum(jax.grad(lambda p: jnp.sum(meta * p[1] * p[0]))(params), D)
        return jnp.sum(params[1] * (params[0] + net)) + 0 * jnp.sum(rate)

    return each(env, lambda x: jax.grad(inner)(x[0] * 0 + 4.0, (x, x * 2)), 3)


@case("conform")
def auxiliary(env: Env) -> Any:
    """has_aux, with reduced auxiliary values."""

    def f(x: jax.Array) -> Any:
        return jax.value_and_grad(lambda x: (jnp.sum(lax.psum(x, D) ** 2), lax.pmean(x, D)), has_aux=True)(x)

    return each(env, f, 4)


# --- between replicated and varying values -----------------------------------------------------------------------


@case("conform", vma=ON, table={"pcast": {"how": "pcast"}, "implicit": {"how": "implicit"}})
def of_replicated_weights(env: Env) -> Any:
    """The gradient of weights that are the same everywhere is the sum over ranks, with and without the cast written."""
    vary = (lambda w: lax.pcast(w, D, to="varying")) if env.params["how"] == "pcast" else (lambda w: w)
    f = env.smap(lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(x[0] * vary(w))))(w), (P(), P(D)), P())
    return Program(f, (env.weights(3), values(env, 4, 3)))


@case("conform", vma=ON, table=table(("psum", "pmean")))
def of_varying_weights(env: Env) -> Any:
    """Cast before the differentiation, the gradient stays with the rank; the reduction is the user's."""

    def f(w: jax.Array, x: jax.Array) -> Any:
        g = jax.grad(lambda w: jnp.sum(jnp.sin(x[0] * w)))(lax.pcast(w, D, to="varying"))
        return getattr(lax, env.params["op"])(g, D)

    return Program(env.smap(f, (P(), P(D)), P()), (env.weights(3), values(env, 4, 3)))


@case("conform", vma=OFF, table=table(("psum", "pmean")))
def explicit_weights(env: Env) -> Any:
    """Without types: the gradient inside is the rank's own until it is reduced."""

    def f(w: jax.Array, x: jax.Array) -> Any:
        return getattr(lax, env.params["op"])(jax.grad(lambda w: jnp.sum(jnp.sin(x[0] * w)))(w), D)

    return Program(env.smap(f, (P(), P(D)), P()), (env.weights(3), values(env, 4, 3)))


@case("conform", table={"tiled": {"tiled": True}, "untiled": {"tiled": False}})
def invariant_gather(env: Env) -> Any:
    """A gather that becomes the same everywhere: its cotangent is the rank's own part, not a sum."""
    f = env.smap(lambda x: lax.all_gather(x[0], D, tiled=env.params["tiled"], to="invarying"), P(D), P())
    g = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(x)) ** 2))
    return Program(g, (values(env, 3, 2),))


@case("conform")
def fan_out(env: Env) -> Any:
    """A replicated operand that leaves sharded: the transpose is a sum."""
    f = env.smap(lambda w: jnp.sin(w)[None] * (lax.axis_index(D) + 1), P(), P(D))

    def g(w: jax.Array) -> Any:
        with _across_outputs(env):
            y, back = jax.vjp(f, w)
            return y, back(y * 2)

    return Program(g, (env.weights(3),))
