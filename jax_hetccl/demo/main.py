"""Runs the demo: two clusters, then the reference, then the comparison. Starts no JAX in this process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jax_hetccl._secret import generate
from jax_hetccl.demo import corpus, report
from jax_hetccl.demo.compare import ProcessRecord, RecordFile
from jax_hetccl.launch import (
    Ended,
    Outcome,
    ProcessPlan,
    Supervisor,
    parse_clusters,
    parse_pythons,
    plan_processes,
)
from jax_hetccl.launch.environment import platform_environ
from jax_hetccl.launch.logs import LogFiles
from jax_hetccl.launch.ports import reserve_port

CLUSTERS = ("left=2x1@cpu", "right=1x1@cpu")
REFERENCE = "reference/0"
ROWS_PER_DEVICE = 8
LENGTH = 64
PHASE_LIMIT_S = 240.0  # far above the usual time: nothing may hang for ever


class Demo:
    """One run of the demo.

    Args:
        out: folder for logs, figures and the plot; made if needed.
        steps: training steps.
        pythons: `CLUSTER=PATH` values, for clusters that use another Python.
        settings: `HETCCL_*` settings of the clusters' processes.
        console: where progress and tables go; the terminal by default.

    Raises:
        LaunchError: a wrong value in `pythons`.
    """

    def __init__(
        self,
        out: Path,
        steps: int,
        pythons: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        console: Console | None = None,
    ) -> None:
        self._clusters = parse_clusters(CLUSTERS)
        self._pythons = parse_pythons(pythons, self._clusters)
        self._out, self._steps, self._settings = out, steps, dict(settings or {})
        self._console = console or Console(highlight=False)
        self._devices = sum(cluster.processes * cluster.devices for cluster in self._clusters)

    def run(self) -> int:
        """Runs it; returns the exit status: 0 only if everything that must hold does."""
        start = time.monotonic()
        self._out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hetccl-demo-") as folder:
            data, reports = Path(folder, "corpus.npz"), Path(folder)
            corpus.make(self._steps, ROWS_PER_DEVICE * self._devices, LENGTH).save(data)
            program = ("--corpus", str(data), "--reports", str(reports), "--steps", str(self._steps))
            program += ("--rows-per-device", str(ROWS_PER_DEVICE))
            runs = (
                ("two clusters", self._cluster_plans(program)),
                ("one stock JAX world", [self._reference_plan(program)]),
            )
            records: dict[str, ProcessRecord] = {}
            with self._progress() as progress:
                for title, plans in runs:
                    outcome, found = self._train(title, plans, reports, progress)
                    records.update(found)
                    if outcome.status:
                        progress.stop()
                        return self._failed(title, outcome)
        reference = records.pop(REFERENCE)
        summary = report.summarize(self._clusters, records, reference, time.monotonic() - start)
        return report.show(summary, self._out, self._console)

    def _cluster_plans(self, program: Sequence[str]) -> list[ProcessPlan]:
        return plan_processes(
            self._clusters,
            # -P: not the source tree, from whose folder one may have installed the package and started this.
            ("python", "-P", "-m", "jax_hetccl.demo.worker", *program),
            environ=os.environ,
            coordinator=f"127.0.0.1:{reserve_port()}",
            secret=generate(),
            python=sys.executable,
            pythons=self._pythons,
            settings=self._settings,
        )

    def _reference_plan(self, program: Sequence[str]) -> ProcessPlan:
        path = str(Path(__file__).with_name("reference.py"))
        stock = {key: value for key, value in os.environ.items() if not key.startswith("HETCCL_")}
        environ = {**stock, **platform_environ(os.environ, "cpu", self._devices, 0)}
        # -P: the folder of reference.py is not a place to import from.
        return ProcessPlan(-1, REFERENCE, (sys.executable, "-P", path, *program), environ)

    def _progress(self) -> Progress:
        columns = (
            TextColumn("{task.description:>20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        # Drawn from the supervisor's tick and not by a thread, so that output stays in order.
        return Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console, auto_refresh=False)

    def _train(
        self, title: str, plans: Sequence[ProcessPlan], reports: Path, progress: Progress
    ) -> tuple[Outcome, dict[str, ProcessRecord]]:
        files = {plan.name: RecordFile(reports / f"{plan.name.replace('/', '-')}.jsonl") for plan in plans}
        task = progress.add_task(title, total=self._steps, note="starting")

        def draw() -> None:
            slowest = min((file.poll() for file in files.values()), key=lambda record: len(record.losses))
            note = "compiling" if slowest.start else "starting"
            if slowest.losses:
                note = f"loss {slowest.losses[-1]:.3f}"
            progress.update(task, completed=len(slowest.losses), note=note)
            progress.refresh()

        logs = LogFiles(self._out)
        for plan in plans:
            logs.path(plan.name).unlink(missing_ok=True)  # of an earlier run
        outcome = Supervisor(
            plans,
            logs,
            say=lambda text: progress.console.print(f"[hetccl] {text}", markup=False),
            limit_s=PHASE_LIMIT_S,
            tick=draw,
        ).run()
        logs.close()
        draw()
        return outcome, {name: file.poll() for name, file in files.items()}

    def _failed(self, title: str, outcome: Outcome) -> int:
        logs = LogFiles(self._out)
        self._console.print(f"demo failed: {title}: exit status {outcome.status}", style="red", markup=False)
        if outcome.why is not Ended.SIGNAL:
            for name in [outcome.first] if outcome.first else list(outcome.statuses):
                self._console.print(f"last lines of {logs.path(name)}:", markup=False)
                self._console.print(logs.tail(name), markup=False, soft_wrap=True)
        return outcome.status
