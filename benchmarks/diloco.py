"""What an outer step of DiLoCo costs, and how much of it `overlap` hides behind the local step that it falls on.

    CUDA_VISIBLE_DEVICES=0,0 XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 python benchmarks/diloco.py --out benchmarks/results
    python benchmarks/diloco.py --platform cpu --width 512 --rows 512

Two clusters of one device each train a stack of matrices. Three kinds of steps alternate in one run:

* ``local``: a step on which no outer step falls, without an exchange;
* ``outer``: the outer step behind the local one (``overlap=False``);
* ``overlap``: the outer step of what the local step begins with (``overlap=True``).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from gpu_bench.report import head, write

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKER = "--worker"
KINDS = ("local", "outer", "overlap")
WARM_UP = 3


def worker(options: dict[str, Any]) -> None:
    """One cluster: prints the seconds of each kind of step."""
    import jax
    import jax.numpy as jnp
    import optax

    import jax_hetccl as hetccl

    hetccl.initialize()
    width, layers, rows = options["width"], options["layers"], options["rows"]
    keys = jax.random.split(jax.random.key(0), layers + 1)
    parameters = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys[1:]]
    x = jax.random.normal(keys[0], (rows, width))
    inner = optax.sgd(1e-3)

    def loss_of(parameters: Any) -> jax.Array:
        y = x
        for matrix in parameters:
            y = jnp.tanh(y @ matrix)
        return jnp.mean(y**2)

    def made(overlap: bool) -> tuple[Any, Any]:
        sgd = optax.sgd(0.7, momentum=0.9, nesterov=True)
        outer = hetccl.optax.diloco(sgd, every=2, overlap=overlap, name=f"overlap={overlap}")

        @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="due")
        def step(parameters: Any, outer_state: Any, due: tuple[int, ...]) -> Any:
            updates, _ = inner.update(jax.grad(loss_of)(parameters), inner.init(parameters), parameters)
            return outer.apply_updates(parameters, updates, outer_state, due)

        return step, outer

    steps = {overlap: made(overlap) for overlap in (False, True)}
    states = {
        overlap: (jax.tree.map(jnp.copy, parameters), jax.jit(outer.init)(parameters))
        for overlap, (_, outer) in steps.items()
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(-WARM_UP, options["steps"]):
        for kind in KINDS:
            overlap, due = kind == "overlap", () if kind == "local" else (0,)
            hetccl.barrier(kind)
            begin = time.monotonic()
            states[overlap] = jax.block_until_ready(steps[overlap][0](*states[overlap], due=due))
            if turn >= 0:
                seconds[kind].append(time.monotonic() - begin)
    print("seconds", json.dumps(seconds), flush=True)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda", choices=("cpu", "cuda", "rocm"))
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=pathlib.Path, help="directory for the JSON")
    args = parser.parse_args()
    options = json.dumps({name: getattr(args, name) for name in ("width", "layers", "rows", "steps")})
    clusters = [word for name in ("left", "right") for word in ("--cluster", f"{name}=1x1@{args.platform}")]
    done = subprocess.run(
        [sys.executable, "-m", "jax_hetccl.cli", "run", *clusters, "--time-limit", "500", "--", "python", __file__]
        + [WORKER, options],
        capture_output=True, check=False, text=True, cwd=ROOT, env=dict(os.environ),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    said = [json.loads(line.split("seconds ", 1)[1]) for line in done.stdout.splitlines() if "] seconds " in line]
    # A step is over when it is in both clusters.
    ms = {kind: statistics.median(map(max, zip(*(s[kind] for s in said), strict=True))) * 1e3 for kind in KINDS}
    report = {
        **head(sys.argv),
        "platform": args.platform,
        "parameters": args.layers * args.width**2,
        "steps": args.steps,
        "step_ms": ms,
        "outer_step_ms": ms["outer"] - ms["local"],
        "hidden_part": (ms["outer"] - ms["overlap"]) / (ms["outer"] - ms["local"]),
    }
    print(json.dumps(report, indent=1))
    if args.out:
        write(args.out, f"diloco-{args.platform}-{args.rows}", report)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
