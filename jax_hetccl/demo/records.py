"""What a training process tells its parent: one JSON object per line of a file. Read by `compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax

from .training import Trainer, checksums


class Reporter:
    """Writes records to a file, each one at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        """Writes one record of a kind, e.g. `step`."""
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def train(self, trainer: Trainer, steps: int, mark: Callable[[str], None] = lambda name: None) -> None:
        """Trains and reports: `start`, each `step`, and the checksums of the `parameters` at the end.

        Args:
            trainer: what to train.
            steps: how long.
            mark: called with `first step` after the first step (which waits for compilers) and with `last
                step`.
        """
        devices = jax.local_devices()
        self.write(
            "start",
            devices=len(devices),
            platform=devices[0].platform,
            python=".".join(map(str, sys.version_info[:3])),
            jax=jax.__version__,
            flax=flax.__version__,
        )
        for index, step in enumerate(trainer.run(steps)):
            self.write("step", loss=step.loss, seconds=step.seconds)
            if index == 0:
                mark("first step")
        mark("last step")
        self.write("parameters", checksums=checksums(trainer.parameters))
