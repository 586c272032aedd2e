"""Do both runs agree? Pure: records in, figures and verdicts out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CURVE_TOLERANCE = 1e-3
FALL = 0.8  # the mean loss of the last steps is at most this part of the first loss
LAST_STEPS = 10


@dataclasses.dataclass
class ProcessRecord:
    """What one process reported.

    Attributes:
        start: devices, platform and versions; empty until it has started.
        losses: the global loss of each step.
        seconds: wall time of each step.
        checksums: of each parameter, for each of its devices; empty until the end.
        traffic: the exchange's counters at several marks, if there are any.
        reductions: how many reductions of all gradients were timed alone, and their wall time together.
    """

    start: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    checksums: list[dict[str, str]] = dataclasses.field(default_factory=list)
    traffic: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    reductions: tuple[int, float] = (0, 0.0)

    def add(self, record: dict[str, Any]) -> None:
        """Takes one record of `records.Reporter`."""
        event = record["event"]
        if event == "start":
            self.start = record
        elif event == "step":
            self.losses.append(record["loss"])
            self.seconds.append(record["seconds"])
        elif event == "parameters":
            self.checksums = record["checksums"]
        elif event == "traffic":
            self.traffic[record["mark"]] = record["counters"]
        elif event == "reductions":
            self.reductions = (record["repetitions"], record["seconds"])


class RecordFile:
    """Reads a file of records while it is being written; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self.record = path, 0, ProcessRecord()

    def poll(self) -> ProcessRecord:
        """Takes the lines that have become complete; returns the record so far."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.record
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self.record.add(json.loads(line))
        return self.record


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that must hold: its name, whether it does, and the figure or reason."""

    name: str
    good: bool
    detail: str


def end_loss(losses: Sequence[float]) -> float:
    """Mean of the last steps: single batches differ in difficulty."""
    last = losses[-LAST_STEPS:]
    return sum(last) / len(last)


def combined(checksums: Mapping[str, str]) -> str:
    """One checksum for all parameters of one device."""
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()[:16]


def check_loss_falls(losses: Sequence[float]) -> Check:
    """The loss ends clearly below where it started."""
    first, last = losses[0], end_loss(losses)
    return Check("loss falls", last <= FALL * first, f"{first:.4f} → {last:.4f}")


def check_replicas(processes: Mapping[str, ProcessRecord]) -> Check:
    """Every device of every process holds the same bits in every parameter, and saw the same losses."""
    devices = {
        f"{name} device {index}": checksums
        for name, record in processes.items()
        for index, checksums in enumerate(record.checksums)
    }
    missing = [name for name, record in processes.items() if not record.checksums or not record.losses]
    if missing:
        return Check("replicas", False, f"no parameters reported by {', '.join(missing)}")
    first_name, first = next(iter(devices.items()))
    for name, checksums in devices.items():
        for leaf in sorted({*first, *checksums}):
            mine, theirs = first.get(leaf, "absent"), checksums.get(leaf, "absent")
            if mine != theirs:
                return Check("replicas", False, f"{leaf} differs: {first_name} {mine}, {name} {theirs}")
    losses = {name: record.losses for name, record in processes.items()}
    reference_name, reference = next(iter(losses.items()))
    for name, values in losses.items():
        if values != reference:
            step = next((i for i, (a, b) in enumerate(zip(reference, values, strict=False)) if a != b), len(values))
            return Check("replicas", False, f"loss of step {step} differs between {reference_name} and {name}")
    return Check("replicas", True, f"{len(first)} parameters bit-identical on {len(devices)} devices")


def check_curves(losses: Sequence[float], reference: Sequence[float]) -> Check:
    """Both loss curves agree at every step."""
    if len(losses) != len(reference):
        return Check("curves", False, f"{len(losses)} steps against {len(reference)} in the reference")
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    good = all(difference <= CURVE_TOLERANCE for difference in differences)  # false for a NaN; max() may drop it
    return Check("curves", good, f"{max(differences):.1e} (at most {CURVE_TOLERANCE:.0e})")
