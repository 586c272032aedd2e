"""Programs are lowered by each cluster on its own; their exchanges must come out in one order everywhere.

No transport: two twins of a world, one for each cluster, lower the same drawn program, and what the ordering pass
made of it is compared line by line. (Values are compared across real worlds in test_spanning_*.)
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

SIZES = (2, 1)
OPS = (
    "psum",
    "pmax",
    "psum_big",
    "ring",
    "inside",
    "one_way",
    "groups",
    "gather",
    "scatter",
    "all_to_all",
    "group_gather",
    "group_scatter",
    "group_all_to_all",
    "broadcast_left",
    "broadcast_right",
    "sin",
    "matmul",
    "add",
)
DEVICES = "--xla_force_host_platform_device_count=2"


class TwinControl:
    """A twin of the control plane: the other cluster has published the same mesh with its own size."""

    def __init__(self, cluster: int):
        self.members = [types.SimpleNamespace(cluster=c, index=c) for c in range(len(SIZES))]
        self._cluster, self._mine = cluster, {}

    def subscribe(self, prefix: str, handler: Any) -> None:
        del prefix, handler

    def publish(self, key: str, value: dict[str, Any]) -> None:
        self._mine[key] = value

    def collect(self, key: str, members: Sequence[int], timeout: float) -> dict[int, Any]:
        del timeout
        first = [sum(SIZES[:c]) for c in range(len(SIZES))]
        ranks = {c: list(range(first[c], first[c] + SIZES[c])) for c in members}
        return {c: {**self._mine[key], "shape": [SIZES[c]], "ranks": ranks[c]} for c in members}


class TwinWorld:
    """A twin of a world: enough of it to lower programs, nothing to run them."""

    def __init__(self, cluster: int, platforms: Sequence[str] = ("cpu", "cpu")):
        self.cluster, self.axes = cluster, {"data": None}
        self.control = TwinControl(cluster)
        self.clusters = [types.SimpleNamespace(index=c, name=f"c{c}", platform=p) for c, p in enumerate(platforms)]
        self.config = types.SimpleNamespace(bucket_mb=0.001, arrival_timeout=1.0)
        self.engine = types.SimpleNamespace(add_plan=lambda *a: None, pending=list)

    def rank_of_device(self, device: Any) -> int:
        return sum(SIZES[: self.cluster]) + device.id

    def ensure_channels(self, pairs: Any) -> None:
        list(pairs)

    def watch(self, look: Any) -> None:
        pass

    def fail(self, kind: str, message: str) -> None:
        raise AssertionError(message)


def body(steps: Sequence[tuple[str, int, int]]) -> Any:
    """A program out of steps (op, operand, second operand); operands count back from the newest value."""
    import jax.numpy as jnp
    from jax import lax

    n = sum(SIZES)
    turned = [[*range(1, n), 0]]
    ring, inside = [(i, (i + 1) % n) for i in range(n)], [(0, 1), (1, 0)]
    ops = {
        "psum": lambda a, b: lax.psum(a, "data"),
        "pmax": lambda a, b: lax.pmax(a, "data"),
        "psum_big": lambda a, b: a + lax.psum(jnp.tile(a, (9000, 1)), "data")[:1],
        "ring": lambda a, b: lax.ppermute(a, "data", ring),
        "inside": lambda a, b: lax.ppermute(a, "data", inside),
        "one_way": lambda a, b: lax.ppermute(a, "data", [(0, n - 1)]),
        "groups": lambda a, b: lax.psum(a, "data", axis_index_groups=[[0, 2], [1]]),
        "gather": lambda a, b: lax.all_gather(a, "data")[1],
        "scatter": lambda a, b: lax.psum_scatter(jnp.tile(a, (n, 1)), "data", tiled=True),
        "all_to_all": lambda a, b: lax.all_to_all(jnp.tile(a, (n, 1)), "data", 0, 0, tiled=True)[:1],
        "group_gather": lambda a, b: lax.all_gather(a, "data", axis_index_groups=turned)[1],
        "group_scatter": lambda a, b: lax.psum_scatter(
            jnp.tile(a, (n, 1)), "data", tiled=True, axis_index_groups=turned
        ),
        "group_all_to_all": lambda a, b: lax.all_to_all(
            jnp.tile(a, (n, 1)), "data", 0, 0, tiled=True, axis_index_groups=turned
        )[:1],
        "broadcast_left": lambda a, b: lax.pbroadcast(a, ("data",), 1),
        "broadcast_right": lambda a, b: lax.pbroadcast(a, ("data",), 2),
        "sin": lambda a, b: jnp.sin(a),
        "matmul": lambda a, b: a @ jnp.ones((3, 3)),
        "add": lambda a, b: a + b,
    }

    def run(x: Any) -> Any:
        values = [x, x * 2]
        for op, i, j in steps:
            values.append(ops[op](values[-1 - i % len(values)], values[-1 - j % len(values)]))
        return sum(values)

    return run


def lines(cluster: int, steps: Sequence[tuple[str, int, int]], platforms: Sequence[str]) -> tuple[str, ...]:
    """The exchanges of the program as one cluster orders them."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    from jax_hetccl import _compat, spanning
    from jax_hetccl.ordering import module

    seen: list[Any] = []

    class Hooks(spanning.SpanningHooks):
        def finish_module(self, program: Any) -> None:
            seen.append(module.finish(self.world, self.registry, program))

    jax.clear_caches()
    _compat.install(Hooks(TwinWorld(cluster, platforms)))  # type: ignore[arg-type]
    try:
        n = SIZES[cluster]
        mesh = jax.sharding.Mesh(jax.devices()[:n], ("data",), axis_types=(AxisType.Auto,))
        spmd = jax.shard_map(body(steps), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        jax.jit(spmd).trace(jnp.ones((n, 3))).lower(lowering_platforms=(platforms[cluster],))
    finally:
        _compat.uninstall()
    found = [p for p in seen if p is not None]
    return found[-1].lines if found else ()


def serve() -> None:
    """Answers programs on stdin with the lines of each cluster: JAX's device count is fixed for a process."""
    for line in sys.stdin:
        steps, platforms = json.loads(line)
        print("answer " + json.dumps([lines(c, steps, platforms) for c in range(len(SIZES))]), flush=True)


@pytest.fixture(scope="module")
def lowering() -> Any:
    package = Path(importlib.util.find_spec("jax_hetccl").origin).parent.parent
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(package)}
    env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, Path(__file__)], env=env, **pipes)

    def ask(steps: Sequence[Any], platforms: Sequence[str] = ("cpu", "cpu")) -> list[list[str]]:
        process.stdin.write(json.dumps([steps, platforms]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the lowering process ended with {process.wait(10)}")

    yield ask
    process.stdin.close()
    process.wait(20)


STEPS = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=10)


PLATFORMS = st.sampled_from([("cpu", "cpu"), ("cuda", "cpu"), ("cuda", "rocm"), ("cuda", "cuda")])


@hypothesis.given(STEPS, PLATFORMS)
@hypothesis.example([("inside", 1, 0), ("sin", 1, 0), ("psum", 1, 0), ("psum", 1, 0)], ("cpu", "cpu"))
@hypothesis.example(
    [("sin", 0, 0), ("psum", 2, 0), ("add", 0, 2), ("ring", 2, 0), ("psum", 0, 0), ("psum", 2, 0)], ("cpu", "cpu")
)
# No pair of the permute is in the other cluster:
@hypothesis.example([("psum", 0, 0), ("inside", 0, 0), ("psum", 0, 0)], ("cpu", "cpu"))
def test_every_cluster_orders_the_exchanges_alike(lowering, steps, platforms):
    left, right = lowering(steps, platforms)
    assert left == right


def test_there_is_something_to_order(lowering):
    left, right = lowering([("psum", 0, 0), ("sin", 0, 0), ("ring", 0, 0), ("psum", 1, 0)])
    assert left == right and len(left) >= 2


if __name__ == "__main__":
    serve()
