"""One worker process as the tests see it: start, ask, answer, kill."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

from harness import compiler, zygote

TESTS = Path(__file__).resolve().parent.parent
# A native module in the source tree comes from an in-place build, which then stands for the installed package.
IN_PLACE = [str(TESTS.parent)] if list((TESTS.parent / "jax_hetccl").glob("_native*.so")) else []
_DROPPED = ("HETCCL_", "JAX_", "XLA_", "TF_", "PYTHONPATH", "PYTEST_")


def base_environment() -> dict[str, str]:
    """A cleaned copy of our environment, with what every worker has."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *IN_PLACE]),
        "PYTHONFAULTHANDLER": "1",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def _forked(request: dict[str, Any], stderr: int) -> tuple[zygote.Forked, IO[str], IO[str]]:
    """Has a worker forked; returns it with its stdin and stdout."""
    # With more threads it could not fork. Clusters differ in the order of sets, so that nothing agreed can depend on it.
    seed = str(1 + request["setup"]["cluster"] % 2)
    settings = {**base_environment(), "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
    parent = zygote.shared(tuple(settings.items()))
    requests, mine = os.pipe()
    answers, its = os.pipe()
    try:
        forked = parent.fork(request, (requests, its, stderr))
    finally:
        os.close(requests)
        os.close(its)
    return forked, os.fdopen(mine, "w", buffering=1), os.fdopen(answers)


class WorkerGoneError(Exception):
    """The process ended, or did not answer in time. The text carries the end of its stderr."""


class Process:
    """A worker process in a process group of its own.

    Args:
        label: how messages call it, e.g. ``left/0``.
        python: the interpreter.
        setup: see `harness.worker.Worker`.
        devices: CPU devices to give it, unless ``environment`` puts it on another platform.
        environment: variables added to a cleaned copy of ours.
        directory: where its stderr goes and what it starts in.
        fork: from a process with this interpreter that has imported JAX (see `harness.zygote`), which takes a fraction
            of the time. Variables that JAX reads when it is imported come too late then.
        surroundings: ``limits``, ``network``, ``mount`` of a forked process; see `harness.zygote.Zygote.fork`.
    """

    def __init__(
        self,
        label: str,
        python: str,
        setup: dict[str, Any],
        devices: int,
        environment: dict[str, str],
        directory: Path,
        fork: bool = False,
        surroundings: dict[str, Any] | None = None,
    ) -> None:
        self.label = label
        self._stderr = directory / (label.replace("/", "-") + ".stderr")
        own = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", **environment}
        self._child: subprocess.Popen[str] | zygote.Forked
        setup = {**setup, "quick": compiler.quick()}
        with self._stderr.open("w") as stderr:
            if fork:
                request = {"setup": setup, "environment": own, "directory": str(directory), **(surroundings or {})}
                self._child, self._stdin, self._stdout = _forked(request, stderr.fileno())
            else:
                child = subprocess.Popen(
                    [python, "-m", "harness.worker", json.dumps(setup)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                    env={**base_environment(), **own}, cwd=directory, start_new_session=True, text=True, bufsize=1,
                )  # fmt: skip
                assert child.stdin is not None and child.stdout is not None
                self._child, self._stdin, self._stdout = child, child.stdin, child.stdout
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._next = 0
        threading.Thread(target=self._read, name=f"read-{label}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def _read(self) -> None:
        for line in self._stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def ask(self, **request: Any) -> int:
        """Sends a request and returns at once; `answer` brings the reply."""
        self._next += 1
        try:
            self._stdin.write(json.dumps({"id": self._next, **request}) + "\n")
        except OSError as error:
            raise WorkerGoneError(self._gone("is gone")) from error
        return self._next

    def answer(self, timeout: float) -> dict[str, Any]:
        """The reply to the last request; replies that nobody waited for are dropped.

        Raises:
            WorkerGoneError: the process ended first, or ``timeout`` seconds passed.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                reply = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise WorkerGoneError(self._gone(f"did not answer within {timeout:.0f} s")) from None
            if reply is None:
                raise WorkerGoneError(self._gone(f"ended with status {self._wait(5)}"))
            if reply.get("id", 0) == self._next:
                return reply

    def _gone(self, what: str) -> str:
        return f"{self.label} (pid {self.pid}) {what}; end of its stderr:\n{self.tail()}"

    def tail(self, chars: int = 4000) -> str:
        """The end of what the process wrote to stderr."""
        text = self._stderr.read_text(errors="replace")
        return "\n".join(f"  [{self.label}] {line}" for line in text[-chars:].splitlines())

    def alive(self) -> bool:
        return self._child.poll() is None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _wait(self, timeout: float) -> int | None:
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_leave(self) -> None:
        """Asks it to end by itself. All processes of a cluster must be asked before one is waited for: they end
        together (jax.distributed has a barrier at its end)."""
        with contextlib.suppress(WorkerGoneError):
            self.ask(op="exit")

    def left(self, timeout: float) -> int | None:
        """Its exit status, or None if it is still there after ``timeout``."""
        return self._wait(timeout)

    def kill(self) -> None:
        """Ends the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                stream.close()
