"""What jax_hetccl puts in the place of MaxText's loss, accumulation, clipping and saving, around a twin of them.

The real thing is compared with one world in tests/test_maxtext.py, which needs MaxText.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.process import base_environment


def test_a_step_is_that_of_one_world_and_drift_ends_at_a_checkpoint() -> None:
    program = Path(__file__).with_name("maxtext_twin.py")
    command = [sys.executable, "-P", "-m", "jax_hetccl.cli", "run", "--cluster", "left=1x1", "--cluster", "right=1x1"]
    done = subprocess.run(
        [*command, "--time-limit", "100", "--", "python", "-P", str(program)],
        env=base_environment(), capture_output=True, check=False, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if "The first cluster's state is copied" in line]
    assert len(told) == 2 and all("kernel" in line for line in told), done.stderr
    assert sorted(done.stdout.splitlines()) == ["[left/0] as in one world", "[right/0] as in one world"]
