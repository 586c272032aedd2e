"""What stock JAX refuses: the same class of error in every process, before anything is sent.

The behaviour is what JAX's tests check: shard_map_test.py (types of carries, branches and outputs, ranks of specs,
casts), pmap_test.py (unbound names, permutations that are none, groups) and lax's own checks of sizes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import each, values
from harness.case import BOTH, OFF, ON, Program, case
from harness.env import D, Env

_BODIES: dict[str, tuple[Callable[[Env, jax.Array], Any], tuple[bool, ...]]] = {
    # names
    "psum unbound": (lambda e, x: lax.psum(x, "nowhere"), BOTH),
    "all_gather unbound": (lambda e, x: lax.all_gather(x, "nowhere"), BOTH),
    "ppermute unbound": (lambda e, x: lax.ppermute(x, "nowhere", [(0, 0)]), BOTH),
    "axis_index unbound": (lambda e, x: x + lax.axis_index("nowhere"), BOTH),
    "axis_size unbound": (lambda e, x: x * lax.axis_size("nowhere"), BOTH),
    "psum one unbound": (lambda e, x: lax.psum(x, (D, "nowhere")), BOTH),
    # sizes
    "psum_scatter not the size": (lambda e, x: lax.psum_scatter(x[: e.size + 1], D), BOTH),
    "psum_scatter not divisible": (lambda e, x: lax.psum_scatter(x[: e.size + 1], D, tiled=True), BOTH),
    "psum_scatter no such dimension": (lambda e, x: lax.psum_scatter(x, D, scatter_dimension=5, tiled=True), BOTH),
    "all_to_all not the size": (lambda e, x: lax.all_to_all(x[: e.size + 1], D, 0, 0), BOTH),
    "all_to_all not divisible": (lambda e, x: lax.all_to_all(x[: e.size + 1], D, 0, 0, tiled=True), BOTH),
    "all_to_all no such dimension": (lambda e, x: lax.all_to_all(x, D, 7, 0, tiled=True), BOTH),
    "pswapaxes not the size": (lambda e, x: lax.pswapaxes(x[: e.size + 1], D, 0), BOTH),
    "all_gather no such dimension": (lambda e, x: lax.all_gather(x, D, axis=9), BOTH),
    # permutations
    "ppermute one destination twice": (lambda e, x: lax.ppermute(x, D, [(0, 1), (1, 1)]), BOTH),
    "ppermute one source twice": (lambda e, x: lax.ppermute(x, D, [(0, 0), (0, 1)]), BOTH),
    "pshuffle no permutation": (lambda e, x: lax.pshuffle(x, D, [1, *range(1, e.size)]), BOTH),
    # groups
    "groups do not cover": (lambda e, x: lax.psum(x, D, axis_index_groups=[[0, 2]]), BOTH),
    "groups of a vmap": (
        lambda e, x: jax.vmap(lambda v: lax.pmax(v, (D, "v"), axis_index_groups=[list(range(e.size))]), axis_name="v")(x),
        BOTH,
    ),
    # types and values
    "psum_scatter of bool": (lambda e, x: lax.psum_scatter(x > 0, D, tiled=True), BOTH),
    "pmax of complex": (lambda e, x: lax.pmax(x + 1j, D), BOTH),
    "pmin of complex": (lambda e, x: lax.pmin(x + 1j, D), BOTH),
    "psum of text": (lambda e, x: lax.psum("text", D), BOTH),
    "all_gather to nothing": (lambda e, x: lax.all_gather(x, D, to="nothing"), BOTH),
    "pcast of a set": (lambda e, x: lax.pcast(x[0, 0] * 0, {D}, to="varying"), BOTH),
    "pcast to nothing": (lambda e, x: lax.pcast(x, D, to="nothing"), BOTH),
    # shapes that only show behind a collective
    "sum of other shapes": (lambda e, x: lax.all_gather(x, D) + jnp.zeros((e.size + 1, 2)), BOTH),
    # varying and replicated
    "pcast of varying": (lambda e, x: lax.pcast(x, D, to="varying"), ON),
    "carry changes its type": (lambda e, x: lax.scan(lambda c, _: (lax.psum(c, D), None), x, None, length=2), ON),
    "carry becomes varying": (lambda e, x: lax.scan(lambda c, t: (c + t, None), jnp.zeros(2), x), ON),
    "branches of other types": (lambda e, x: lax.cond(lax.pmax(x[0, 0], D) > 0, lambda t: lax.psum(t, D), lambda t: t, x), ON),
}  # fmt: skip


@case("conform", table={name: {"how": name, "rejects": modes} for name, (_, modes) in _BODIES.items()})
def inside(env: Env) -> Any:
    """Errors of what a region's body says."""
    f = _BODIES[env.params["how"]][0]
    return each(env, lambda x: f(env, x), 2 * env.size, 2)


@case(
    "conform",
    rejects=BOTH,
    table={n: {"how": n} for n in ("psum unbound", "ppermute one source twice", "all_to_all not divisible")},
)
def eager(env: Env) -> Any:
    """The same without jit."""
    f = _BODIES[env.params["how"]][0]
    program = each(env, lambda x: f(env, x), 2 * env.size, 2)
    return Program(program.fn, program.args, how="eager")


@case("conform", rejects=ON)
def replicated_output_of_varying(env: Env) -> Any:
    """An output without the axis must be the same everywhere; without types that is the user's word, as for a maximum
    that he knows."""
    f = env.smap(lambda x: lax.all_gather(x, D), P(D), P())
    return Program(f, (values(env, 3),))


_SPECS: dict[str, Callable[[Env], Callable[..., Any]]] = {
    "input of too low rank": lambda e: e.smap(lambda x: x, P(None, None, None, None, D), P(D)),
    "output of too low rank": lambda e: e.smap(lambda x: lax.psum(jnp.sum(x), D), P(D), P(D)),
    "specs of another tree": lambda e: e.smap(lambda x: lax.psum(x, D), (P(D), P(D)), P()),
    "output of another tree": lambda e: e.smap(lambda x: lax.psum(x, D), P(D), (P(), P())),
    "output of an unknown axis": lambda e: e.smap(lambda x: lax.psum(x, D), P(D), P("nowhere")),
    "input of an unknown axis": lambda e: e.smap(lambda x: lax.psum(x, D), P("nowhere"), P()),
}


@case("conform", rejects=BOTH, table={name: {"how": name} for name in _SPECS})
def specs(env: Env) -> Any:
    """Errors of what a region's specs say."""
    return Program(lambda x: _SPECS[env.params["how"]](env)(x), (values(env, 3, 2),))


@case("conform", vma=OFF, table={"before": {"how": "before"}, "after": {"how": "after"}})
def usable_afterwards(env: Env) -> Any:
    """A program beside one that is refused works."""
    try:
        program = each(env, lambda x: lax.psum_scatter(x, D, tiled=True), env.size + 1)
        jax.eval_shape(program.fn, *program.args)
    except ValueError:
        return each(env, lambda x: lax.psum(x, D), 3)
    raise AssertionError("a scatter of a size that does not divide was accepted")
