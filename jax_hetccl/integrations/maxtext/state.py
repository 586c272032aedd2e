"""The training state: one cluster writes and restores checkpoints, and all clusters start from its state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import jax_hetccl as hetccl

_log = logging.getLogger(__name__)


def setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """``setup_train_loop``: the first cluster's state (restored or fresh) for all, with each cluster's shardings.

    That holds parameters, the optimizer's state, the step and the random keys, so the clusters need no common folder.
    """

    def broadcast(config: Any, recorder: Any, devices: Any = None) -> Any:
        *others, state = original(config, recorder, devices)
        nnx.update(state, hetccl.broadcast(nnx.state(state)))  # the model among `others` is a part of it
        return (*others, state)

    return broadcast


def manager(original: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """``create_checkpoint_manager``: none outside of the first cluster."""

    def only_first(config: Any, mesh: Any, init_state_fn: Any) -> Any:
        return original(config, mesh, init_state_fn) if first else None

    return only_first


def save(original: Callable[..., Any]) -> Callable[..., Any]:
    """``maybe_save_checkpoint``, which every cluster calls after each step: compares the clusters before a checkpoint.

    Where updates of two vendors' compilers round differently the clusters drift apart by rounding. They go on from what
    the checkpoint holds: the first cluster's state is copied, with a warning that names the first array that differs.
    """

    def compared(checkpoint_manager: Any, state: Any, config: Any, data_iterator: Any, step: Any = None) -> Any:
        if step is None or int(step) % config.checkpoint_period == 0:
            _equalise(state)
        return original(checkpoint_manager, state, config, data_iterator, step)

    return compared


def _equalise(state: Any) -> None:
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state)]
    values = dict(zip(names, jax.tree.leaves(state), strict=True))
    try:
        hetccl.check_replicas(values)
    except hetccl.MismatchError as error:
        _log.warning("%s The first cluster's state is copied.", str(error).split(" hetccl.check_replicas(")[0])
        first = hetccl.broadcast(values)  # a dict comes back in the order of its keys
        for variable, name in zip(variables, names, strict=True):
            variable.set_value(first[name])
