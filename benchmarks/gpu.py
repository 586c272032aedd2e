"""Exchanges between clusters of GPUs, and of a GPU and a CPU, on one host, against what the machine can do.

    python benchmarks/gpu.py --mps --out benchmarks/results

In one run: pinned copies (the limit of a GPU's link), then PyTorch's Gloo with CUDA tensors, then jitted JAX programs
in two processes of one device each, for each pair of platforms and way of waiting, and how an exchange overlaps with
matrix products. Everything is written after each step, so that a run that is cut short leaves what it has.

``--mps`` starts NVIDIA's multi-process service for the time of the run: without it two processes on one GPU take turns,
which costs about 300 us each time. A pair is ``PLATFORM+PLATFORM``; ``cpu+cpu`` runs anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_bench import KB, LOOPS, MB, SIZES, VISIBLE, gloo, iterations, report
from gpu_bench.children import ChildError, Group, free_port, group
from gpu_bench.run import Run, repetitions, row

OPS = (
    "psum_loop",
    "swap_loop",
    "ppermute_loop",
    "send_recv_loop",
    "psum",
    "psum_donated",
    "all_gather",
    "psum_scatter",
    "ppermute",
    "swap",
    "send_recv",
)
GLOO_SIZES = (4 * KB, MB, 16 * MB, 256 * MB)


def member_environ(platforms: Sequence[str], sync: str) -> list[dict[str, str]]:
    """What makes two processes the two clusters of a world."""
    common = {
        "HETCCL_COORDINATOR": f"127.0.0.1:{free_port()}",
        "HETCCL_CLUSTERS": "left:1,right:1",
        "HETCCL_SECRET": secrets.token_hex(32),
        "HETCCL_STREAM_SYNC": sync,
        "HETCCL_TIMEOUT": "20",
        "HETCCL_ARRIVAL_TIMEOUT": "60",
    }
    result = []
    for i, platform in enumerate(platforms):
        own = {**common, "HETCCL_CLUSTER": ("left", "right")[i], "HETCCL_PROCESS": "0"}
        if platform == "cpu":
            own |= {"JAX_PLATFORMS": "cpu"}
        else:
            shown = [v for v in os.environ.get(VISIBLE[platform], "0").split(",") if v]
            own |= {"JAX_PLATFORMS": f"{platform},cpu", VISIBLE[platform]: shown[i % len(shown)]}
            own |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
        result.append(own)
    return result


def limits(run: Run) -> dict[str, Any]:
    """One process, then two at once on the same GPU."""
    found: dict[str, Any] = {}
    nbytes, reps = 256 * MB, 10
    with group("gpu_bench.limits", [{}]) as one:
        for way in ("d2h", "h2d", "both"):
            one.ask(30, {"way": way, "bytes": nbytes, "reps": 2})
            found[way] = row(nbytes, one.times(60, {"way": way, "bytes": nbytes, "reps": reps}))
    with group("gpu_bench.limits", [{}, {}]) as two:
        two.ask(30, {"way": "both", "bytes": nbytes, "reps": 2})
        found["both_two_processes"] = row(nbytes, two.times(60, {"way": "both", "bytes": nbytes, "reps": reps}))
    for name, r in found.items():
        print(f"{name:>20} {r['gb_per_s']:7.2f} GB/s each way", flush=True)
    return found


def programs(run: Run, platforms: Sequence[str], sync: str, ops: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """All operations at all sizes; after one that goes wrong the others go on in a new world."""
    found: dict[str, Any] = {"failed ops": {}}
    todo = list(ops)
    while todo:
        with group("gpu_bench.member", member_environ(platforms, sync)) as world:
            found["devices"] = world.facts
            try:
                while todo:
                    op = todo.pop(0)
                    found[op] = []
                    for nbytes in sizes if op not in LOOPS else [n for n in sizes if n <= 64 * KB or n >= 256 * MB]:
                        if run.left() < 20:
                            return {**found, "stopped": "no time left (--time-limit)"}
                        found[op].append(one_size(world, op, nbytes))
                found["engine"] = world.ask(20, {"stats": True})
            except ChildError as error:
                found["failed ops"][op] = str(error)
                print(f"{op} failed: {error}", flush=True)
    return found


def one_size(world: Group, op: str, nbytes: int) -> dict[str, Any]:
    per = iterations(op, nbytes)
    request = {"op": op, "bytes": nbytes, "reps": repetitions(nbytes * per, 4 << 30)}
    result = row(nbytes, world.times(60, request), per)
    print(f"{op:>14} {nbytes:>10} B {result['median_us']:10.1f} us {result['gb_per_s']:7.2f} GB/s", flush=True)
    return result


def gloo_figures(run: Run, device: str) -> dict[str, Any]:
    if why := gloo.missing():
        return {"skipped": why}
    meet = f"tcp://127.0.0.1:{free_port()}"
    environs = [{"GLOO_RANK": str(i), "GLOO_DEVICE": device, "GLOO_MEET": meet} for i in range(2)]
    found: dict[str, Any] = {}
    with group("gpu_bench.gloo", environs) as two:
        found["torch"] = two.facts[0]["torch"]
        for op in gloo.OPS:
            found[op] = []
            for nbytes in GLOO_SIZES:
                if run.left() < 20:
                    return {**found, "stopped": "no time left (--time-limit)"}
                reps = max(4, min(30, (256 * MB) // nbytes))
                found[op].append(row(nbytes, two.times(90, {"op": op, "bytes": nbytes, "reps": reps})))
                r = found[op][-1]
                print(f"{op:>14} {nbytes:>10} B {r['median_us']:10.1f} us {r['gb_per_s']:7.2f} GB/s", flush=True)
    return found


def overlap_figures(run: Run, platforms: Sequence[str], quick: bool) -> dict[str, Any]:
    small = "cpu" in platforms
    shape = {"nbytes": 256 * MB, "side": 512 if small else 8192, "products": 4 if small else 20, "reps": 7}
    if quick:
        shape = {"nbytes": 8 * MB, "side": 256, "products": 4, "reps": 3}
    with group("gpu_bench.member", member_environ(platforms, "auto")) as world:
        answers = world.ask(120, {"overlap": shape})
        found: dict[str, Any] = {f"process {i}": report.overlap_row(a["result"]) for i, a in enumerate(answers)}
        print(*(f"{k}: {v}" for k, v in found.items()), sep="\n", flush=True)
        try:
            found["profiles"] = [a["result"] for a in world.ask(60, {"profile": shape})]
        except ChildError as error:  # the figures stand without it
            found["profiles"] = {"failed": str(error)}
        print(found["profiles"], flush=True)
    return found


@contextlib.contextmanager
def multi_process_service() -> Iterator[None]:
    """Runs NVIDIA's MPS of our own, in directories of our own."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise SystemExit("--mps: nvidia-cuda-mps-control is not on PATH (it comes with the NVIDIA driver)")
    with tempfile.TemporaryDirectory(prefix="gpu-bench-mps-") as directory:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = directory
        subprocess.run([control, "-d"], check=True, timeout=30)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, timeout=60, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default="cuda+cuda,cuda+cpu", help="platforms of the two clusters, comma list")
    parser.add_argument("--sizes", help="bytes, comma list")
    parser.add_argument("--ops", default=",".join(OPS), help=f"comma list of {', '.join(OPS)}")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for JSON and plot")
    parser.add_argument("--mps", action="store_true", help="start and stop NVIDIA's multi-process service")
    parser.add_argument("--quick", action="store_true", help="few sizes and small overlap: to see that it works")
    parser.add_argument("--only-programs", action="store_true", help="no limits, overlap, host functions, or Gloo")
    parser.add_argument("--no-gloo", action="store_true", help="leave PyTorch's Gloo out")
    parser.add_argument("--time-limit", type=float, default=1200.0, metavar="S", help="for the whole run (1200)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = [int(s) for s in args.sizes.split(",")] if args.sizes else SIZES[:3] if args.quick else SIZES
    pairs = [tuple(p.split("+")) for p in args.pairs.split(",")]
    ops = args.ops.split(",")
    with multi_process_service() if args.mps else contextlib.nullcontext():
        run = Run("gpu", args.out, args.time_limit)
        only = args.only_programs
        if not only and any("cuda" in p for p in pairs):
            run.step("limits", lambda: limits(run))
        if not args.no_gloo and not only:
            run.step("gloo", lambda: gloo_figures(run, "cuda" if "cuda" in pairs[0] else "cpu"))
        for pair in pairs:
            name = "+".join(pair)
            run.step(f"hetccl {name} auto", lambda: programs(run, pair, "auto", ops, sizes))
            if not only and set(pair) != {"cpu"}:
                run.step(f"overlap {name}", lambda: overlap_figures(run, pair, args.quick))
        for pair in pairs:
            if not only and set(pair) != {"cpu"}:
                some = [n for n in sizes if n in (4 * KB, MB, 256 * MB)]
                few = [op for op in ops if op in ("psum_loop", "send_recv_loop", "psum", "send_recv", "swap")]
                name = "+".join(pair)
                run.step(f"hetccl {name} hostfunc", lambda: programs(run, pair, "hostfunc", few, some))
        run.found["ratios"] = report.ratios(run.found)
        run.write()
        shown = [k for k in run.found if k.startswith("hetccl ") and k.endswith(" auto")]
        report.plot(args.out, "gpu", run.found, shown)
    report.say(run.found["ratios"])


if __name__ == "__main__":
    main()
