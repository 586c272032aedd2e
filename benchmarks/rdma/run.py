"""Compares the RDMA transport with a plain loop of verbs, alternating in one run on one machine.

The plain program is any that prints "BW write <bytes> x <count>: <rate> MB/s" and "LAT write_imm 8B half-rtt: <time> us"
and takes -d DEVICE, as server, and the server's address, as client: reliable-connection writes, 16 under way, and a
ping-pong of 8 bytes. Ours is `//xla_ffi/transport/rdma:channel_speed`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
from pathlib import Path

MB = 1 << 20


def plain(program: str, devices: list[str], address: str) -> dict[str, float]:
    """One run of the plain loop: bytes/s of 1 MB writes, and half a round trip in microseconds."""
    # Pollers that do not yield take three milliseconds for 8 bytes where there is one core.
    env = {**os.environ, "YIELD": "1"}
    server = subprocess.Popen([program, "-d", devices[0]], stdout=subprocess.DEVNULL, env=env)
    try:
        time.sleep(0.2)
        client = subprocess.run(
            [program, "-d", devices[1], address], capture_output=True, text=True, timeout=60, env=env, check=True
        )
    finally:
        server.wait(timeout=10)
    rate = re.search(r"BW write \d+ x \d+: ([\d.]+) MB/s", client.stdout)
    half_trip = re.search(r"half-rtt: ([\d.]+) us", client.stdout)
    if rate is None or half_trip is None:
        raise RuntimeError(f"{program} printed neither rate nor time:\n{client.stdout}")
    return {"bytes_per_s": float(rate[1]) * 1e6, "half_round_trip_us": float(half_trip[1])}


def ours(program: str, devices: list[str], gid_index: int) -> dict[str, float]:
    """One run of our transport."""
    run = subprocess.run([program, *devices, str(gid_index)], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(run.stdout)


def main() -> None:
    """Parses the arguments, measures, prints a summary and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ours", required=True, help="channel_speed")
    parser.add_argument("--plain", required=True, help="the plain loop of verbs")
    parser.add_argument("--devices", nargs=2, default=["rxe0", "rxe1"])
    parser.add_argument("--address", default="10.77.0.1", help="of the first device, for the plain loop")
    parser.add_argument("--gid-index", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a directory for the JSON")
    args = parser.parse_args()
    plains: list[dict[str, float]] = []
    runs: list[dict[str, float]] = []
    for _ in range(args.rounds):
        plains.append(plain(args.plain, args.devices, args.address))
        runs.append(ours(args.ours, args.devices, args.gid_index))

    def middle(rows: list[dict[str, float]], key: str) -> float:
        return statistics.median(row[key] for row in rows)

    rate, half_trip = middle(plains, "bytes_per_s"), middle(plains, "half_round_trip_us")
    result = {
        "command": "python benchmarks/rdma/run.py "
        f"--ours channel_speed --plain PLAIN --devices {' '.join(args.devices)} --rounds {args.rounds}",
        "machine": {"kernel": platform.release(), "cores": os.cpu_count(), "devices": args.devices},
        "rounds": args.rounds,
        "plain": {"bytes_per_s_1_mb_writes": rate, "half_round_trip_8_bytes_us": half_trip},
        "ours": {key: middle(runs, key) for key in runs[0]},
        "ratios": {
            "64_mb_message_in_1_mb_writes_of_the_same_memory": middle(runs, "bytes_per_s_repeated_memory") / rate,
            "64_mb_message_in_1_mb_writes": middle(runs, f"bytes_per_s_{64 * MB}") / rate,
            "1_mb_messages": middle(runs, f"bytes_per_s_{MB}") / rate,
            "half_round_trip_8_bytes": middle(runs, "half_round_trip_8_bytes_us") / half_trip,
        },
        "samples": {"plain": plains, "ours": runs},
    }
    print(json.dumps({k: result[k] for k in ("plain", "ours", "ratios")}, indent=2))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "rdma-software-roce.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
