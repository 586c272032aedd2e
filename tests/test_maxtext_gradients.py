"""What jax_hetccl puts in the place of MaxText's loss, accumulation and clipping, around a twin of them.

The real thing is compared with one world in tests/test_maxtext.py, which needs MaxText.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.process import base_environment


def test_gradients_losses_and_clipping_are_global() -> None:
    program = Path(__file__).with_name("maxtext_twin.py")
    command = [sys.executable, "-P", "-m", "jax_hetccl.cli", "run", "--cluster", "left=1x1", "--cluster", "right=1x1"]
    done = subprocess.run(
        [*command, "--time-limit", "100", "--", "python", "-P", str(program)],
        env=base_environment(), capture_output=True, check=False, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[left/0] gradients are global", "[right/0] gradients are global"]
