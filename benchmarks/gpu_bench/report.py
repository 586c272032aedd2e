"""What a run found: machine, JSON, comparisons with the limits and with Gloo, plot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any


def head(argv: Sequence[str]) -> dict[str, Any]:
    """The exact command, versions and hardware."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"]
    versions = {}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-hetccl", "torch", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join(["python", *argv]),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "gpus": _lines([*query, "--format=csv,noheader"])},
    }


def _lines(command: Sequence[str]) -> list[str]:
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return out.strip().splitlines()


def _cpu() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def write(out: pathlib.Path, name: str, found: dict[str, Any]) -> None:
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def overlap_row(r: dict[str, Any]) -> dict[str, Any]:
    """Seconds as milliseconds, with how much of the shorter part was hidden behind the longer one."""
    ms = {k: r[k] * 1e3 for k in ("exchange", "products", "both")}
    hidden = ms["exchange"] + ms["products"] - ms["both"]
    return {
        **{f"{k}_ms": v for k, v in ms.items()},
        "sum_ms": ms["exchange"] + ms["products"],
        "hidden_part": hidden / min(ms["exchange"], ms["products"]),
        **{k: v for k, v in r.items() if k not in ms},
    }


def _value(found: dict[str, Any], step: str, op: str, nbytes: int, key: str) -> float | None:
    rows = found.get(step, {}).get(op, [])
    return next((r[key] for r in rows if r["bytes"] == nbytes), None)


def ratios(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The comparisons that matter, as far as both sides were measured."""
    big, small = 256 << 20, 4 << 10
    pair, host = "hetccl cuda+cuda auto", "hetccl cuda+cpu auto"
    both = found.get("limits", {}).get("both", {}).get("gb_per_s")
    result: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float | None, of: float | None, wanted: float, more: bool = True) -> None:
        if value is not None and of:
            result[name] = {"is": value / of, "wanted": wanted, "more_is_better": more}

    for op in ("send_recv", "ppermute"):
        add(f"{op} 256 MB / both-ways pinned rate", _value(found, pair, op, big, "gb_per_s"), both, 0.93)
    for op in ("psum", "psum_donated"):
        rate = _value(found, pair, op, big, "gb_per_s")
        add(f"{op} 256 MB / half the both-ways pinned rate", rate, both and both / 2, 0.90)
    for op, of in (("send_recv", both), ("ppermute", both), ("psum", both and both / 2)):
        share, wanted = ("half the ", 0.90) if op == "psum" else ("", 0.93)
        rate = _value(found, pair, f"{op}_loop", big, "gb_per_s")
        add(f"{op} 256 MB in a loop / {share}both-ways pinned rate", rate, of, wanted)
    add("psum 4 KB in a loop, us", _value(found, pair, "psum_loop", small, "median_us"), 1.0, 60, more=False)
    add("psum 256 MB GPU+CPU donated, GB/s", _value(found, host, "psum_donated", big, "gb_per_s"), 1.0, 18)
    rate = _value(found, host, "psum_loop", big, "gb_per_s")
    add("psum 256 MB GPU+CPU in a loop, GB/s", rate, 1.0, 18)
    against = {
        "psum / Gloo all_reduce": ("psum", "all_reduce", 14),
        "all_gather / Gloo all_gather": ("all_gather", "all_gather", 50),
        "send_recv / Gloo pinned": ("send_recv", "send_pinned", 14),
        "send_recv / Gloo as users write it": ("send_recv", "send_plain", 50),
    }
    for name, (ours, theirs, wanted) in against.items():
        add(name, _value(found, pair, ours, big, "gb_per_s"), _value(found, "gloo", theirs, big, "gb_per_s"), wanted)
    return result


def say(compared: dict[str, dict[str, Any]]) -> None:
    """Prints comparisons as :func:`ratios` gives them."""
    for name, r in compared.items():
        print(f"{name:>70}: {r['is']:9.2f} (at {'least' if r['more_is_better'] else 'most'} {r['wanted']})")


def plot(out: pathlib.Path, name: str, found: dict[str, Any], steps: Sequence[str]) -> None:
    """GB/s against bytes, one panel for each of these steps, with the limits and Gloo."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [k for k in steps if "failed" not in found[k] and "skipped" not in found[k]]
    if not steps:
        return
    figure, panels = plt.subplots(1, len(steps), figsize=(6.5 * len(steps), 5), squeeze=False)
    for axis, step in zip(panels[0], steps, strict=True):
        for op, rows in found[step].items():
            if isinstance(rows, list) and rows and "bytes" in rows[0] and not op.endswith("_loop"):
                axis.plot([r["bytes"] for r in rows], [r["gb_per_s"] for r in rows], marker="o", ms=3, label=op)
        for op, rows in found.get("gloo", {}).items():
            if isinstance(rows, list):
                axis.plot([r["bytes"] for r in rows], [r["gb_per_s"] for r in rows], "--", label=f"Gloo {op}")
        for what, limit in found.get("limits", {}).items():
            if isinstance(limit, dict) and "gb_per_s" in limit:
                axis.axhline(limit["gb_per_s"], color="grey", lw=0.7)
                axis.annotate(what, (4096, limit["gb_per_s"]), fontsize=7, va="bottom", color="grey")
        axis.set(xscale="log", yscale="log", xlabel="bytes of each rank's operand", ylabel="GB/s", title=step)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / f"{name}.png", dpi=120)
