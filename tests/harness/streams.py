"""Worlds in which every process exchanges without end, until something goes wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from harness.pool import World


def ask(world: World, **arguments: Any) -> list[Path]:
    """Asks every worker for `fault_programs.stream`; returns files that they make when they have done a step."""
    told = [world.directory / f"{worker.pid}.step" for _, worker in world.workers]
    for (_, worker), path in zip(world.workers, told, strict=True):
        path.unlink(missing_ok=True)
        worker.ask(op="call", call="fault_programs:stream", arguments={**arguments, "tell": str(path)})
    return told


def begin(world: World, within: float = 60.0, **arguments: Any) -> None:
    """The same; returns when all have done a step."""
    told, end = ask(world, **arguments), time.monotonic() + within
    while not all(path.exists() for path in told):
        if time.monotonic() > end:
            tails = [worker.tail(2000) for _, worker in world.workers]
            pytest.fail("\n".join(["not everybody has come to the first step", *tails]))
        time.sleep(0.01)
