"""Two clusters of unequal speed against the sum of what each of them does alone.

    python benchmarks/unequal.py --out benchmarks/results

Runs examples/unequal_clusters.py on two cores: the cluster ``fast`` (two devices) on core 0, the cluster ``slow`` (one
device) on core 1, which it shares with two processes that do nothing but compute, so that it gets a third. Each cluster
stays on its core; otherwise either would take what the other leaves idle, and "alone" would mean two cores. The two
processes run all the time. Rounds alternate between both clusters with balanced rows, each alone with its rows of that,
and both with equal rows for each device. Throughput is rows by the median time of the steps behind the last balance.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import re
import runpy
import statistics
import subprocess
import sys
from typing import Any

from gpu_bench.report import head

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "unequal_clusters.py"
WORKER = "--worker"
CORES = {"fast": 0, "slow": 1}
EVERY, STEPS = 5, 25
_LINE = re.compile(r"\[(\w+)/0\] step (\d+): loss (\S+), rows ([\d+]+), own (\S+) ms, step (\S+) ms")


def burn(core: int) -> None:
    """Takes its part of a core for ever."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(100000))


def run(clusters: dict[str, int], rows: int, width: int, every: int) -> dict[str, Any]:
    """Runs the example; its throughput, its last split, its losses and the clusters' own times."""
    named = [word for name, devices in clusters.items() for word in ("--cluster", f"{name}=1x{devices}")]
    options = ["--rows", rows, "--width", width, "--every", every, "--steps", STEPS]
    done = subprocess.run(
        [sys.executable, "-m", "jax_hetccl.cli", "run", *named, "--time-limit", "300", "--", "python", __file__, WORKER]
        + [str(word) for word in options],
        capture_output=True, check=False, text=True, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    lines = [match.groups() for line in done.stdout.splitlines() if (match := _LINE.fullmatch(line))]
    first = next(iter(clusters))
    split = next(line[3] for line in lines if line[0] == first and int(line[1]) == STEPS - 1)
    # Steps behind the last change of rows, without the one that compiles.
    settled = STEPS - 1
    while settled > 0 and all(line[3] == split for line in lines if int(line[1]) == settled - 1):
        settled -= 1
    measured = [line for line in lines if int(line[1]) > settled]
    step = statistics.median(float(line[5]) for line in measured if line[0] == first)
    own = {name: statistics.median(float(line[4]) for line in measured if line[0] == name) for name in clusters}
    return {
        "split": split,
        "steps_measured": len(measured) // len(clusters),
        "step_ms": step,
        "own_ms": own,
        "rows_per_s": rows / step * 1e3,
        "losses": [float(line[2]) for line in lines if line[0] == first],
    }


def worker() -> None:
    """One cluster of the example, on its core."""
    os.sched_setaffinity(0, {CORES[os.environ["HETCCL_CLUSTER"]]})
    sys.argv = [str(EXAMPLE), *sys.argv[2:]]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, help="directory for the JSON")
    args = parser.parse_args()
    burners = [multiprocessing.Process(target=burn, args=(CORES["slow"],), daemon=True) for _ in range(2)]
    for burner in burners:
        burner.start()
    rounds = []
    try:
        for _ in range(args.rounds):
            both = run({"fast": 2, "slow": 1}, args.rows, args.width, EVERY)
            fast, slow = map(int, both["split"].split("+"))
            found = {
                "both": both,
                "fast": run({"fast": 2}, fast, args.width, 0),
                "slow": run({"slow": 1}, slow, args.width, 0),
                "unbalanced": run({"fast": 2, "slow": 1}, args.rows, args.width, 0),
            }
            alone = found["fast"]["rows_per_s"] + found["slow"]["rows_per_s"]
            found["ratio"], found["unbalanced_ratio"] = (
                found[name]["rows_per_s"] / alone for name in ("both", "unbalanced")
            )
            rounds.append(found)
            print(
                f"rows {both['split']}: {both['rows_per_s']:.0f} rows/s, alone {found['fast']['rows_per_s']:.0f} + "
                f"{found['slow']['rows_per_s']:.0f}: {found['ratio']:.2f}; unbalanced {found['unbalanced_ratio']:.2f}",
                flush=True,
            )
    finally:
        for burner in burners:
            burner.terminate()
    losses = [r["both"]["losses"] for r in rounds]
    report = {
        **head(sys.argv),
        "ratio": statistics.median(r["ratio"] for r in rounds),
        "unbalanced_ratio": statistics.median(r["unbalanced_ratio"] for r in rounds),
        # Of the balanced and the unbalanced clusters, whose global batches are the same.
        "largest_difference_of_losses": max(
            abs(a - b) / b for r in rounds for a, b in zip(r["both"]["losses"], r["unbalanced"]["losses"], strict=True)
        ),
        "rounds": [{k: _without_losses(v) for k, v in r.items()} for r in rounds],
        "losses": losses[0],
    }
    print(f"median ratio {report['ratio']:.3f}, unbalanced {report['unbalanced_ratio']:.3f}")
    if args.out:
        (args.out / "unequal-clusters.json").write_text(json.dumps(report, indent=1) + "\n")


def _without_losses(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "losses"} if isinstance(value, dict) else value


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker()
    else:
        main()
