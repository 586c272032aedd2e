"""Training that goes on when a cluster dies, and takes the cluster in again when it comes back.

hetccl run --restarts 1 --cluster left=1x1 --cluster right=1x2 --cluster third=1x1 -- python examples/elastic.py --kill third:6

At step 6 the cluster "third" kills itself. The others go on from the last step that all of them completed; `hetccl run` starts the
lost cluster again, which gets the state of the others. docs/elastic.md has the details.
"""

import argparse
import functools
import os
import signal
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import jax_hetccl as hetccl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument(
    "--together", type=int, default=10, help="the last so many steps wait for a lost cluster, a minute at most"
)
parser.add_argument("--kill", default=":0", metavar="CLUSTER:STEP", help="a cluster that dies before a step")
parser.add_argument("--save", help="a folder for the state from which training goes on after each change of clusters")
parser.add_argument("--load", help="a file of that folder, to begin with")
args = parser.parse_args()

world = hetccl.initialize(axes=("data",))
name = world.config.cluster_name
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
target = jnp.arange(8.0)


@functools.partial(jax.jit, donate_argnums=0)
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
def train(state, step):
    """One step of linear regression with momentum; every device of every cluster draws its own rows."""
    w, velocity = state
    x = jax.random.normal(jax.random.fold_in(jax.random.key(step), jax.lax.axis_index("data")), (32, 8))
    loss, grad = jax.value_and_grad(lambda w: jax.lax.pmean(jnp.mean((x @ (w - target)) ** 2), "data"))(w)
    velocity = 0.5 * velocity + grad
    return (w - 0.05 * velocity, velocity), loss


def present():
    return [cluster.name for cluster in hetccl.world().clusters]


def resumed(state):
    """Where training goes on: at a start, after a loss and after a return."""
    step, state = snapshots.resume(state)
    print(f"goes on from step {step} with {', '.join(present())}: state {checksum(state)}", flush=True)
    if args.save and hetccl.world().local_ranks[0] == 0:
        np.savez(os.path.join(args.save, f"{step}-{len(present())}.npz"), step=step, w=state[0], velocity=state[1])
    return step, state


def take_in(step):
    """Takes in clusters that came back; whether there were any. The same answer in every process."""
    missing = len(hetccl.world().job.clusters) > len(present())
    looks = 300 if missing and step == args.steps - args.together else 1  # a number, as clocks differ
    for _ in range(looks):
        if back := hetccl.waiting_clusters():
            break
        time.sleep(0.2 if looks > 1 else 0)
    if not back:
        return False
    try:
        hetccl.reinitialize(clusters=[*present(), *back], timeout=60)
    except hetccl.HetcclError as error:  # gone again: the world is as it was, or has failed itself
        hetccl.check()
        print(f"{', '.join(back)} did not come: {error}", flush=True)
        return False
    return True


def checksum(state):
    return f"{zlib.crc32(b''.join(np.asarray(leaf).tobytes() for leaf in state)):08x}"


snapshots = hetccl.Snapshots()
start = (
    np.load(args.load) if args.load else {"step": 0, "w": np.zeros(8, np.float32), "velocity": np.zeros(8, np.float32)}
)
step, state = resumed((jnp.array(start["w"]), jnp.array(start["velocity"])))
step += int(start["step"])
doomed = args.kill if step == 0 else None  # not once more after the return
lost = False
while step < args.steps:
    try:
        if lost:
            hetccl.reinitialize()  # an error if the world is well: then the one that led here is the program's own
            (step, state), lost = resumed(state), False
        if f"{name}:{step}" == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        state, loss = train(state, step)
        snapshots.keep(step + 1, state)
        step += 1
        print(f"step {step} with {', '.join(present())}: loss {float(loss):.2e}, state {checksum(state)}", flush=True)
        if take_in(step):  # between two steps, where a cluster that comes back begins too
            step, state = resumed(state)
    except (hetccl.HetcclError, jax.errors.JaxRuntimeError) as error:
        if lost:
            raise  # going on failed: what is left is a checkpoint
        print(f"lost at step {step}: {str(error).splitlines()[0]}", flush=True)
        lost = True
