"""``hetccl.optax.diloco``: local steps, and now and then an outer step over all clusters.

DiLoCo is that of Douillard et al. 2023 (arXiv 2311.08105); fragments, the overlap of their exchange with local steps and
the mixing of what comes out of it are those of Streaming DiLoCo, Douillard et al. 2025 (arXiv 2501.18512).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_hetccl._errors import ConfigError, UnsupportedError
from jax_hetccl.optax import _wire
from jax_hetccl.syncing import formats


class DilocoState(NamedTuple):
    """State of :func:`diloco`.

    Attributes:
      step: int32, local steps so far.
      anchor: the parameters that all clusters share, in float32 or wider: the same bits everywhere, as far as the clusters'
        compilers round the outer optimizer's arithmetic alike. What to evaluate and save.
      outer: the outer optimizer's state, one for each fragment; the same bits everywhere.
      residual: float32, what this cluster has not been able to send in the narrow format yet; or None. Each cluster has its own.
    """

    step: Any
    anchor: Any
    outer: tuple[Any, ...]
    residual: Any


class Diloco(NamedTuple):
    """What :func:`diloco` returns: three functions.

    Attributes:
      init: ``(params) -> state``. The parameters must be the same in all clusters (:func:`hetccl.broadcast`).
      apply_updates: ``(params, updates, state, due=None) -> (params, state)``, in place of ``optax.apply_updates``, in every step.
        ``due`` is what ``due(step)`` says, static under ``jit``. With None the step counted in the state decides, in the program.
      due: ``(step) -> fragments``: which fragments have an outer step in local step number ``step``, from 0 on. For the host.
    """

    init: Callable[[Any], DilocoState]
    apply_updates: Callable[..., tuple[Any, DilocoState]]
    due: Callable[[int], tuple[int, ...]]


def diloco(
    outer: optax.GradientTransformation,
    every: int,
    *,
    overlap: bool = False,
    mixing: float = 0.5,
    fragments: int = 1,
    weight: float | None = None,
    wire_dtype: Any = None,
    error_feedback: bool = True,
    name: str = "diloco",
) -> Diloco:
    """Clusters that train on their own and exchange parameters only every so many steps, for slow links.

    Each cluster runs its own optimizer on its own gradients. In every ``every``-th step the clusters average how far they
    have come since the last outer step (anchor minus parameters, the *pseudo-gradient*), the outer optimizer applies the
    average to the anchor, and all go on from the new anchor. Between clusters that is the size of the parameters (as float32,
    or ``wire_dtype``) once in ``every`` steps.

    Without ``overlap`` an outer step ends the local step that it falls on, and all clusters' parameters are the new anchor:
    the same bits. With ``overlap`` it uses the parameters from *before* that local step, so its exchange does not wait for
    the step's gradients and can run beside them; the parameters afterwards are ``mixing`` times the local ones plus ``1 - mixing``
    times the new anchor. Then only the anchors are the same bits (with ``mixing=0`` the parameters too, but that local step is
    lost). Whether XLA runs both at once is up to its scheduler: on CPU devices it did not, and on a GPU a tenth of the outer
    step was hidden (docs/optax.md).

    With ``fragments`` the leaves are cut into so many groups of about equal size, in order, each with outer steps of its
    own, ``every`` apart and spread evenly: the link carries a part at a time. The first outer step of later fragments comes
    earlier.

    Inside ``jax.jit``, outside of ``shard_map``, as :func:`hetccl.sync`; every cluster must call it equally often. Given ``due``,
    steps with and without an exchange are programs of their own. Without it there is one program with a branch, and what is
    in a branch overlaps with nothing: pass ``due`` where ``overlap`` is to save time.

    Args:
      outer: the outer optimizer, such as ``optax.sgd(0.7, momentum=0.9, nesterov=True)``, the paper's. ``optax.sgd(1.0)``
        averages the parameters.
      every: local steps from one outer step to the next.
      overlap: whether an outer step uses the parameters from before the local step that it falls on.
      mixing: with ``overlap``, the part of the local parameters in the mixture, 0 to 1.
      fragments: 1 to ``every``.
      weight: the cluster's weight in the mean of the pseudo-gradients; see :func:`hetccl.sync`.
      wire_dtype: see :func:`synchronize`: what crosses is rounded to this format.
      error_feedback: whether what that loses is kept for the next outer step.
      name: tells two of them apart.

    Returns:
      The three functions.

    Raises:
      ConfigError: a number is out of range, or there is no such format.

    ``apply_updates`` raises what ``sync`` raises; other values of ``every``, ``overlap``, ``fragments`` or ``wire_dtype`` in
    another cluster are an ``AgreementError`` before data moves.

    Example:
      >>> inner = optax.adamw(3e-4)
      >>> outer = hetccl.optax.diloco(optax.sgd(0.7, momentum=0.9, nesterov=True), every=50)
      >>> inner_state, outer_state = inner.init(params), outer.init(params)
      >>> @functools.partial(jax.jit, static_argnames="due")
      ... def step(params, inner_state, outer_state, batch, due):
      ...     grads = jax.grad(loss_fn)(params, batch)  # this cluster's
      ...     updates, inner_state = inner.update(grads, inner_state, params)
      ...     params, outer_state = outer.apply_updates(params, updates, outer_state, due)
      ...     return params, inner_state, outer_state
      >>> for i, batch in enumerate(batches):
      ...     params, inner_state, outer_state = step(params, inner_state, outer_state, batch, due=outer.due(i))
    """
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"diloco: every={every!r}; it is a whole number of steps, 1 or more")
    if not isinstance(fragments, int) or not 1 <= fragments <= every:
        raise ConfigError(f"diloco: fragments={fragments!r}; it is a whole number from 1 to every={every}")
    if not 0 <= mixing <= 1:
        raise ConfigError(f"diloco: mixing={mixing!r}; it is between 0 and 1")
    wire = None if wire_dtype is None else formats.format_of(wire_dtype).name
    keeps = wire is not None and error_feedback

    def init(params: Any) -> DilocoState:
        anchor = jax.tree.map(_wide, params)
        return DilocoState(
            step=jnp.zeros((), np.int32),
            anchor=anchor,
            outer=tuple(outer.init(_part_of(anchor, part)) for part in _cut(anchor, fragments)),
            residual=_wire.zeros(anchor) if keeps else None,
        )

    def update(at: Any, state: Any, average: Any) -> tuple[Any, Any]:
        updates, state = outer.update(average, state, at)
        return optax.apply_updates(at, updates), state

    def outer_step(number: int, part: Sequence[int], given: Any) -> Any:
        """The outer step of one fragment: ``(anchor, outer states, residual, parameters, step)`` to the first three."""
        anchor, states, residual, params, step = given
        at = _part_of(anchor, part)
        moved = jax.tree.map(lambda a, p: _start(a, p.dtype, overlap) - p.astype(a.dtype), at, _part_of(params, part))
        # What the clusters must agree on is in the name: another number would be another exchange at another step.
        agreed = f"{name} every={every} overlap={overlap} fragment={number} of {fragments}"
        average, left = _wire.mean(moved, _part_of(residual, part) if keeps else None, weight, wire, agreed)
        # A branch is compiled by itself. Fused with what is around it, which differs between clusters, the same arithmetic
        # would be rounded differently. The condition always holds, which the compiler does not know.
        moved_on, state = jax.lax.cond(step > 0, update, lambda *old: old[:2], at, states[number], average)
        anchor = _with_part(anchor, part, moved_on)
        states = (*states[:number], state, *states[number + 1 :])
        return anchor, states, _with_part(residual, part, left) if keeps else None

    def falls_on(number: int, step: Any) -> Any:
        """Whether a fragment has its outer step in a local step, counted from 1."""
        return (step - number * every // fragments) % every == 0

    def due_in(step: int) -> tuple[int, ...]:
        return tuple(n for n in range(fragments) if falls_on(n, step + 1))

    def apply_updates(
        params: Any, updates: Any, state: DilocoState, due: tuple[int, ...] | None = None
    ) -> tuple[Any, DilocoState]:
        local = optax.apply_updates(params, updates)
        cut, step = _cut(params, fragments), state.step + 1
        steps = [functools.partial(outer_step, n, part) for n, part in enumerate(cut)]
        source = params if overlap else local
        shared = (state.anchor, state.outer, state.residual)
        if due is None:
            happens = [falls_on(n, step) for n in range(fragments)]
            which = sum(jnp.where(now, n + 1, 0) for n, now in enumerate(happens))
            shared = jax.lax.switch(which, [lambda given: given[:3], *steps], (*shared, source, step))
        else:
            happens = [n in due for n in range(fragments)]
            for n in due:
                shared = steps[n]((*shared, source, step))
        anchor, states, residual = shared
        for part, now in zip(cut, happens, strict=True):
            if now is False:
                continue
            after = jax.tree.map(
                lambda x, a: jnp.where(now, _joined(x, a, mixing if overlap else 0), x),
                _part_of(local, part),
                _part_of(anchor, part),
            )
            local = _with_part(local, part, after)
        return local, DilocoState(step, anchor, states, residual)

    return Diloco(init, apply_updates, due_in)


def _start(anchor: jax.Array, dtype: Any, overlap: bool) -> jax.Array:
    """What the local steps began with: parameters of a narrower type were the anchor rounded, which is no movement. With
    ``overlap`` they were a mixture, so that the rounding cannot be told apart."""
    return anchor if overlap else _wire.rounded(anchor, dtype).astype(anchor.dtype)


def _joined(local: jax.Array, anchor: jax.Array, mixing: float) -> jax.Array:
    """The parameters after an outer step."""
    if not mixing:
        return _wire.rounded(anchor, local.dtype)
    return (mixing * local.astype(anchor.dtype) + (1 - mixing) * anchor).astype(local.dtype)


def _wide(x: Any) -> jax.Array:
    """A copy in float32 or wider."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UnsupportedError(
            f"diloco: a parameter is {x.dtype.name}[{','.join(map(str, x.shape))}]; it averages floats"
        )
    return jnp.array(x, jnp.promote_types(x.dtype, np.float32))  # a copy: the parameters may be donated


def _cut(tree: Any, fragments: int) -> list[list[int]]:
    """Cuts a tree's leaves, by number, into groups of about equal size, in order; some may be empty."""
    sizes = [x.size for x in jax.tree.leaves(tree)]
    total, before = max(1, sum(sizes)), 0
    cut: list[list[int]] = [[] for _ in range(fragments)]
    for i, size in enumerate(sizes):
        cut[min((2 * before + size) * fragments // (2 * total), fragments - 1)].append(i)
        before += size
    return cut


def _part_of(tree: Any, part: Sequence[int]) -> Any:
    """A tree with some of its leaves only; the others are None."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([x if i in part else None for i, x in enumerate(leaves)])


def _with_part(tree: Any, part: Sequence[int], new: Any) -> Any:
    """A tree with other leaves in place of some."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, x in zip(part, jax.tree.leaves(new), strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)
