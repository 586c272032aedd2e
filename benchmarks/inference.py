"""Time to the first token with prefill and decode in two clusters: the KV cache by send, or staged through the hosts.

    python benchmarks/inference.py --out benchmarks/results
    CUDA_VISIBLE_DEVICES=0,0 XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 python benchmarks/inference.py --platform cuda \
        --model width=2048,heads=16,layers=16,prompt=1025,rows=4 --out benchmarks/results

Two clusters of one device each, CPUs or GPUs (above two that share one), run the model of examples/prefill_decode.py.
Requests alternate in one run between

* ``send``: each layer's cache leaves in the program that makes it (``hetccl.send``, ``hetccl.recv``);
* ``staged``: when the prefill has ended, ``np.asarray`` of each layer's cache, a TCP socket, ``jax.device_put``;
* ``alone``: prefill and first token on one device, in the cluster ``decode``. Nothing crosses.

The clock starts when the prefill does and ends when the decode cluster has the first token that it computed from the
cache; both processes read one clock (CLOCK_MONOTONIC of one host).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from gpu_bench.report import head, write

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKER = "--worker"
SIDES = ("send", "staged", "alone")


def worker(options: dict[str, Any]) -> None:
    """One cluster: answers the requests; prints, for each side, when each prefill began or each first token was there."""
    import jax
    import numpy as np
    from flax import nnx

    import jax_hetccl as hetccl

    spec = importlib.util.spec_from_file_location("prefill_decode", ROOT / "examples" / "prefill_decode.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)

    world = hetccl.initialize()
    prefills = world.clusters[world.cluster].name == "prefill"
    config = example.Config(**options["model"])
    model = example.Transformer(config, rngs=nnx.Rngs(0))
    staging = [np.empty(config.cache.shape, config.cache.dtype) for _ in range(config.layers)]
    if prefills:
        hetccl.barrier("listening")
        connection = socket.create_connection(("127.0.0.1", options["port"]))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        with socket.create_server(("127.0.0.1", options["port"])) as server:
            hetccl.barrier("listening")
            connection, _ = server.accept()

    def prefill(side: str, prompts: jax.Array) -> None:
        if side == "send":
            jax.block_until_ready(example.prefill(model, prompts, to="decode"))
        elif side == "staged":
            for layer in example.prefill(model, prompts):
                connection.sendall(np.ascontiguousarray(layer).data)

    def first_token(side: str, prompts: jax.Array) -> jax.Array:
        if side == "send":
            return example.first_token(model, prompts, None, config, source="prefill")[0]
        if side == "alone":
            return example.first_token(model, prompts, example.prefill(model, prompts), config)[0]
        for layer in staging:
            left = layer.data.cast("B")
            while left:
                got = connection.recv_into(left)
                if not got:
                    raise ConnectionError("the other cluster has gone")
                left = left[got:]
        return example.first_token(model, prompts, [jax.device_put(layer) for layer in staging], config)[0]

    times: dict[str, list[float]] = {side: [] for side in SIDES}
    tokens: dict[str, list[Any]] = {side: [] for side in SIDES}
    for request in range(-2, options["requests"]):  # two to compile and warm up
        prompts = jax.block_until_ready(example.questions(config, request + 2))
        for side in SIDES:
            hetccl.barrier(side)
            begin = time.monotonic()
            if prefills:
                prefill(side, prompts)
            else:
                token = np.asarray(first_token(side, prompts))
                tokens[side].append(token.tolist())
            if request >= 0:
                times[side].append(begin if prefills or side == "alone" else time.monotonic())
                if side == "alone" and not prefills:
                    times[side][-1] = time.monotonic() - begin
    assert prefills or tokens["send"] == tokens["staged"] == tokens["alone"], "the sides disagree about the tokens"
    print("times", json.dumps(times), flush=True)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--model", default="width=64,heads=1,layers=4,prompt=128,rows=128", help="sizes")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda", "rocm"))
    parser.add_argument("--out", type=pathlib.Path, help="directory for the JSON")
    args = parser.parse_args()
    model = {name: int(value) for name, _, value in (word.partition("=") for word in args.model.split(","))}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = json.dumps({"requests": args.requests, "model": model, "port": port})
    done = subprocess.run(
        [sys.executable, "-m", "jax_hetccl.cli", "run"]
        + [word for name in ("prefill", "decode") for word in ("--cluster", f"{name}=1x1@{args.platform}")]
        + ["--time-limit", "500", "--", "python", __file__, WORKER, options],
        capture_output=True, check=False, text=True, cwd=ROOT, env={**os.environ, "HETCCL_TRANSPORT": args.transport},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    said = {
        name: json.loads(line.split("times ", 1)[1])
        for name in ("prefill", "decode")
        for line in done.stdout.splitlines()
        if line.startswith(f"[{name}/0] times ")
    }
    seconds = {
        side: [end - begin for end, begin in zip(said["decode"][side], said["prefill"][side], strict=True)]
        for side in ("send", "staged")
    }
    seconds["alone"] = said["decode"]["alone"]
    ms = {side: statistics.median(values) * 1e3 for side, values in seconds.items()}
    cache = 2 * 4 * model["rows"] * (model["prompt"] - 1) * model["width"] * model["layers"]
    report = {
        **head(sys.argv),
        "platform": args.platform,
        "model": model,
        "load_average": os.getloadavg()[1],  # of what else the machine did: this run is a part of it
        "cache_bytes": cache,
        "requests": args.requests,
        "first_token_ms": ms,
        "first_token_p90_ms": {side: sorted(v)[int(len(v) * 0.9)] * 1e3 for side, v in seconds.items()},
        "handover_ms": {side: ms[side] - ms["alone"] for side in ("send", "staged")},
    }
    print(json.dumps(report, indent=1))
    if args.out:
        write(args.out, f"inference-{args.platform}-{args.transport}", report)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
