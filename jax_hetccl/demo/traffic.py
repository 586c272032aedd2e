"""Bytes between the clusters and how fast they went, from the counters that the processes reported. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_hetccl.demo.compare import ProcessRecord


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What crossed between clusters in some steps, and how long these took.

    Attributes:
        sent: payload bytes that each process sent to other clusters, by name; each byte is counted once.
        messages: sent by all processes together.
        repetitions: how many steps (or reductions) these are.
        seconds: their wall time in the slowest process, whatever else was done in it.
    """

    sent: Mapping[str, int]
    messages: int
    repetitions: int
    seconds: float

    @property
    def total(self) -> int:
        """Bytes that crossed, both directions together."""
        return sum(self.sent.values())

    @property
    def milliseconds(self) -> float:
        """Of one repetition."""
        return self.seconds / self.repetitions * 1e3

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes that crossed, both directions together, per second of wall time."""
        return self.total / self.seconds / 1e9


def between(processes: Mapping[str, ProcessRecord], start: str, end: str, repetitions: int, seconds: float) -> Traffic:
    """What the counters gained between two marks.

    Args:
        processes: records with counters at both marks.
        start: name of the mark before.
        end: name of the mark after.
        repetitions: what was done that often in between.
        seconds: and took so long.
    """
    sent = {
        name: record.traffic[end]["bytes_sent"] - record.traffic[start]["bytes_sent"]
        for name, record in processes.items()
    }
    messages = sum(record.traffic[end]["messages"] - record.traffic[start]["messages"] for record in processes.values())
    return Traffic(sent, messages, repetitions, seconds)
