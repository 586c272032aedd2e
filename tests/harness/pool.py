"""Worlds of worker processes: made when a test needs them, kept while they are well, replaced when they are not."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import platforms
from harness.case import DATA, Case, MeshSpec
from harness.layout import Layout
from harness.process import Process, WorkerGoneError
from harness.results import Leaf, load
from jax_hetccl.launch.ports import reserve_port

START_S, LEAVE_S = 60.0, 15.0


@dataclasses.dataclass
class Reply:
    """What one worker answered."""

    label: str
    cluster: int
    raw: dict[str, Any]
    leaves: dict[str, Leaf] | None = None

    @property
    def error(self) -> dict[str, Any] | None:
        return self.raw.get("error")

    @property
    def health(self) -> dict[str, Any] | None:
        return self.raw.get("health")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of one case."""

    case: Case
    vma: bool
    api: str = "lax"
    mesh: MeshSpec | None = None
    params: dict[str, Any] | None = None

    @property
    def spec(self) -> MeshSpec:
        return self.mesh or self.case.mesh

    def request(self, out: Path, **more: Any) -> dict[str, Any]:
        return {
            "op": "case", "case": self.case.name, "vma": self.vma, "api": self.api, "params": self.params,
            "mesh": dataclasses.asdict(self.mesh) if self.mesh else None, "limit": self.case.limit_s, "out": str(out), **more,
        }  # fmt: skip


class World:
    """Processes of all clusters, joined. Use as a context manager, or `close` it.

    Args:
        layout: clusters, processes, devices.
        transport: "shm" or "tcp".
        pythons: interpreter of each cluster; the current one where missing.
        timeout, arrival_timeout: HETCCL_TIMEOUT and HETCCL_ARRIVAL_TIMEOUT; the latter is by platform if None: GPUs
            compile for longer.
        axes: what `initialize` gets.
        joined: False leaves jax_hetccl out: clusters that share nothing, for tests of this harness itself.
        surroundings: by label, see `harness.process.Process`.
        environment: further variables of all processes.
    """

    def __init__(
        self, layout: Layout, transport: str, *, pythons: tuple[str, ...] = (), timeout: float = 10.0,
        arrival_timeout: float | None = None, axes: Any = ("data",), joined: bool = True,
        surroundings: dict[str, dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.transport = layout, transport
        arrival_timeout = arrival_timeout or (60.0 if platforms.chosen() else 20.0)
        placed = [platforms.environment(layout, c, p) for c, p, _ in layout.members()]  # may skip the test
        self._scratch = tempfile.TemporaryDirectory(prefix="hetccl-test-")
        self.directory = Path(self._scratch.name)
        self._runs = 0
        self.workers: list[tuple[int, Process]] = []
        common = {
            "HETCCL_COORDINATOR": f"127.0.0.1:{reserve_port()}", "HETCCL_CLUSTERS": layout.names(),
            "HETCCL_SECRET": secrets.token_hex(32), "HETCCL_TRANSPORT": transport, "HETCCL_TIMEOUT": str(timeout),
            "HETCCL_ARRIVAL_TIMEOUT": str(arrival_timeout), "HETCCL_JOIN_TIMEOUT": str(int(START_S)), **(environment or {}),
        }  # fmt: skip
        self._makers: dict[str, Callable[[], Process]] = {}
        for (cluster, process, devices), place in zip(layout.members(), placed, strict=True):
            name = layout.name(cluster)
            label = f"{name}/{process}"
            setup = {
                "cluster": cluster,
                "devices": layout.devices,
                "initialize": {"axes": axes} if joined else None,
            }
            own = {**common, **place, "HETCCL_CLUSTER": name, "HETCCL_PROCESS": str(process)}
            python = pythons[cluster] if cluster < len(pythons) else sys.executable
            around = (surroundings or {}).get(label)
            # GPUs' settings are read when JAX is imported; surroundings are a forked process's.
            fork = (python == sys.executable and not platforms.chosen()) or around is not None
            self._makers[label] = functools.partial(
                Process, label, python, setup, devices, own, self.directory, fork, around
            )
            self.workers.append((cluster, self._makers[label]()))
        try:
            self.hello = self._started()
        except BaseException:
            self.kill()
            raise

    def _started(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + START_S
        replies = [w.answer(max(0.1, deadline - time.monotonic())) for _, w in self.workers]
        bad = [
            f"{w.label}: {r['error']['trace']}" for (_, w), r in zip(self.workers, replies, strict=True) if "error" in r
        ]
        if bad:
            raise WorkerGoneError("the world did not start:\n" + "\n".join(bad))
        return replies

    def run(self, run: Run) -> list[Reply]:
        """Runs a case on every worker. Raises WorkerGoneError (with all workers' stderr) if one dies or hangs."""
        self.ask([run] * len(self.workers))
        return self.answers(run.case.limit_s + 5)

    def ask(self, runs: list[Run | None], **more: Any) -> None:
        """Starts a run on each worker (None: nothing there), and returns at once."""
        self._runs += 1
        self._asked = []
        for i, ((_, worker), run) in enumerate(zip(self.workers, runs, strict=True)):
            out = self.directory / f"{self._runs}-{i}.npz"
            if run is not None:
                worker.ask(**run.request(out, **more))
            self._asked.append(out if run is not None else None)

    def answers(self, timeout: float, skip: tuple[str, ...] = ()) -> list[Reply]:
        """Replies to the last `ask`, except of workers labelled in ``skip``; ``timeout`` bounds the whole wait."""
        deadline, replies = time.monotonic() + timeout, []
        for (cluster, worker), out in zip(self.workers, self._asked, strict=True):
            if out is None or worker.label in skip:
                continue
            try:
                raw = worker.answer(max(0.1, deadline - time.monotonic()))
            except WorkerGoneError as gone:
                others = [w.tail(2500) for _, w in self.workers if w is not worker]
                raise WorkerGoneError("\n".join([str(gone), *others])) from None
            reply = Reply(worker.label, cluster, raw)
            if "leaves" in raw:
                reply.leaves = load(out, raw["leaves"])
                out.unlink()
            replies.append(reply)
        return replies

    def request(self, timeout: float, **request: Any) -> list[Reply]:
        """Sends one request to every worker and waits for all replies."""
        for _, worker in self.workers:
            worker.ask(**request)
        deadline = time.monotonic() + timeout
        return [Reply(w.label, c, w.answer(max(0.1, deadline - time.monotonic()))) for c, w in self.workers]

    def close(self, skip: tuple[str, ...] = ()) -> list[str]:
        """Leaves in order and ends the processes. Returns what went wrong: threads left, bad exit statuses, hangs.

        Workers labelled in ``skip`` are gone already.
        """
        wrong: list[str] = []
        self.workers, lost = [(c, w) for c, w in self.workers if w.label not in skip], self.workers
        try:
            for reply in self.request(LEAVE_S, op="shutdown", limit=LEAVE_S - 3):
                if reply.error:
                    wrong.append(f"{reply.label}: shutdown raised {reply.error['trace']}")
                elif reply.raw["threads"]:
                    wrong.append(f"{reply.label}: threads left after shutdown: {reply.raw['threads']}")
            for _, worker in self.workers:
                worker.ask_to_leave()
            for _, worker in self.workers:
                status = worker.left(LEAVE_S)
                if status != 0:
                    wrong.append(
                        f"{worker.label}: exit status {status} (None: still there after {LEAVE_S} s)\n{worker.tail()}"
                    )
        except WorkerGoneError as gone:
            wrong.append(str(gone))
        finally:
            self.workers = lost
            self.kill()
        return wrong

    def worker(self, label: str) -> Process:
        """The worker of this label, e.g. ``right/0``."""
        return next(w for _, w in self.workers if w.label == label)

    def replace(self, label: str) -> Process:
        """Starts a new process in the place of one that has died; its first answer says that it has joined a world."""
        at = next(i for i, (_, worker) in enumerate(self.workers) if worker.label == label)
        cluster, dead = self.workers[at]
        dead.kill()
        self.workers[at] = cluster, self._makers[label]()
        return self.workers[at][1]

    def kill(self) -> None:
        """Ends everything at once."""
        for _, worker in self.workers:
            worker.kill()
        self._scratch.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Oracle:
    """One stock-JAX process with CPU devices; it never imports jax_hetccl. Results are kept."""

    def __init__(self, devices: int, python: str = sys.executable) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="hetccl-oracle-")
        self._devices, self._python = devices, python
        self._worker: Process | None = None
        self._known: dict[Any, Reply] = {}
        self._begun: Any = None

    def run(self, run: Run, devices: tuple[int, ...]) -> Reply:
        """The case's result in one world with as many ranks as ``devices`` has together."""
        total = sum(devices)
        key = self._asking(run, total)[0]
        if key not in self._known:
            self._known[key] = self._fresh(run, total)
        return self._known[key]

    def begin(self, run: Run, devices: tuple[int, ...]) -> None:
        """Starts what `run` will be asked for next, and returns at once."""
        key, request, _ = self._asking(run, sum(devices))
        if key not in self._known:
            (self._worker or self._start()).ask(**request)
            self._begun = key

    def _asking(self, run: Run, total: int) -> tuple[Any, dict[str, Any], Path]:
        out = Path(self._scratch.name) / "result.npz"
        key = (run.case.name, run.vma, run.spec, repr(run.params), total)
        return key, run.request(out, setup_devices=[total]), out

    def _fresh(self, run: Run, total: int) -> Reply:
        key, request, out = self._asking(run, total)
        for attempt in (1, 2):
            worker = self._worker or self._start()
            if self._begun != key:
                worker.ask(**request)
            self._begun = None
            try:
                raw = worker.answer(run.case.limit_s + 5)
                break
            except WorkerGoneError:
                self.close(keep=True)
                if attempt == 2:
                    raise
        reply = Reply("oracle", 0, raw)
        if "leaves" in raw:
            reply.leaves = load(out, raw["leaves"])
        return reply

    def _start(self) -> Process:
        setup = {"cluster": None, "devices": [self._devices]}
        self._worker = Process("oracle", self._python, setup, self._devices, {}, Path(self._scratch.name))
        self._worker.answer(START_S)
        return self._worker

    def close(self, keep: bool = False) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        if not keep:
            self._scratch.cleanup()


class Pool:
    """Keeps one world at a time; tests are ordered so that those of one world stand together.

    A world that cannot start, or that had to be replaced too often, is not tried again: a broken build fails fast.
    """

    _MAX_DISCARDS = 8

    def __init__(self) -> None:
        self._key: Any = None
        self._world: World | None = None
        self._discards: collections.Counter[Any] = collections.Counter()
        self._unusable: dict[Any, str] = {}
        self.troubles: list[str] = []
        self.oracle = Oracle(8)
        self._stock: dict[int, Oracle] = {}

    def world(self, layout: Layout, transport: str, spec: MeshSpec = DATA, pythons: tuple[str, ...] = ()) -> World:
        """The world asked for: the present one if it is the same and well, else a new one.

        Args:
            layout, transport: of the world.
            spec: the mesh of the cases; the spanning axis has one size and one order of devices in a world.
            pythons: interpreter of each cluster; the current one where missing.
        """
        key = (layout, transport, spec.group, pythons)
        if self._discards[key] > self._MAX_DISCARDS:
            raise WorkerGoneError(
                f"the world {layout} over {transport} failed {self._discards[key]} times; not tried again"
            )
        if key in self._unusable:
            raise WorkerGoneError(self._unusable[key])
        if self._world is None or key != self._key:
            self.retire()
            try:
                self._world, self._key = World(layout, transport, pythons=pythons), key
            except WorkerGoneError as gone:
                self._unusable[key] = f"not tried again: {gone}"
                raise
        return self._world

    def stock(self, devices: int) -> Oracle:
        """A stock process with exactly this many devices, for program texts."""
        if devices not in self._stock:
            self._stock[devices] = Oracle(devices)
        return self._stock[devices]

    def discard(self) -> None:
        """Ends the present world without ceremony: it has failed or hangs."""
        if self._world is not None:
            self._discards[self._key] += 1
            self._world.kill()
            self._world = None

    def retire(self) -> None:
        """Ends the present world in order, and remembers what went wrong."""
        if self._world is not None:
            world, self._world = self._world, None
            self.troubles += [f"{self._key[0]} {self._key[1]}: {t}" for t in world.close()]

    def close(self) -> None:
        self.retire()
        for oracle in (self.oracle, *self._stock.values()):
            oracle.close()


@contextlib.contextmanager
def pool() -> Iterator[Pool]:
    made = Pool()
    try:
        yield made
    finally:
        made.close()
