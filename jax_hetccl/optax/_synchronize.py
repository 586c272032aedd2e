"""``hetccl.optax.synchronize``: the mean of the gradients over all clusters, as the first link of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optax

from jax_hetccl.optax import _wire
from jax_hetccl.syncing import formats


class SynchronizeState(NamedTuple):
    """State of :func:`synchronize` with a narrow format.

    Attributes:
      residual: float32, like the parameters: what this cluster has not been able to send yet, in units of its
        gradient, or of weight times gradient. Each cluster has its own.
    """

    residual: Any


def synchronize(
    weight: Any = None,
    wire_dtype: Any = None,
    *,
    error_feedback: bool = True,
    buckets: int | Sequence[str] | None = None,
    name: str = "",
) -> optax.GradientTransformationExtraArgs:
    """The mean of the gradients over all clusters, with :func:`hetccl.sync`.

    Put it first in a chain, so that what follows (clipping, the optimizer) sees the gradient of all clusters. As for
    ``sync``: inside ``jax.jit``, outside of ``shard_map``, gradients sharded as they are; the result is the same bits
    in all clusters.

    With ``wire_dtype`` what crosses between clusters is rounded to this format; within a cluster, and in the sum, it
    is float32. The formats are ``bfloat16``, ``float8_e4m3fn`` and ``int8``; the latter two carry one power of two as scale
    for each row (the trailing dimensions, as few as have 64 elements). What rounding loses is kept in the state and added
    to the next gradient: error feedback, as in 1-bit SGD (Seide et al., Interspeech 2014) and analysed by Karimireddy et al.
    2019 (arXiv 1901.09847). Each cluster sends its whole gradient to each other one, C - 1 times its bytes in this
    format. A row with a value that is not finite is NaN in all clusters; in bfloat16 only the element is, as it was.

    Args:
      weight: the cluster's weight in the mean: a number, or None. ``update(..., weight=...)`` overrides it, for example with
        a traced number of tokens. Given in every cluster or in none; it crosses as float32.
      wire_dtype: a format, or None: the gradients' own dtypes. The same in all clusters.
      error_feedback: whether what rounding loses is kept.
      buckets: see :func:`hetccl.sync`: how the exchange overlaps with the backward pass.
      name: see :func:`hetccl.sync`.

    Returns:
      The transformation. Its state is empty, or a :class:`SynchronizeState` with ``wire_dtype`` and ``error_feedback``.

    Raises:
      ConfigError: there is no such format.

    ``update`` raises what ``sync`` raises: ``AgreementError`` before data moves, naming both sides, where another
    cluster syncs other arrays or in another format; ``UnsupportedError`` inside ``shard_map``, under differentiation
    with ``wire_dtype``, or for arrays that are no floats.

    Example:
      >>> optimizer = optax.chain(hetccl.optax.synchronize(), optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
      >>> updates, state = optimizer.update(grads, state, params, weight=tokens)  # tokens: this cluster's
    """
    wire = None if wire_dtype is None else formats.format_of(wire_dtype).name
    keeps, fixed = wire is not None and error_feedback, weight

    def init(params: Any) -> Any:
        return SynchronizeState(_wire.zeros(params)) if keeps else optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, *, weight: Any = None, **_: Any) -> tuple[Any, Any]:
        residual = state.residual if keeps else None
        by = fixed if weight is None else weight
        found, residual = _wire.mean(updates, residual, by, wire, name, buckets)
        return found, SynchronizeState(residual) if keeps else state

    return optax.GradientTransformationExtraArgs(init, update)
