"""Clusters of several GPUs on one host, NCCL inside, against stock JAX over the same GPUs and what their links can do.

    python benchmarks/multi_gpu.py --out benchmarks/results

Needs no hand: takes two clusters of half the GPUs each, and one GPU with one CPU device besides. ``--clusters`` names
others: ``cuda:2+cuda:2``, ``cuda:3+cuda:1``; ``cpu:2+cpu:1`` runs anywhere, and with ``CUDA_VISIBLE_DEVICES=0,0`` two
clusters share one GPU (with ``XLA_PYTHON_CLIENT_MEM_FRACTION=0.4``, and without stock JAX, which cannot). Each cluster is
a JAX process of its own. In one run: the links' limits (pinned copies of all GPUs at once), stock JAX over all GPUs and
over the first cluster's, the same operations across the clusters over shared memory and over TCP, sums in segments, an
exchange behind matrix products, and training steps of a transformer with random weights: across clusters, in stock JAX,
and with gradients that PyTorch's Gloo adds in host memory. All results are checked. ``--tests`` runs the tables of
collectives with these clusters, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_bench import KB, LOOPS, MB, SIZES, VISIBLE, gloo, iterations, report
from gpu_bench.children import free_port, group
from gpu_bench.run import Run, repetitions, row

OPS = ("psum_loop", "ppermute_loop", "send_loop", "psum", "all_gather", "psum_scatter", "ppermute", "send")
SEGMENTS = (1, 2, 4, 8)
BIG = 256 * MB
TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"


@dataclasses.dataclass(frozen=True)
class Part:
    """One cluster: its platform and the indices of its devices among those of the platform."""

    platform: str
    devices: tuple[int, ...]

    def environ(self) -> dict[str, str]:
        if self.platform == "cpu":
            count = len(self.devices)
            return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        variable = VISIBLE[self.platform]
        shown = [v for v in os.environ.get(variable, "").split(",") if v]
        indices = [shown[i] if shown else str(i) for i in self.devices]
        return {"JAX_PLATFORMS": f"{self.platform},cpu", variable: ",".join(indices)}


def parse(text: str) -> tuple[Part, ...]:
    """``cuda:2+cpu:1``; clusters of one platform get different devices."""
    counters: dict[str, itertools.count[int]] = {}
    parts = []
    for word in text.split("+"):
        platform, _, count = word.partition(":")
        following = counters.setdefault(platform, itertools.count())
        parts.append(Part(platform, tuple(itertools.islice(following, int(count or 1)))))
    return tuple(parts)


def together(parts: Sequence[Part]) -> Part:
    """All devices as one stock process has them."""
    return Part(parts[0].platform, tuple(sorted(d for p in parts for d in p.devices)))


def shared(parts: Sequence[Part]) -> bool:
    """Whether clusters share a GPU (``CUDA_VISIBLE_DEVICES=0,0``): what one has with a single one."""
    gpus = [(p.platform, p.environ()[VISIBLE[p.platform]].split(",")) for p in parts if p.platform != "cpu"]
    devices = [(platform, index) for platform, indices in gpus for index in indices]
    return len(set(devices)) < len(devices)


def default_clusters(gpus: int) -> list[str]:
    if shown := [v for v in os.environ.get(VISIBLE["cuda"], "").split(",") if v]:
        gpus = len(shown)
    half = gpus // 2
    pair = [f"cuda:{half}+cuda:{half}"] if half else []
    return [*pair, "cuda:1+cpu:1"]


def world_environ(parts: Sequence[Part], **more: str) -> list[dict[str, str]]:
    common = {
        "HETCCL_COORDINATOR": f"127.0.0.1:{free_port()}",
        "HETCCL_CLUSTERS": ",".join(f"c{i}:1" for i in range(len(parts))),
        "HETCCL_SECRET": secrets.token_hex(32),
        "HETCCL_TIMEOUT": "30",
        "HETCCL_ARRIVAL_TIMEOUT": "120",
    }
    return [
        {**common, **part.environ(), "HETCCL_CLUSTER": f"c{i}", "HETCCL_PROCESS": "0", **more}
        for i, part in enumerate(parts)
    ]


def limits(parts: Sequence[Part]) -> dict[str, Any]:
    """Pinned copies of every GPU at the same time: one way, as a send of each, and both ways."""
    environs = [Part(p.platform, (d,)).environ() for p in parts if p.platform != "cpu" for d in p.devices]
    found: dict[str, Any] = {}
    with group("gpu_bench.limits", environs) as gpus:
        for way in ("d2h", "h2d", "both"):
            gpus.ask(30, {"way": way, "bytes": BIG, "reps": 2})
            found[way] = row(BIG, gpus.times(60, {"way": way, "bytes": BIG, "reps": 10}))
            print(f"{way:>14} {found[way]['gb_per_s']:7.2f} GB/s each way and GPU, {len(environs)} at once", flush=True)
    return found


def crossing(op: str, nbytes: int, sizes: Sequence[int]) -> float:
    """The bytes that the busiest link carries one way, at least; ``nbytes`` is each rank's operand, as in the figures."""
    ranks, links = sum(sizes), min(sizes)
    kind = op.removesuffix("_loop")
    if kind == "psum":
        return nbytes / links
    if kind == "all_gather":
        return nbytes * max(sizes) / links
    if kind == "psum_scatter":
        return nbytes / ranks * max(sizes) / links
    return nbytes


def collectives(
    run: Run, environs: Sequence[Mapping[str, str]], ops: Sequence[str], sizes: Sequence[int], segments: Sequence[int]
) -> Any:
    """All operations at all sizes, and the sums of the largest in segments."""
    found: dict[str, Any] = {}
    with group("gpu_bench.ranks", environs, timeout=120.0) as members:
        found["devices"] = members.facts

        def one(op: str, nbytes: int, parts: int = 1) -> dict[str, Any]:
            per = iterations(op, nbytes)
            reps = repetitions(nbytes * per, 4 << 30)
            r = row(nbytes, members.times(90, {"op": op, "bytes": nbytes, "reps": reps, "segments": parts}), per)
            print(f"{op:>14} {nbytes:>10} B {r['median_us']:10.1f} us {r['gb_per_s']:7.2f} GB/s, {parts}", flush=True)
            return r

        for op in ops:
            found[op] = []
            for nbytes in sizes:
                if op in LOOPS and nbytes not in (sizes[0], sizes[-1]):
                    continue
                if run.left() < 20:
                    return {**found, "stopped": "no time left (--time-limit)"}
                found[op].append(one(op, nbytes))
        found["segments"] = [{"segments": k, **one("psum", sizes[-1], k)} for k in segments if run.left() >= 20]
    return found


def overlap(run: Run, environs: Sequence[Mapping[str, str]], small: bool) -> dict[str, Any]:
    """How much of an exchange hides behind matrix products, and how much slower these are with it."""
    shape = {"nbytes": BIG, "side": 8192, "products": 20, "reps": 7}
    if small:
        shape = {"nbytes": MB, "side": 128, "products": 2, "reps": 3}
    with group("gpu_bench.member", environs, timeout=120.0) as world:
        rows = [report.overlap_row(a["result"]) for a in world.ask(min(120, run.left()), {"overlap": shape})]
    for r in rows:
        r["products_slower"] = r["both_ms"] / r["products_ms"] - 1
    print(*rows, sep="\n", flush=True)
    return {f"cluster {i}": r for i, r in enumerate(rows)}


def training(run: Run, environs: Sequence[Mapping[str, str]], args: argparse.Namespace) -> dict[str, Any]:
    request = {"steps": args.steps, "rows": args.rows, "length": args.length, "parameters": args.parameters}
    with group("gpu_bench.training", environs, timeout=120.0) as members:
        answers = members.ask(min(300, run.left()), request)
    seconds = [max(step) for step in zip(*(a["times"] for a in answers), strict=True)]
    tokens = sum(a["tokens"] for a in answers)
    found = {
        "parameters": answers[0]["parameters"],
        "tokens": tokens,
        "step_s": statistics.median(seconds),
        "tokens_per_s": tokens / statistics.median(seconds),
        "losses": answers[0]["losses"],
    }
    if any(abs(a["losses"][-1] - found["losses"][-1]) > 1e-3 * abs(found["losses"][-1]) for a in answers):
        raise RuntimeError(f"the clusters' losses differ: {[a['losses'] for a in answers]}")
    print(found, flush=True)
    return found


def staged_environ(parts: Sequence[Part]) -> list[dict[str, str]]:
    meet = f"tcp://127.0.0.1:{free_port()}"
    common = {"GLOO_MEET": meet, "GLOO_WORLD": str(len(parts))}
    return [{**part.environ(), **common, "GLOO_RANK": str(i)} for i, part in enumerate(parts)]


def tables(parts: Sequence[Part], limit: float) -> dict[str, Any]:
    """The tables of collectives with clusters of these devices; each passes, fails or is skipped."""
    layout = "/".join(str(len(p.devices)) for p in parts)
    environ = {**os.environ, "HETCCL_TEST_PLATFORMS": ",".join(p.platform for p in parts)}
    files = [str(TESTS / f"test_{name}.py") for name in ("spanning_ops", "spanning_transforms", "order", "p2p")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", f"{layout}-", *files]
    try:
        done = subprocess.run(command, env=environ, cwd=TESTS.parent, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"the tests took longer than {limit:.0f} s: {(late.stdout or b'')[-500:]!r}") from None
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    print(last, flush=True)
    return {"layout": layout, "status": done.returncode, "says": last, "failures": done.stdout[-4000:]}


def shares(found: dict[str, Any], name: str, parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """The comparisons of one world with its links' limit and with stock JAX."""
    result: dict[str, dict[str, Any]] = {}
    sizes = [len(p.devices) for p in parts]
    measured = found.get(f"limits {name}", {})
    stock = found.get(f"stock {name}", {})
    for transport, op in itertools.product(("shm", "tcp"), OPS):
        for r in found.get(f"hetccl {name} {transport}", {}).get(op, []):
            if r["bytes"] != BIG:
                continue
            title = f"{name} {transport} {op} 256 MB"
            limit = measured.get("d2h" if op.startswith("send") else "both", {}).get("gb_per_s")
            if limit:
                rate = crossing(op, r["bytes"], sizes) / r["median_us"] / 1e3
                share = {
                    "is": rate / limit,
                    "wanted": 0.93 if op.startswith(("ppermute", "send")) else 0.90,
                    "more_is_better": True,
                }
                result[f"{title} / C2C limit"] = share
            same = next((s for s in stock.get(op, []) if s["bytes"] == BIG), None)
            if same:
                speed = same["median_us"] / r["median_us"]
                result[f"{title} / stock JAX over the same devices"] = {
                    "is": speed,
                    "wanted": 0,
                    "more_is_better": True,
                }
    for r in found.get(f"hetccl {name} shm", {}).get("psum_loop", []):
        if r["bytes"] == 4 * KB:
            result[f"{name} psum 4 KB in a loop, us"] = {"is": r["median_us"], "wanted": 60, "more_is_better": False}
    return result


def world_steps(run: Run, name: str, args: argparse.Namespace, sizes: Sequence[int]) -> None:
    """Everything about one choice of clusters."""
    parts = parse(name)
    alike = len({p.platform for p in parts}) == 1
    # Stock JAX cannot have one GPU twice.
    stock = {"skipped": "the clusters share a GPU"} if shared(parts) else None
    ops = args.ops.split(",")
    if any(p.platform != "cpu" for p in parts):
        run.step(f"limits {name}", lambda: limits(parts))
    for transport in args.transports.split(","):
        environs = world_environ(parts, HETCCL_TRANSPORT=transport)
        run.step(f"hetccl {name} {transport}", lambda e=environs: collectives(run, e, ops, sizes, SEGMENTS))
    if alike:
        run.step(f"stock {name}", lambda: stock or collectives(run, [together(parts).environ()], ops, sizes, ()))
        if len(parts[0].devices) > 1:
            run.step(f"stock {name} first cluster", lambda: collectives(run, [parts[0].environ()], ops, sizes, ()))
        run.step(f"overlap {name}", lambda: overlap(run, world_environ(parts), args.quick))
    if alike and not args.no_training:
        run.step(f"training {name}", lambda: training(run, world_environ(parts), args))
        run.step(f"training {name} stock", lambda: stock or training(run, [together(parts).environ()], args))
        why = gloo.missing()
        staged = {"skipped": why} if why else None
        run.step(f"training {name} staged", lambda: staged or training(run, staged_environ(parts), args))
    if args.tests:
        run.step(f"tests {name}", lambda: tables(parts, max(run.left() - 5, 10)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", help="comma list of clusters joined by +, as platform:devices")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for JSON and plot")
    parser.add_argument("--sizes", help="bytes of each rank's operand, comma list")
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--parameters", type=float, default=1e9, help="of the transformer (1e9)")
    parser.add_argument("--rows", type=int, default=8, help="sequences for each device (8)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (1024)")
    parser.add_argument("--steps", type=int, default=5, help="training steps that count (5)")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--tests", action="store_true", help="run the tables of collectives, too")
    parser.add_argument("--ops", default=",".join(OPS), help=f"comma list of {', '.join(OPS)}")
    parser.add_argument("--quick", action="store_true", help="small overlap: to see that it works")
    parser.add_argument("--time-limit", type=float, default=1500.0, metavar="S", help="for the whole run (1500)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = [int(s) for s in args.sizes.split(",")] if args.sizes else SIZES
    run = Run("multi-gpu", args.out, args.time_limit)
    names = args.clusters.split(",") if args.clusters else default_clusters(len(run.found["machine"]["gpus"]))
    for name in names:
        world_steps(run, name, args, sizes)
    run.found["ratios"] = {k: v for name in names for k, v in shares(run.found, name, parse(name)).items()}
    run.write()
    report.plot(args.out, "multi-gpu", run.found, [k for k in run.found if k.startswith(("hetccl ", "stock "))])
    report.say(run.found["ratios"])


if __name__ == "__main__":
    main()
