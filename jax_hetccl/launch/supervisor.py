"""Runs a set of processes to their common end: all succeed, or the first failure (or a signal) stops all.

With restarts a failure ends and starts again its own cluster only: the unit of failure is the cluster.

One thread, one selector: pipes, process ends (pidfd) and signals (wake-up pipe) are all events of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from jax_hetccl.launch.environment import ProcessPlan
from jax_hetccl.launch.output import Sink
from jax_hetccl.launch.process import Child, Keeper, describe

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_DRAIN_S = 1.0  # a stray grandchild may hold a pipe open for ever; its output after this is not waited for
_KILLED_S = 30.0  # a process that survives SIGKILL this long is stuck in the kernel


class Ended(enum.Enum):
    """Why the run ended."""

    SUCCESS = "success"
    FAILURE = "failure"
    SIGNAL = "signal"
    LIMIT = "limit"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: exit status for the launcher: 0, the first failing process's (128+n for a death by signal n),
            128+n for a signal to the launcher, 124 for the time limit.
        why: the kind of end.
        first: name of the first process that failed, if one did.
        statuses: every process's exit status, by name.
    """

    status: int
    why: Ended
    first: str | None
    statuses: dict[str, int]


class Supervisor:
    """Starts processes, passes their output on, and ends them together.

    Use once, on the main thread (signals are passed on only there).

    Args:
        plans: what to start.
        sink: where their lines go.
        say: takes the launcher's own remarks (which process failed, what is being done).
        settle_s: after a first failure, how long the others may take to report it themselves before SIGTERM.
        grace_s: how long SIGTERM (or a passed-on signal) may take before SIGKILL.
        limit_s: the whole run may take no longer, if given.
        restarts: how many times, in all, a cluster that fails is started again while the others go on.
        tick: called at least every 0.1 s if given, e.g. to draw progress; an exception in it stops the run.
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        sink: Sink,
        *,
        say: Callable[[str], None] = lambda text: None,
        settle_s: float = 3.0,
        grace_s: float = 10.0,
        limit_s: float | None = None,
        restarts: int = 0,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self._plans, self._sink, self._say = plans, sink, say
        self._settle_s, self._grace_s, self._limit_s, self._tick = settle_s, grace_s, limit_s, tick
        self._restarts = restarts
        self._restarting: set[int] = set()  # clusters whose processes are to start again once all have ended
        self._mark = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._running: set[Child] = set()
        self._statuses: dict[str, int] = {}
        self._signals: list[int] = []
        self._why, self._status, self._first = Ended.SUCCESS, 0, None
        self._term_at = self._kill_at = float("inf")  # when SIGTERM and SIGKILL are due

    def run(self) -> Outcome:
        """Runs everything; returns when no process that it started is left.

        Raises:
            OSError: a process could not be started at all.
        """
        keeper = Keeper(self._mark)
        try:
            with self._signals_caught():
                for plan in self._plans:
                    self._start(plan)
                self._loop()
        finally:
            self._kill_and_close(keeper)
        return Outcome(self._status, self._why, self._first, self._statuses)

    def _start(self, plan: ProcessPlan) -> None:
        child = Child(plan, self._mark)
        self._children.append(child)
        self._running.add(child)
        for descriptor in child.streams:
            self._selector.register(descriptor, selectors.EVENT_READ, child)
        if child.pidfd is not None:
            self._selector.register(child.pidfd, selectors.EVENT_READ, None)

    def _loop(self) -> None:
        limit = time.monotonic() + self._limit_s if self._limit_s is not None else float("inf")
        while self._running:
            self._read(self._selector.select(0.1))
            self._reap()
            self._restart()
            if self._signals:
                self._pass_on(self._signals.pop(0))
            now = time.monotonic()
            if now >= limit and self._why is Ended.SUCCESS and self._running:
                names = ", ".join(child.plan.name for child in self._children if child in self._running)
                self._say(f"still running after the limit of {self._limit_s:g} s: {names}; stopping them")
                self._stop(Ended.LIMIT, 124, settle_s=0.0)
            self._enforce(now)
            if self._tick is not None:
                self._tick()
        end = time.monotonic() + _DRAIN_S
        while any(child.streams for child in self._children) and time.monotonic() < end:
            self._read(self._selector.select(0.05))
        for child in self._children:  # pipes that something else still holds open
            for descriptor in list(child.streams):
                self._end_stream(child, descriptor)
        self._sink.flush()

    def _read(self, events: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in events:
            child = key.data
            if not isinstance(child, Child):
                if child is not None:  # the wake-up pipe; the handler has noted the signal already
                    child.recv(4096)
                continue
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if data:
                number, splitter = child.streams[key.fd]
                for line in splitter.feed(data):
                    self._sink.line(child.plan.cluster, child.plan.name, number, line)
            else:
                self._end_stream(child, key.fd)
        self._sink.flush()

    def _end_stream(self, child: Child, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        number, splitter = child.streams.pop(descriptor)
        for line in splitter.finish():
            self._sink.line(child.plan.cluster, child.plan.name, number, line)

    def _reap(self) -> None:
        ended = [child for child in self._children if child in self._running and child.poll() is not None]
        # Of several that ended within one wake-up, one killed by a signal is the cause, not the effect.
        for child in sorted(ended, key=lambda child: child.killed_by() is None):
            status = child.poll()
            assert status is not None
            self._running.discard(child)
            if child.pidfd is not None:
                self._selector.unregister(child.pidfd)
            self._statuses[child.plan.name] = status
            if status != 0 and self._why is Ended.SUCCESS and not self._again(child, status):
                self._first = child.plan.name
                rest = "; stopping the others" if self._running else ""
                self._say(f"{child.plan.name} failed: {describe(status)}{rest}")
                self._stop(Ended.FAILURE, status, settle_s=self._settle_s)

    def _again(self, failed: Child, status: int) -> bool:
        """Whether the cluster of a failed process is to start again; ends what is left of it."""
        plan = failed.plan
        if plan.cluster in self._restarting:  # ended together with the one that was counted
            failed.kill_group()
            return True
        if not self._restarts or plan.cluster < 0:
            return False
        self._restarts -= 1
        self._restarting.add(plan.cluster)
        self._say(
            f"{plan.name} failed: {describe(status)}; starting its cluster again ({self._restarts} more restarts)"
        )
        failed.kill_group()
        for child in self._running:
            if child.plan.cluster == plan.cluster:
                child.signal(signal.SIGKILL)
        return True

    def _restart(self) -> None:
        if self._why is not Ended.SUCCESS:
            self._restarting.clear()
        for cluster in sorted(self._restarting - {child.plan.cluster for child in self._running}):
            self._restarting.discard(cluster)
            for plan in self._plans:
                if plan.cluster == cluster:
                    self._start(plan)

    def _stop(self, why: Ended, status: int, settle_s: float) -> None:
        self._why, self._status = why, status
        self._term_at = time.monotonic() + settle_s
        self._kill_at = self._term_at + self._grace_s

    def _enforce(self, now: float) -> None:
        if now >= self._term_at:
            self._term_at = float("inf")
            self._signal_all(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = now + 1.0  # again, for processes that a group gained meanwhile
            if self._running:
                self._say("not ended in time, killing: " + ", ".join(c.plan.name for c in self._running))
            self._signal_all(signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._why is Ended.SIGNAL and number == signal.SIGINT:
            self._say("second SIGINT: killing all processes")
            self._kill_at = time.monotonic()
            return
        self._say(f"{name}: passed on to {len(self._running)} processes, waiting up to {self._grace_s:g} s")
        if self._why is Ended.SUCCESS:
            self._why, self._status = Ended.SIGNAL, 128 + number
        self._term_at = float("inf")
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
        self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for child in self._running:
            child.signal(number)

    def _kill_and_close(self, keeper: Keeper) -> None:
        self._signal_all(signal.SIGKILL)  # only after an exception: otherwise none is running
        end = time.monotonic() + _KILLED_S
        while any(child.poll() is None for child in self._running) and time.monotonic() < end:
            time.sleep(0.01)
        for child in self._children:
            child.close()
        self._selector.close()
        left = keeper.close()
        if left:
            self._say(f"could not kill processes {', '.join(map(str, left))}")

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        receive, send = socket.socketpair()
        receive.setblocking(False)
        send.setblocking(False)
        self._selector.register(receive, selectors.EVENT_READ, receive)
        before = {n: signal.signal(n, lambda number, frame: self._signals.append(number)) for n in _FORWARDED}
        wakeup = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.unregister(receive)
            receive.close()
            send.close()
