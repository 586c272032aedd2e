"""Checkpoints with orbax: one cluster saves and restores, the others get the state by broadcast. Stop it and start it again.

hetccl run --cluster left=1x2 --cluster right=1x1 -- python examples/checkpoint.py --directory /tmp/checkpoints
"""

import argparse
import logging
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, PartitionSpec

import jax_hetccl as hetccl

parser = argparse.ArgumentParser()
parser.add_argument("--directory", type=Path, required=True, help="on a disk that the first cluster's processes share")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--every", type=int, default=5)
args = parser.parse_args()

world = hetccl.initialize(axes=("data",))
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(0.05)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
def gradients(params: Any, key: jax.Array, step: jax.Array) -> Any:
    """Every device draws its own rows: the key, the step and the device's global index make them the same in any run."""
    key = jax.random.fold_in(jax.random.fold_in(key, step), jax.lax.axis_index("data"))
    x = jax.random.normal(key, (32, 8))
    return jax.value_and_grad(
        lambda w: jax.lax.pmean(jnp.mean((jnp.tanh(x @ w) - jnp.tanh(x @ jnp.arange(8.0))) ** 2), "data")
    )(params)


@jax.jit
def update(state: Any, grads: Any) -> Any:
    """A program of its own: every cluster rounds it alike (README.md, Limits)."""
    updates, opt_state = optimizer.update(grads, state["optimizer"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}


def restored(manager: ocp.CheckpointManager | None, state: Any) -> tuple[int, Any]:
    """The step to go on from and the state after it, in every cluster."""
    step = 0
    if manager is not None and (latest := manager.latest_step()) is not None:
        step, state = latest, manager.restore(latest, args=ocp.args.StandardRestore(state))
    step, state = hetccl.broadcast((jnp.int32(step), state))  # from the first cluster, each device its own shards
    return int(step), state


logging.getLogger("absl").setLevel(logging.ERROR)
params = jnp.zeros(8)
state = {"params": params, "optimizer": optimizer.init(params), "key": jax.random.key_data(jax.random.key(0))}
state = jax.device_put(state, jax.sharding.NamedSharding(mesh, PartitionSpec()))
# Only the first cluster has one; all of its processes do, as in any JAX world.
options = ocp.CheckpointManagerOptions(save_interval_steps=args.every, max_to_keep=2)
manager = ocp.CheckpointManager(args.directory.absolute(), options=options) if world.cluster == 0 else None

step, state = restored(manager, state)
print(f"goes on from step {step}", flush=True)
while step < args.steps:
    loss, grads = gradients(state["params"], jax.random.wrap_key_data(state["key"]), jnp.int32(step))
    state = jax.block_until_ready(update(state, grads))
    step += 1
    if manager is not None:
        manager.save(step, args=ocp.args.StandardSave(state))  # copies, then writes while training goes on
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
    print(f"step {step}: loss {float(loss):.6f}, state {zlib.crc32(bits):08x}", flush=True)
if manager is not None:
    manager.close()  # waits for what is being written
hetccl.barrier("checkpoint written")  # nobody leaves before, so that the end of one cluster is not taken for a loss
