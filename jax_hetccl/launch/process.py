"""One started process: its group, its pipes, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from jax_hetccl.launch import guard
from jax_hetccl.launch.environment import ProcessPlan
from jax_hetccl.launch.output import LineSplitter

_GUARD = (sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()))


class Child:
    """A running process in a session of its own, so that signals reach its whole group.

    Must be made on the launcher's main thread: the kernel ties "kill when the parent dies" to the thread.

    Args:
        plan: what to start.
        mark: value of the variable by which everything that this launch started can be found again.
    """

    def __init__(self, plan: ProcessPlan, mark: str) -> None:
        self.plan = plan
        self._process = subprocess.Popen(
            [*_GUARD, "exec", str(os.getpid()), "--", *plan.command],
            env={**plan.environ, guard.VARIABLE: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.streams: dict[int, tuple[int, LineSplitter]] = {}  # file descriptor -> (1 or 2, splitter)
        for number, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.streams[pipe.fileno()] = (number, LineSplitter())
        self.pidfd = _pidfd(self.pid)

    def poll(self) -> int | None:
        """The exit status as a shell gives it (128+n for a death by signal n), or None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def killed_by(self) -> int | None:
        """The signal that ended it, if one did."""
        code = self._process.returncode
        return -code if code is not None and code < 0 else None

    def signal(self, number: int) -> None:
        """Sends a signal to its whole group. Does nothing once it has ended."""
        if self._process.poll() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    def kill_group(self) -> None:
        """Kills what it has left behind in its group, once it has ended itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Closes pipes and handles; the process must have ended."""
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class Keeper:
    """The process that cleans up if the launcher itself is killed; see `guard`."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._process = subprocess.Popen(
            [*_GUARD, "keep", mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> list[int]:
        """Kills whatever the launch left running, also what escaped its group.

        Returns the ids that would not die.
        """
        left = guard.kill_marked(self._mark)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return left


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # old kernel: the supervisor polls instead
        return None


def describe(status: int) -> str:
    """`exit status 3` or `killed by SIGKILL (exit status 137)`."""
    if status > 128:
        try:
            return f"killed by {signal.Signals(status - 128).name} (exit status {status})"
        except ValueError:
            pass
    return f"exit status {status}"
