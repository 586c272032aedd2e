"""The step time of training with the exchange of gradients beside the backward pass, and without.

    sudo python benchmarks/overlap.py --out benchmarks/results

A transformer in plain JAX (8 layers of width 256: 6.5 million parameters, 26 MB of gradients, in float32; SGD) on two clusters of
one process and one device, each process on a core of its own. Rounds alternate, in one run, between

* ``buckets``: ``hetccl.sync(grads, buckets=8)``;
* ``one``: ``hetccl.sync(grads)``, which begins when all gradients are there;
* ``scan``: layers in ``lax.scan`` with ``hetccl.grad_sync`` in its body, unrolled by 4; ``scan_one``: the same with one sync behind;
* ``staged``: gradients to the host, there to the other process over a socket and added, the mean back to the device;
* ``gloo``: stock JAX, one world of two processes whose partitioner reduces the gradients with Gloo;
* ``alone``: no exchange.

Three links between the processes: shared memory (``gloo`` and ``staged`` have loopback there), and two emulated networks of
1 Gbit/s, with 0.1 and with 10 ms of delay (namespaces with TUN devices, which need root).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from gpu_bench.report import head, write

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKER = "--worker"
LAYERS, WIDTH, LENGTH, ROWS, VOCABULARY, BUCKETS = 8, 256, 64, 8, 512, 8
WAYS = ("alone", "one", "buckets", "scan_one", "scan", "staged", "gloo")
TRACED, TRACED_STEPS = ("one", "buckets"), 4
NETWORKS: dict[str, dict[str, float] | None] = {
    "shared memory": None,
    "1 Gbit/s, 0.1 ms": dict(rate_mbit=1000, delay_ms=0.1, queue_ms=2000),
    "1 Gbit/s, 10 ms": dict(rate_mbit=1000, delay_ms=10, queue_ms=2000),
}


# --- the model ---


def initial() -> Any:
    """Parameters, equal everywhere."""
    import numpy as np

    rng, d = np.random.default_rng(0), WIDTH
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}

    def layer() -> Any:
        return {k: (rng.standard_normal(s) / s[0] ** 0.5).astype(np.float32) for k, s in shapes.items()}

    ends = {
        k: (rng.standard_normal(s) * 0.02).astype(np.float32)
        for k, s in (("embed", (VOCABULARY, d)), ("head", (d, VOCABULARY)))
    }
    return {**ends, "layers": [layer() for _ in range(LAYERS)]}


def loss_of(params: Any, tokens: Any, scanned: Any = None) -> Any:
    """Next-token cross-entropy; ``scanned`` is what is done to a layer's parameters in a loop over stacked layers."""
    import jax
    import jax.numpy as jnp

    def layer(x: Any, p: Any) -> Any:
        def norm(x: Any) -> Any:
            return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

        q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(*x.shape[:2], -1, 3 * 32), 3, axis=-1)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    x = params["embed"][tokens[:, :-1]]
    if scanned is None:
        for p in params["layers"]:
            x = layer(x, p)
    else:
        x = jax.lax.scan(lambda x, p: (layer(x, scanned(p)), None), x, params["layers"], unroll=4)[0]
    found = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(found, tokens[:, 1:, None], -1).mean()


def updated(params: Any, grads: Any) -> Any:
    """A step of SGD."""
    import jax

    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


# --- processes that compute ---


def worker(side: str, number: int, address: str) -> None:
    """Runs steps as asked on stdin: a line ``<way> <steps>`` for each, answered with seconds and the loss's change."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
    host, port = address.rsplit(":", 1)
    if side == "gloo":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, 2, number)
        made = _gloo(number)
    else:
        import jax_hetccl as hetccl

        hetccl.initialize(axes=("data",))
        made = _ours(number, (host, int(port)))
    rows = np.random.default_rng(1).integers(0, VOCABULARY, (2 * ROWS, LENGTH + 1))
    mine = rows[number * ROWS : (number + 1) * ROWS]
    print("ready", flush=True)
    for line in sys.stdin:
        way, steps, where = line.rstrip("\n").split("\t")
        params, run = made(way)
        batch = run.place(mine) if hasattr(run, "place") else jnp.asarray(mine)
        times = []
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(where, profiler_options=options) if where else contextlib.nullcontext():
            for _ in range(int(steps)):
                begin = time.perf_counter()
                params = jax.block_until_ready(run(params, batch))
                times.append(time.perf_counter() - begin)
        total = float(sum(np.abs(np.asarray(x.addressable_data(0))).sum() for x in jax.tree.leaves(params)))
        print("times", json.dumps([times, total]), flush=True)


def _gloo(number: int) -> Any:
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.jit(lambda p, x: updated(p, jax.grad(loss_of)(p, x)), donate_argnums=0)

    def run(params: Any, batch: Any) -> Any:
        return step(params, batch)

    run.place = lambda rows: jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)  # type: ignore
    return lambda way: (jax.device_put(initial(), NamedSharding(mesh, P())), run)


def _ours(number: int, address: tuple[str, int]) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_hetccl as hetccl

    def stacked(params: Any) -> Any:
        return {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}

    def in_the_loop(p: Any, x: Any) -> Any:
        grads = jax.grad(loss_of)(p, x, hetccl.grad_sync)
        return {**grads, **hetccl.sync({k: grads[k] for k in ("embed", "head")})}

    gradient = jax.jit(jax.grad(loss_of))
    ways = {
        "alone": lambda p, x: jax.grad(loss_of)(p, x),
        "one": lambda p, x: hetccl.sync(jax.grad(loss_of)(p, x)),
        "buckets": lambda p, x: hetccl.sync(jax.grad(loss_of)(p, x), buckets=BUCKETS),
        "scan_one": lambda p, x: hetccl.sync(jax.grad(loss_of)(p, x, lambda p: p)),
        "scan": in_the_loop,
    }
    steps = {way: jax.jit(lambda p, x, f=f: updated(p, f(p, x)), donate_argnums=0) for way, f in ways.items()}
    update = jax.jit(updated, donate_argnums=0)
    other: list[socket.socket] = []

    def staged(params: Any, batch: Any) -> Any:
        if not other:
            other.append(_connected(number, address))
        leaves, tree = jax.tree.flatten(gradient(params, batch))
        own: list[Any] = [np.asarray(x) for x in leaves]
        theirs: list[Any] = [np.empty_like(x) for x in own]
        sender = threading.Thread(target=lambda: [other[0].sendall(memoryview(x).cast("B")) for x in own])
        sender.start()
        for x in theirs:
            view = memoryview(x).cast("B")
            while view:
                view = view[other[0].recv_into(view) :]
        sender.join()
        means = [jax.device_put((a + b) * np.float32(0.5)) for a, b in zip(own, theirs, strict=True)]
        return update(params, jax.tree.unflatten(tree, means))

    def made(way: str) -> Any:
        params = jax.tree.map(jnp.asarray, initial())
        return (stacked(params) if way.startswith("scan") else params), staged if way == "staged" else steps[way]

    return made


def _connected(number: int, address: tuple[str, int]) -> socket.socket:
    """A connection between the two processes."""
    if number == 0:
        with socket.create_server(address) as server:
            found = server.accept()[0]
    else:
        for _ in range(200):
            try:
                found = socket.create_connection(address)
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise TimeoutError(f"nobody listens at {address}")
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


# --- the run ---


class Pair:
    """Two processes that run steps together; ``cache``: a folder for compiled programs."""

    def __init__(self, side: str, hosts: Any, cache: pathlib.Path):
        self._children = []
        addresses = [hosts.address(0) if hosts else "127.0.0.1", hosts.address(1) if hosts else "127.0.0.1"]
        ports = iter(_free_ports())
        meet, staging = f"{addresses[0]}:{next(ports)}", f"{addresses[0]}:{next(ports)}"
        for number in range(2):
            env = {k: v for k, v in os.environ.items() if not k.startswith(("HETCCL_", "JAX_"))} | {
                "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache / f"{side}-{number}"), "HETCCL_CLUSTER": "ab"[number], "HETCCL_PROCESS": "0", "HETCCL_CLUSTERS": "a:1,b:1",
                "HETCCL_COORDINATOR": meet, "HETCCL_SECRET": "0123456789abcdef0123456789abcdef",
                "HETCCL_TRANSPORT": "tcp" if hosts else "auto",
            }  # fmt: skip
            command = [sys.executable, __file__, WORKER, side, str(number), staging if side == "ours" else meet]
            if hosts:  # Gloo binds to what the host's name stands for
                enter = f'hostname {addresses[number]} && ip link set tun0 mtu 60000 && exec "$@"'
                command = [
                    "nsenter",
                    f"--net={hosts.namespaces[number]}",
                    "unshare",
                    "--uts",
                    "sh",
                    "-c",
                    enter,
                    "sh",
                    *command,
                ]
            self._children.append(
                subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            )
        for child in self._children:
            self._read(child, "ready")

    @staticmethod
    def _read(child: Any, word: str) -> Any:
        for line in child.stdout:
            if line.startswith(word):
                return json.loads(line.removeprefix(word).strip() or "null")
        raise RuntimeError(f"a process ended with {child.wait()}")

    def run(self, way: str, steps: int, where: str = "") -> tuple[list[float], list[float]]:
        """Seconds of each step, of the slower process, and what both end with."""
        for child in self._children:
            child.stdin.write(f"{way}\t{steps}\t{where if child is self._children[0] else ''}\n")
        found = [self._read(child, "times") for child in self._children]
        return [max(both) for both in zip(*(times for times, _ in found), strict=True)], [total for _, total in found]

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


def _free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextlib.contextmanager
def network(conditions: dict[str, float] | None) -> Iterator[Any]:
    """Two hosts on an emulated network, or None: the machine's own."""
    if conditions is None:
        yield None
        return
    sys.path.insert(0, str(ROOT / "tests"))
    with importlib.import_module("harness.network").Network(2) as hosts:
        hosts.become(**conditions)
        yield hosts


def measure(
    conditions: dict[str, float] | None,
    ways: list[str],
    rounds: int,
    steps: int,
    cache: pathlib.Path,
    profiles: pathlib.Path,
) -> dict[str, Any]:
    """Medians over all steps of all rounds, in milliseconds; profiles of some steps go to a folder, compiled programs to another."""
    with network(conditions) as hosts:
        side_of = {way: "gloo" if way == "gloo" else "ours" for way in ways}
        pairs = {side: Pair(side, hosts, cache) for side in dict.fromkeys(side_of.values())}
        try:
            sides = {way: pairs[side] for way, side in side_of.items()}
            times: dict[str, list[float]] = {way: [] for way in sides}
            totals = {}
            for r in range(rounds + 1):
                for way, pair in sides.items():
                    seconds, totals[way] = pair.run(way, steps)
                    times[way] += seconds[1:] if r else []  # the first round compiles
            ends = {way: total for way, total in totals.items() if way not in ("alone",)}
            reference = ends["one"][0]
            wrong = {way: t for way, t in ends.items() if any(abs(x / reference - 1) > 1e-5 for x in t)}
            if wrong:
                raise RuntimeError(f"the ways end with different parameters: {reference}, {wrong}")
            for way in TRACED:
                pairs["ours"].run(way, TRACED_STEPS, str(profiles / way))
        finally:
            for pair in pairs.values():
                pair.close()
    medians = {way: statistics.median(t) * 1e3 for way, t in times.items()}
    exposed = {way: medians[way] - medians["alone"] for way in medians}
    return {
        "medians_ms": medians,
        "quartiles_ms": {way: [1e3 * q for q in statistics.quantiles(t, n=4)[::2]] for way, t in times.items()},
        "buckets_less": {way: 1 - medians["buckets"] / medians[way] for way in medians if way != "buckets"},
        "hidden": 1 - exposed["buckets"] / exposed["one"],
        "steps": {way: len(t) for way, t in times.items()},
    }


# --- traces ---


def trace(directory: pathlib.Path, steps: int) -> dict[str, Any]:
    """From a profile of the first process: medians over its steps, in milliseconds since a step was called.

    A step's starts all come before its dones (the chain of exchanges), one as often as the other. The last start has the
    last gradient, so what is between it and the end of the last done is communication that nothing hides.
    """
    import jax

    (file,) = directory.rglob("*.xplane.pb")
    calls, begins, computing = [], [], []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines if plane.name == "/host:CPU" else ():
            for e in line.events:
                span = (e.start_ns / 1e6, (e.start_ns + e.duration_ns) / 1e6)
                if re.fullmatch(r"ffi_call[.\d]*|end: ffi_call[.\d]*", e.name):
                    calls.append((e.name, *span))
                elif e.name.startswith("PjitFunction"):
                    begins.append(span[0])
                elif re.match(r"dot\b|\w*fusion", e.name):
                    computing.append(span)
    begins = sorted(begins)  # a call is there twice, as its outside and its inside
    begins = [b for at, b in enumerate(begins) if at == 0 or b - begins[at - 1] > 1][-steps:]
    rows = []
    for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True):
        inside = sorted((b, e, name) for name, b, e in calls if begin <= b < end)
        order = [name for _, _, name in inside if not name.startswith("end: ")]
        starts, dones = order[: len(order) // 2], order[len(order) // 2 :]
        at = [next(b for b, _, name in inside if name == start) - begin for start in starts]
        done = [max(e for _, e, name in inside if name in (d, f"end: {d}")) - begin for d in dones]
        beside = _covered([(b - begin, e - begin) for b, e in computing if begin <= b < end], at[0], at[-1])
        rows.append({"starts": at, "dones": done, "computing_between_starts": beside})
    middle = sorted(rows, key=lambda r: r["dones"][-1])[len(rows) // 2]
    exposed = statistics.median(r["dones"][-1] - r["starts"][-1] for r in rows)
    return {"not_hidden_ms": exposed, "a_step_ms": middle}


def _covered(spans: list[tuple[float, float]], low: float, high: float) -> float:
    """How much of an interval some span covers."""
    total, at = 0.0, low
    for begin, end in sorted(spans):
        begin, end = max(begin, at), min(end, high)
        if end > begin:
            total, at = total + end - begin, end
    return total


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
    """Step times, and when exchanges start and end in a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, lines) = plt.subplots(1, 2, figsize=(11, 3.5))
    ways = list(found["medians_ms"])[::-1]
    bars.barh(ways, [found["medians_ms"][way] for way in ways])
    bars.set(title=found["link"], xlabel="step, ms")
    for row, traced in enumerate(found["traces"].values()):
        step = traced["a_step_ms"]
        for n, (start, done) in enumerate(zip(step["starts"], step["dones"], strict=True)):
            height = row - 0.35 + 0.7 * n / len(step["starts"])
            lines.plot([start, done], [height, height], color=f"C{row}")
        lines.axvline(step["starts"][-1], color=f"C{row}", linestyle=":")
    lines.set(yticks=range(len(found["traces"])), yticklabels=list(found["traces"]), xlim=(0, None))
    lines.set(xlabel="ms in a step: start to done of each exchange\ndotted: the last gradient is there")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures with every link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for overlap-<link>.json and .png")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of each way in each round; the first does not count")
    parser.add_argument("--links", nargs="*", default=list(NETWORKS), help="some of the links")
    parser.add_argument("--folder", type=pathlib.Path, help="for profiles and compiled programs; left out: not kept")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, help="besides alone, one and buckets")
    given = parser.parse_args()
    ways = [way for way in WAYS if way in given.ways or way in ("alone", "one", "buckets")]
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or pathlib.Path(temporary)
        for link in given.links:
            name = "overlap-" + re.sub(r"\W+", "-", link.replace("/", "").replace(".", "_"))
            found = {
                **head(sys.argv),
                "link": link,
                **measure(NETWORKS[link], ways, given.rounds, given.steps, folder / "cache", folder / name),
            }
            print(json.dumps(found), flush=True)
            found["traces"] = {way: trace(folder / name / way, TRACED_STEPS) for way in TRACED}
            write(given.out, name, found)
            plot(found, given.out / f"{name}.png")


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
