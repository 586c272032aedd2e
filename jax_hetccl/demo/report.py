"""What the demo found, as tables, a plot and a file of figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jax_hetccl.demo import compare, traffic
from jax_hetccl.demo.compare import Check, ProcessRecord
from jax_hetccl.launch import ClusterSpec


@dataclasses.dataclass(frozen=True)
class Summary:
    """Everything that is shown.

    Attributes:
        clusters: what was started.
        processes: the records of the clusters' processes, by name.
        reference: the record of the stock JAX world.
        checks: what must hold.
        steps: bytes between the clusters in all steps but the first, which waits for compilers.
        reductions: bytes between the clusters in reductions of all gradients and nothing else.
        seconds: how long the whole demo took.
    """

    clusters: Sequence[ClusterSpec]
    processes: Mapping[str, ProcessRecord]
    reference: ProcessRecord
    checks: Sequence[Check]
    steps: traffic.Traffic
    reductions: traffic.Traffic
    seconds: float

    @property
    def losses(self) -> list[float]:
        """The global loss, as the first process saw it (the checks compare the others)."""
        return next(iter(self.processes.values())).losses


def summarize(
    clusters: Sequence[ClusterSpec],
    processes: Mapping[str, ProcessRecord],
    reference: ProcessRecord,
    seconds: float,
) -> Summary:
    """Compares the runs; see `Summary`."""
    losses = next(iter(processes.values())).losses
    checks = (
        compare.check_loss_falls(losses),
        compare.check_replicas(processes),
        compare.check_curves(losses, reference.losses),
    )
    step_seconds = max(sum(record.seconds[1:]) for record in processes.values())
    repetitions, reduction_seconds = max(record.reductions for record in processes.values())
    steps = traffic.between(processes, "first step", "last step", len(losses) - 1, step_seconds)
    reductions = traffic.between(processes, "reductions start", "reductions end", repetitions, reduction_seconds)
    return Summary(clusters, processes, reference, checks, steps, reductions, seconds)


def show(summary: Summary, out: Path, console: Console) -> int:
    """Prints the tables and writes `losses.png` and `demo.json`; returns 0 if all checks hold, else 1."""
    picture, figures = out / "losses.png", out / "demo.json"
    plot(summary, picture)
    figures.write_text(json.dumps(as_dict(summary), indent=2) + "\n")
    console.print(clusters_table(summary))
    console.print(results_table(summary, picture, figures))
    failed = [check for check in summary.checks if not check.good]
    for check in failed:
        console.print(f"demo failed: {check.name}: {check.detail}", style="red", markup=False)
    return 1 if failed else 0


def clusters_table(summary: Summary) -> Table:
    """Who took part."""
    table = Table(title="Clusters", title_justify="left")
    for column in ("cluster", "processes", "devices", "platform", "Python", "jax", "flax"):
        table.add_column(column)
    for cluster in summary.clusters:
        start = summary.processes[f"{cluster.name}/0"].start
        devices = cluster.processes * cluster.devices
        table.add_row(cluster.name, str(cluster.processes), str(devices), *_versions(start))
    table.add_section()
    start = summary.reference.start
    table.add_row("reference (stock JAX)", "1", str(start["devices"]), *_versions(start))
    return table


def _versions(start: Mapping[str, Any]) -> list[str]:
    return [str(start[key]) for key in ("platform", "python", "jax", "flax")]


def results_table(summary: Summary, picture: Path, figures: Path) -> Table:
    """What came out."""
    falls, replicas, curves = summary.checks
    table = Table(title="Results", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    last = f"mean of the last {compare.LAST_STEPS} of {len(summary.losses)} steps"
    table.add_row("loss, start → end", f"{_mark(falls)} ({last})")
    table.add_row(
        "loss, stock JAX",
        f"{summary.reference.losses[0]:.4f} → {compare.end_loss(summary.reference.losses):.4f}",
    )
    table.add_row("largest difference of the curves", _mark(curves))
    table.add_section()
    for name, record in summary.processes.items():
        sums = sorted({compare.combined(checksums) for checksums in record.checksums})
        table.add_row(f"parameters of {name}", " ".join(sums))
    table.add_row("replicas", _mark(replicas))
    table.add_section()
    sent = ", ".join(f"{name} {sent / 1e6:.1f}" for name, sent in summary.steps.sent.items())
    steps, reductions = summary.steps, summary.reductions
    table.add_row("bytes between clusters", f"{steps.total / 1e6:.1f} MB in {steps.messages} messages (sent: {sent})")
    table.add_row(
        "rate, whole steps",
        f"{steps.gigabytes_per_second:.3f} GB/s, both directions, over the wall time of the steps "
        f"({steps.milliseconds:.1f} ms each, computation included)",
    )
    table.add_row(
        "rate, gradients alone",
        f"{reductions.gigabytes_per_second:.3f} GB/s, both directions, over the wall time of reducing all "
        f"gradients ({reductions.milliseconds:.2f} ms each, with the reduction inside left)",
    )
    table.add_section()
    table.add_row("whole demo", f"{summary.seconds:.0f} s")
    table.add_row("loss curves", str(picture))
    table.add_row("all figures", str(figures))
    return table


def _mark(check: Check) -> str:
    return f"[green]✓[/green] {check.detail}" if check.good else f"[red]✗ {check.detail}[/red]"


def as_dict(summary: Summary) -> dict[str, Any]:
    """All figures, for programs."""
    return {
        "clusters": [dataclasses.asdict(cluster) for cluster in summary.clusters],
        "processes": {name: dataclasses.asdict(record) for name, record in summary.processes.items()},
        "reference": dataclasses.asdict(summary.reference),
        "checks": [dataclasses.asdict(check) for check in summary.checks],
        "steps": dataclasses.asdict(summary.steps),
        "reductions": dataclasses.asdict(summary.reductions),
        "seconds": summary.seconds,
    }


def plot(summary: Summary, path: Path) -> None:
    """Draws both loss curves and, below, their difference."""
    from matplotlib.figure import Figure  # slow to import, and needed only at the end

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    losses, reference = summary.losses, summary.reference.losses
    names = " + ".join(f"{cluster.name} ({cluster.processes * cluster.devices})" for cluster in summary.clusters)
    upper.plot(
        reference,
        color="0.6",
        linewidth=4,
        label=f"one stock JAX world ({summary.reference.start['devices']})",
    )
    upper.plot(losses, color="C0", linewidth=1.2, label=f"clusters {names}")
    upper.set_ylabel("loss, nats per character")
    upper.legend()
    upper.set_title("Character-level transformer, data-parallel")
    lower.plot([abs(a - b) for a, b in zip(losses, reference, strict=False)], color="C3", linewidth=1)
    lower.axhline(compare.CURVE_TOLERANCE, color="0.5", linestyle="--", linewidth=1)
    lower.set_yscale("symlog", linthresh=1e-7)
    lower.set_ylabel("difference")
    lower.set_xlabel("step")
    figure.savefig(path, dpi=120)
