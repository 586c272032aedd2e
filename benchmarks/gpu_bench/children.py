"""Child processes that answer one JSON line for each request; whatever goes wrong ends within a bound."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent.parent


class ChildError(Exception):
    """A child ended, hung, or answered with an error; the text says which and ends with its stderr."""


class Child:
    """One process running a module of this package.

    Args:
      label: for errors.
      module: what it runs, e.g. ``gpu_bench.member``.
      environ: variables on top of ours.
    """

    def __init__(self, label: str, module: str, environ: Mapping[str, str]) -> None:
        self.label = label
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: the installed package, not a source tree in this folder
            env={**os.environ, "PYTHONPATH": path, **environ},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, bufsize=1,
        )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"read-{label}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("answer "):  # libraries print lines of their own
                self._answers.put(json.loads(line.removeprefix("answer ")))
        self._answers.put(None)

    def ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended: `answer` says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        try:
            reply = self._answers.get(timeout=max(timeout, 0.01))
        except queue.Empty:
            raise ChildError(f"{self.label} did not answer in time\n{self.tail()}") from None
        if reply is None:
            raise ChildError(f"{self.label} ended with status {self._process.wait(5)}\n{self.tail()}")
        if "error" in reply:
            raise ChildError(f"{self.label}: {reply['error']}")
        return reply

    def tail(self) -> str:
        """The end of what it wrote to stderr."""
        self._stderr.seek(0)
        return self._stderr.read()[-2500:]

    def end(self, grace: float) -> None:
        """Closes its stdin, which asks it to leave, and kills it after ``grace`` seconds."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()


class Group:
    """Children that work together."""

    def __init__(self, children: Sequence[Child], timeout: float) -> None:
        """Waits until all are ready."""
        self.children = list(children)
        self.facts = self._answers(timeout)

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        return [c.answer(deadline - time.monotonic()) for c in self.children]

    def ask(self, timeout: float, *requests: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One request for each child, or one for all; their answers."""
        each = requests * len(self.children) if len(requests) == 1 else requests
        for child, request in zip(self.children, each, strict=True):
            child.ask(request)
        return self._answers(timeout)

    def times(self, timeout: float, *requests: Mapping[str, Any]) -> list[float]:
        """Seconds of each repetition: as long as in the slower child."""
        answers = self.ask(timeout, *requests)
        return [max(pair) for pair in zip(*(a["times"] for a in answers), strict=True)]


@contextlib.contextmanager
def group(module: str, environs: Sequence[Mapping[str, str]], timeout: float = 90.0) -> Iterator[Group]:
    """Starts one child for each environment and ends all of them afterwards."""
    children = [Child(f"{module} {i}", module, e) for i, e in enumerate(environs)]
    failed = True
    try:
        yield Group(children, timeout)
        failed = False
    finally:
        # They leave together (some libraries have a barrier at their end): ask all, then wait.
        threads = [threading.Thread(target=c.end, args=(1.0 if failed else 20.0,)) for c in children]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


def serve(ready: Mapping[str, Any], handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: says it is ready, then answers until stdin ends."""
    print("answer " + json.dumps(ready), flush=True)
    for line in sys.stdin:
        try:
            reply = handle(json.loads(line))
        except Exception as error:  # the parent decides what becomes of it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print("answer " + json.dumps(reply), flush=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
