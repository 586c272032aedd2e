"""Two clusters of unequal speed against the sum of what each of them does alone.

    python benchmarks/unequal.py --out benchmarks/results

On two cores: the cluster ``fast`` (two devices) on core 0; the cluster ``slow`` (one device) on core 1, which it shares
with two processes that do nothing but compute, so that it gets a third. Each cluster stays on its core; otherwise either
would take what the other leaves idle, and "alone" would mean two cores. The step is that of
examples/unequal_clusters.py: gradients, then an update behind a sync. First ``hetccl.balance`` finds the rows; then, in
one run, blocks of steps alternate:

* ``both``: the clusters together with balanced rows;
* ``fast``, ``slow``: one cluster alone with its rows of that, without a sync, while the other one waits;
* ``unbalanced``: together with equal rows for each device.

Throughput is rows by the median time of a step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from gpu_bench.report import head

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKER = "--worker"
CORES = {"fast": 0, "slow": 1}
SIDES = ("both", "fast", "slow", "unbalanced")


def burn(core: int) -> None:
    """Takes its part of a core for ever."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(100000))


def worker(options: dict[str, int]) -> None:
    """One cluster, on its core; prints the split, and the times of the steps that it took part in."""
    os.sched_setaffinity(0, {CORES[os.environ["HETCCL_CLUSTER"]]})
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jax_hetccl as hetccl

    world = hetccl.initialize()
    name, total, width = world.clusters[world.cluster].name, options["rows"], options["width"]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        first, second, last = params
        return jnp.mean((jnp.tanh(jnp.tanh(x @ first) @ second) @ last - y) ** 2)

    gradients = jax.jit(jax.value_and_grad(loss_of), out_shardings=everywhere)

    @jax.jit
    def apply(params: Any, loss: jax.Array, grads: Any, rows: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), loss

    @jax.jit
    def synced(params: Any, loss: jax.Array, grads: Any, rows: jax.Array) -> Any:
        return apply(params, *hetccl.sync((loss, grads), weight=rows), rows)

    x = np.random.default_rng(0).normal(size=(total, 16)).astype(np.float32)
    y = np.tanh(x[:, :1] - x[:, 1:2])
    sizes = ((16, width), (width, width), (width, 1))
    keys = jax.random.split(jax.random.key(0), 3)
    start = [jax.random.normal(k, (m, n)) / m**0.5 for k, (m, n) in zip(keys, sizes, strict=True)]
    start = jax.device_put(start, everywhere)

    def block(rows: tuple[int, ...], update: Any, steps: int) -> tuple[list[float], list[float], float]:
        """Some steps: the whole time of each, the time of its gradients, and the last loss."""
        batch = hetccl.shard_batch((x, y), split, weights=rows)
        params, own, whole, loss = start, [], [], 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            value, grads = jax.block_until_ready(gradients(params, *batch))
            own.append(time.perf_counter() - begin)
            params, value = jax.block_until_ready(update(params, value, grads, jnp.float32(len(batch[0]))))
            whole.append(time.perf_counter() - begin)
            loss = float(value)
        return whole, own, loss

    rows = equal = hetccl.batch_sizes(total)
    for _ in range(3):
        hetccl.barrier("balance")
        rows = hetccl.balance(rows, statistics.median(block(rows, synced, 6)[1][1:]))
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    losses: dict[str, float] = {}
    for measured in [False] + [True] * options["rounds"]:  # the first round compiles
        for side in SIDES:
            hetccl.barrier(side)
            if side in ("both", "unbalanced"):
                whole, _, losses[side] = block(rows if side == "both" else equal, synced, options["steps"])
            elif side == name:
                whole, _, _ = block(rows, apply, options["steps"])
            else:
                continue
            times[side] += whole[1:] if measured else []
    hetccl.barrier("end")
    if name == "fast":  # the whole batch on this cluster alone
        losses["one_world"] = reference(x, y, start, options["steps"], gradients, apply, split)
    print("found", json.dumps({"rows": rows, "equal": equal, "times": times, "losses": losses}), flush=True)


def reference(x: Any, y: Any, params: Any, steps: int, gradients: Any, apply: Any, split: Any) -> float:
    """The last loss of the same steps in one JAX world, with the same global batch."""
    import jax

    batch, value = jax.device_put((x, y), split), 0.0
    for _ in range(steps):
        loss, grads = gradients(params, *batch)
        params, value = apply(params, loss, grads, loss)
    return float(value)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help="of a block; the first one does not count")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, help="directory for the JSON")
    args = parser.parse_args()
    burners = [multiprocessing.Process(target=burn, args=(CORES["slow"],), daemon=True) for _ in range(2)]
    for burner in burners:
        burner.start()
    options = json.dumps({name: getattr(args, name) for name in ("rows", "width", "steps", "rounds")})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jax_hetccl.cli", "run", "--cluster", "fast=1x2", "--cluster", "slow=1x1"]
            + ["--time-limit", "550", "--", "python", __file__, WORKER, options],
            capture_output=True, check=False, text=True, cwd=ROOT,
        )  # fmt: skip
    finally:
        for burner in burners:
            burner.terminate()
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    said = {
        name: json.loads(line.split("found ", 1)[1])
        for name in CORES
        for line in done.stdout.splitlines()
        if line.startswith(f"[{name}/0] found ")
    }
    fast = said["fast"]
    seconds = {side: statistics.median(said["slow" if side == "slow" else "fast"]["times"][side]) for side in SIDES}
    rows = {"both": args.rows, "fast": fast["rows"][0], "slow": fast["rows"][1], "unbalanced": args.rows}
    speed = {side: rows[side] / seconds[side] for side in SIDES}
    alone = speed["fast"] + speed["slow"]
    report = {
        **head(sys.argv),
        "load_average": os.getloadavg()[1],  # of what else the machine did: this run is a part of it
        "rows": {"balanced": fast["rows"], "unbalanced": fast["equal"]},
        "step_ms": {side: seconds[side] * 1e3 for side in SIDES},
        "rows_per_s": speed,
        "steps": len(fast["times"]["both"]),
        "slow_is_slower_by": speed["fast"] / speed["slow"],
        "ratio": speed["both"] / alone,
        "unbalanced_ratio": speed["unbalanced"] / alone,
        "last_loss": fast["losses"],
    }
    print(json.dumps(report, indent=1))
    if args.out:
        (args.out / "unequal-clusters.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
