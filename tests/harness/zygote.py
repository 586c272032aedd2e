"""Workers forked from one process that has imported JAX: they start in a fraction of a second.

The process opens no device and starts no thread before it forks. It answers one request at a time over a socket: `fork` (a
worker's setup, environment and descriptors come with it), `wait` (the exit status of one that has ended). It ends with
its socket, and its children with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_BYTES = 1 << 20
# Forking takes milliseconds, starting (which imports JAX) seconds, on a busy machine many.
_ANSWER_S = 60


class Zygote:
    """The process that forks. Its children have this interpreter and these modules.

    Args:
        environment: variables that are read when JAX is imported; others are given to each child.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_S)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "harness.zygote", str(other.fileno())],
                env=environment,
                pass_fds=[other.fileno()],
            )

    @property
    def dead(self) -> bool:
        """Whether it has ended, or did not answer in time."""
        return self._process.poll() is not None

    def fork(self, request: dict[str, Any], streams: tuple[int, int, int]) -> Forked:
        """Starts a worker.

        Args:
            request: ``setup`` (see `harness.worker.Worker`), ``environment`` (added to the zygote's), ``directory``, and
                where wished ``limits`` (names of `resource` to values), ``network`` (a namespace's path), ``mount`` (a
                path to a size: an empty file system of that size is put there).
            streams: its stdin, stdout and stderr.
        """
        socket.send_fds(self._socket, [json.dumps({"op": "fork", **request}).encode()], streams)
        return Forked(self, self._answer())

    def wait(self, pid: int) -> int:
        """The exit status of a child that has ended; -n for a death by signal n."""
        self._socket.send(json.dumps({"op": "wait", "pid": pid}).encode())
        return self._answer()

    def _answer(self) -> int:
        try:
            answer = self._socket.recv(_BYTES)
        except TimeoutError:
            self._process.kill()  # a late answer would be taken for that to the next request
            self._process.wait(5)
            raise RuntimeError(f"the zygote did not answer within {_ANSWER_S} s") from None
        if not answer:
            raise RuntimeError(f"the zygote ended with status {self._process.wait(5)}")
        return json.loads(answer)


_shared: dict[tuple[tuple[str, str], ...], Zygote] = {}


def shared(environment: tuple[tuple[str, str], ...]) -> Zygote:
    """The one of this process for this environment, which ends when this process does; a new one if that is dead."""
    if environment not in _shared or _shared[environment].dead:
        _shared[environment] = Zygote(dict(environment))
    return _shared[environment]


class Forked:
    """A forked worker, with what `harness.process.Process` needs of a `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it did not come in time.
        """
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"forked worker {self.pid}", timeout or 0.0)
        return status

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._has_ended(timeout):
            self.returncode = self._zygote.wait(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        end = select.poll()  # `select.select` takes no descriptor above 1023, and a long test run has more
        end.register(self._pidfd, select.POLLIN)
        return bool(end.poll(None if timeout is None else timeout * 1000))


# --- in the zygote -----------------------------------------------------------------------------


def _libc(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


def _isolate(request: dict[str, Any]) -> None:
    """Gives this process what the request says of its surroundings."""
    if network := request.get("network"):
        with open(network) as namespace:
            _libc("setns", namespace.fileno(), _CLONE_NEWNET)
    if request.get("mount"):
        _libc("unshare", _CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        for path, size in request["mount"].items():
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    for name, value in request.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Runs a worker in this process, which has just been forked."""
    from harness import worker

    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.chdir(request["directory"])
    os.environ.update(request["environment"])
    _isolate(request)
    sys.argv[1:] = [json.dumps(request["setup"])]
    worker.main()


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Answers requests. Returns what a child is to be, in the child; None at the end of the socket."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _BYTES, 3)
        if not data:
            return None
        request = json.loads(data)
        if request["op"] == "wait":
            control.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])).encode())
            continue
        pid = os.fork()
        if pid == 0:
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(pid).encode())


def main() -> None:
    import jax.numpy  # noqa: F401

    import cases
    import jax_hetccl
    from jax_hetccl import _native  # noqa: F401

    for name in jax_hetccl.__all__:
        getattr(jax_hetccl, name)
    cases.load()
    gc.freeze()  # children leave these objects' pages shared
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"threads do not survive a fork: {tasks}"
    with socket.socket(fileno=int(sys.argv[1])) as control:
        child = _serve(control)
    # In the zygote: children that still run end with this thread (PR_SET_PDEATHSIG).
    if child:
        _become(*child)


if __name__ == "__main__":
    main()
