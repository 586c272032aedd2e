"""psum across two clusters against JAX's own Gloo psum, alternating in one run.

    python benchmarks/psum.py --out benchmarks/results

Four processes, two at work at a time: ``hetccl``, two clusters of one process and one device each, and ``gloo``, one
stock JAX world of two processes with one device each. Rounds alternate between them, so that both see the same
machine; the report gives medians over all rounds and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

WORKER = "--worker"


def worker(side: str) -> None:
    """Runs timed psums as asked on stdin: a line ``<bytes> <repetitions>`` for each, answered with seconds."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    if side == "hetccl":
        import jax_hetccl as hetccl

        hetccl.initialize(axes=("data",))
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["GLOO_COORDINATOR"], 2, int(os.environ["GLOO_PROCESS"]))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    psum = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
    inputs: dict[int, Any] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        nbytes, repetitions = map(int, line.split())
        if nbytes not in inputs:
            n = nbytes // 4
            local = np.arange(n, dtype=np.float32) % 17 + 1
            whole = (jax.device_count(), n)
            inputs[nbytes] = jax.make_array_from_callback(whole, sharding, lambda _, v=local: v[None])
            got = np.asarray(jax.block_until_ready(psum(inputs[nbytes])).addressable_data(0))
            assert np.array_equal(got[0], 2 * local), "wrong sum"
        x, times = inputs[nbytes], []
        for _ in range(repetitions):
            begin = time.perf_counter()
            jax.block_until_ready(psum(x))
            times.append(time.perf_counter() - begin)
        print("times", json.dumps(times), flush=True)
    if side == "hetccl":
        hetccl.shutdown()
    else:
        jax.distributed.shutdown()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(side: str, transport: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    processes = []
    for i in range(2):
        env = dict(os.environ, JAX_PLATFORMS="cpu")
        if side == "hetccl":
            env |= {
                "HETCCL_COORDINATOR": f"127.0.0.1:{port}",
                "HETCCL_CLUSTERS": "left:1,right:1",
                "HETCCL_CLUSTER": ("left", "right")[i],
                "HETCCL_PROCESS": "0",
                "HETCCL_TRANSPORT": transport,
            }
        else:
            env |= {"GLOO_COORDINATOR": f"127.0.0.1:{port}", "GLOO_PROCESS": str(i)}
        command = [sys.executable, __file__, WORKER, side]
        processes.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for p in processes:
        answer(p, "ready")
    return processes


def answer(process: subprocess.Popen[str], word: str) -> str:
    """The rest of the next line that begins with ``word``; libraries print lines of their own."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(f"a worker ended with status {process.wait()}")


def ask(processes: list[subprocess.Popen[str]], nbytes: int, repetitions: int) -> list[float]:
    """One round: every repetition takes as long as in the slower process."""
    for p in processes:
        assert p.stdin
        p.stdin.write(f"{nbytes} {repetitions}\n")
        p.stdin.flush()
    answers = [json.loads(answer(p, "times")) for p in processes]
    return [max(pair) for pair in zip(*answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096,65536,1048576,4194304,16777216,67108864", help="bytes, comma list")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--transport", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--out", type=pathlib.Path, help="directory for the JSON")
    args = parser.parse_args()
    sides = {"hetccl": start("hetccl", args.transport), "gloo": start("gloo", "")}
    rows = []
    try:
        for nbytes in map(int, args.sizes.split(",")):
            repetitions = max(10, min(30, (160 << 20) // nbytes))
            times: dict[str, list[float]] = {side: [] for side in sides}
            for side in sides:  # compile and warm up
                ask(sides[side], nbytes, 3)
            for _ in range(args.rounds):
                for side, processes in sides.items():
                    times[side] += ask(processes, nbytes, repetitions)
            ms = {side: statistics.median(t) * 1e3 for side, t in times.items()}
            rows.append(
                {
                    "bytes": nbytes,
                    "median_ms": ms,
                    "p90_ms": {side: sorted(t)[int(len(t) * 0.9)] * 1e3 for side, t in times.items()},
                    "samples": len(times["gloo"]),
                    "ratio": ms["gloo"] / ms["hetccl"],
                }
            )
            print(
                f"{nbytes:>10} B  hetccl {ms['hetccl']:8.3f} ms  gloo {ms['gloo']:8.3f} ms  "
                f"{rows[-1]['ratio']:5.2f}x  {nbytes / ms['hetccl'] / 1e6:6.2f} GB/s each way",
                flush=True,
            )
    finally:
        for processes in sides.values():
            for p in processes:
                if p.stdin:
                    p.stdin.close()
        for processes in sides.values():
            for p in processes:
                try:
                    p.wait(30)
                except subprocess.TimeoutExpired:
                    p.kill()
    if args.out:
        import jax

        args.out.mkdir(parents=True, exist_ok=True)
        name = f"psum-{args.transport}-jax{jax.__version__}.json"
        machine = {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
        }
        report = {"command": " ".join(["python", *sys.argv]), "machine": machine, "rows": rows}
        (args.out / name).write_text(json.dumps(report, indent=1) + "\n")


def _cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    if WORKER in sys.argv:
        worker(sys.argv[-1])
    else:
        main()
