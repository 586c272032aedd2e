"""One run of a benchmark: what was found, until when it may go on, and the statistics of one figure."""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu_bench import report
from gpu_bench.children import ChildError


class Run:
    """What was found, and until when it may go on.

    Args:
      name: of the JSON.
      out: directory for it.
      time_limit: seconds for everything.
    """

    def __init__(self, name: str, out: pathlib.Path, time_limit: float) -> None:
        self._name, self._out = name, out
        self._deadline = time.monotonic() + time_limit
        self.found: dict[str, Any] = report.head(sys.argv)

    def left(self) -> float:
        return self._deadline - time.monotonic()

    def write(self) -> None:
        report.write(self._out, self._name, self.found)

    def step(self, name: str, what: Callable[[], Any]) -> None:
        """Runs a step and keeps its result, or why there is none."""
        if self.left() < 5:
            self.found[name] = {"skipped": "no time left (--time-limit)"}
        else:
            print(f"--- {name}", flush=True)
            try:
                self.found[name] = what()
            except (ChildError, OSError, RuntimeError) as error:
                self.found[name] = {"failed": str(error)}
                print(f"{name} failed: {error}", flush=True)
        self.write()


def row(nbytes: int, times: Sequence[float], per: int = 1) -> dict[str, Any]:
    """Statistics of the seconds of one size; ``per`` operations in each."""
    each = sorted(t / per for t in times)
    median = statistics.median(each)
    return {
        "bytes": nbytes,
        "median_us": median * 1e6,
        "p10_us": each[len(each) // 10] * 1e6,
        "p90_us": each[len(each) * 9 // 10] * 1e6,
        "samples": len(each),
        "gb_per_s": nbytes / median / 1e9,
    }


def repetitions(nbytes: int, budget: int) -> int:
    return max(5, min(50, budget // nbytes))
