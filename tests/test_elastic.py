"""Training that goes on through the death and the return of a cluster, against one in which nothing happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from test_examples import environ
from test_sync import judge, run

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "elastic.py"
_LINE = re.compile(r"\[(\w+)/(\d)\] (goes on from step|step) (\d+) with ([\w, ]+):.* state (\w{8})")


class Steps:
    """What the processes said: for each number of completed steps and each set of clusters, who has which state."""

    def __init__(self, text: str) -> None:
        self.states: dict[tuple[int, str], dict[str, str]] = {}
        self.resumed: list[tuple[int, str]] = []
        for match in map(_LINE.match, text.splitlines()):
            if match:
                cluster, process, what, step, clusters, state = match.groups()
                at = int(step), clusters
                # A step that is repeated after a loss must come out the same.
                known = self.states.setdefault(at, {}).setdefault(f"{cluster}/{process}", state)
                assert known == state, f"{cluster}/{process} has two states after step {at}"
                if what != "step" and at not in self.resumed:
                    self.resumed.append(at)

    def of(self, step: int, clusters: str) -> str:
        """The state after a step, which all processes must have."""
        by_process = self.states[step, clusters]
        assert sorted({name.partition("/")[0] for name in by_process}) == clusters.split(", ")
        assert len(set(by_process.values())) == 1, f"step {step}: {by_process}"
        return next(iter(by_process.values()))


def _train(*words: str) -> tuple[Steps, str]:
    """Runs the example through the launcher; arguments of the launcher, then of the example."""
    split = words.index("--")
    command = [sys.executable, "-m", "jax_hetccl.cli", "run", "--time-limit", "120", "--transport", "shm"]
    done = subprocess.run(
        [*command, *words[:split], "--", "python", str(_EXAMPLE), *words[split + 1 :]],
        env=environ(), capture_output=True, check=False, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return Steps(done.stdout), done.stderr


def test_death_and_return(tmp_path: Path) -> None:
    """Three clusters; the third dies before step 6. The two that are left go on to what two that never lost anybody reach
    from the same state, bit for bit; the third comes back and has what they have."""
    three, two = "left, right, third", "left, right"
    clusters = ("--cluster", "left=1x1", "--cluster", "right=1x2")
    seen, said = _train(
        "--restarts", "1", *clusters, "--cluster", "third=1x1",
        "--", "--steps", "16", "--together", "4", "--kill", "third:6", "--save", str(tmp_path),
    )  # fmt: skip
    assert "third/0 failed: killed by SIGKILL (exit status 137); starting its cluster again (0 more restarts)" in said
    (begin, begun_with), (loss, left), (back, with_all) = seen.resumed
    assert (begin, begun_with, left, with_all) == (0, three, two, three)
    # The agreed step: the survivors have completed six steps, or five where the sixth was under way in one of them.
    assert loss in (5, 6) and loss < back <= 12
    for step in range(loss):
        seen.of(step, three)
    assert seen.of(loss, two) == seen.of(loss, three)
    assert seen.of(back, three) == seen.of(back, two)
    assert seen.of(16, three)

    oracle, _ = _train(
        *clusters, "--", "--steps", str(back), "--together", "0", "--load", str(tmp_path / f"{loss}-2.npz")
    )
    for step in range(loss + 1, back + 1):
        assert seen.of(step, two) == oracle.of(step, two), f"after step {step}"


def test_losses_one_after_the_other() -> None:
    """Three clusters, one of several processes and one of several devices, until one is left; see `sync_worker.goes_on`."""
    answers = run("1+1/2/1", ("goes_on",))
    judge({name: said for name, said in answers.items() if name.startswith("left")}, "goes_on")
