"""The train step's replacements: gradients, losses and the norm of clipping are those of all clusters' tokens together.

MaxText's loss is a mean over the tokens that count. With ``w`` such tokens in a cluster and ``W`` in all of them, the
global loss is the sum over clusters of ``w / W * loss``, and so is its gradient. Both leave the functions below as they
leave MaxText's own in one world, so that everything behind them (cast, clipping, optimizer, metrics) is MaxText's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_hetccl as hetccl

# Means over tokens beside the loss. Auxiliary losses are no sums over tokens; each cluster has its own, and their mean
# is taken, as MaxText takes it over micro-batches.
_MEANS = ("z_loss", "moe_lb_loss", "indexer_loss", "mtp_loss")


def loss_fn(original: Callable[..., Any]) -> Callable[..., Any]:
    """MaxText's ``loss_fn`` for a step without gradient accumulation, and for evaluation.

    Args:
      original: ``(model, config, data, ...) -> (loss, aux)``; ``aux`` has ``xent_sum`` and ``total_weights``.

    Returns:
      The same over all clusters. Its gradient with respect to the model's parameters is the global one.
    """

    def over_all_clusters(
        model: Any,
        config: Any,
        data: Any,
        dropout_rng: Any,
        params: Any,
        sparsity_state: Any = None,
        is_train: bool = True,
    ) -> tuple[Any, Any]:
        if is_train:
            nnx.update(model, _summed_gradient(nnx.state(model, nnx.Param)))
        loss, aux = original(model, config, data, dropout_rng, params, sparsity_state, is_train=is_train)
        shared, aux, part = totals(loss, aux)
        return _reported(loss, shared, part), aux

    return over_all_clusters


def accumulation(original: Callable[..., Any], loss: Callable[..., Any]) -> Callable[..., Any]:
    """MaxText's ``gradient_accumulation_loss_and_grad``: one exchange behind the last micro-batch.

    Args:
      original: ``(loss_fn, config, model, ...) -> (loss, aux, gradients)``, means over this cluster's tokens.
      loss: MaxText's own ``loss_fn``, for each micro-batch.

    Returns:
      The same over all clusters.
    """

    def over_all_clusters(
        _loss_fn: Any, config: Any, model: Any, params: Any, params_shardings: Any, data: Any, dropout_rng: Any
    ) -> tuple[Any, Any, Any]:
        mean, aux, gradients = original(loss, config, model, params, params_shardings, data, dropout_rng)
        mean, aux, part = totals(mean, aux)
        gradients = jax.tree.map(lambda g: (g * part).astype(g.dtype), gradients)
        return mean, aux, _sum(gradients)

    return over_all_clusters


def clipping(_original: Callable[..., Any]) -> Callable[..., Any]:
    """MaxText's ``apply_gradient_clipping`` with a norm that has the same bits in every cluster.

    The gradients are equal everywhere, but each cluster adds up their squares in an order that follows from its own
    shardings; the factor would round differently, and the parameters with it. Otherwise this is
    ``optax.clip_by_global_norm``, whose norm cannot be given.
    """

    def with_one_norm(raw_grads: Any, state: Any, clipping_threshold: float) -> Any:
        norm = hetccl.sync(optax.tree.norm(raw_grads), name="maxtext norm")
        small = norm < clipping_threshold
        return jax.tree.map(lambda g: jnp.where(small, g, (g / norm.astype(g.dtype)) * clipping_threshold), raw_grads)

    return with_one_norm


def totals(loss: Any, aux: dict[str, Any]) -> tuple[jax.Array, dict[str, Any], jax.Array]:
    """Global values of a step.

    Args:
      loss: the mean over this cluster's tokens.
      aux: MaxText's dictionary: sums ``xent_sum`` and ``total_weights``, means, and what stays this cluster's own.

    Returns:
      The loss and ``aux`` over all clusters, and this cluster's part of all tokens, ``w / W``. All without derivative.
      If no cluster has a token, losses are 0 as in MaxText, not NaN.
    """
    weight = jnp.asarray(aux["total_weights"])
    means = [jnp.asarray(loss), *(jnp.asarray(aux.get(key, 0.0)) for key in _MEANS)]
    own = jnp.stack([m.astype(np.float32) for m in means])
    own = jnp.where(weight > 0, own * weight.astype(np.float32), 0)  # a cluster without tokens counts as absent
    said = {"means": own, "xent_sum": jnp.asarray(aux["xent_sum"], np.float32), "total_weights": weight}
    found = hetccl.sync(jax.lax.stop_gradient(said), "sum", name="maxtext losses")
    total = jnp.maximum(found["total_weights"], 1).astype(np.float32)
    mean, *others = found["means"] / total
    shared = {**aux, "xent_sum": found["xent_sum"], "total_weights": found["total_weights"]}
    shared |= {key: value for key, value in zip(_MEANS, others, strict=True) if key in aux}
    return mean, shared, jax.lax.stop_gradient(weight.astype(np.float32) / total)


@jax.custom_vjp
def _summed_gradient(tree: Any) -> Any:
    """The identity, whose gradient is summed over the clusters."""
    return tree


_summed_gradient.defvjp(lambda tree: (tree, None), lambda _, gradient: (_sum(gradient),))


@jax.custom_vjp
def _reported(loss: jax.Array, shared: jax.Array, part: jax.Array) -> jax.Array:
    """``shared``, with the derivative of ``part * loss``."""
    return shared


_reported.defvjp(
    lambda loss, shared, part: (shared.astype(loss.dtype), part),
    lambda part, gradient: ((gradient * part).astype(gradient.dtype), jnp.zeros_like(part), jnp.zeros_like(part)),
)


def _sum(gradients: Any) -> Any:
    # One name in both places, so that a cluster may accumulate while another does not.
    return hetccl.sync(gradients, "sum", name="maxtext gradients")
