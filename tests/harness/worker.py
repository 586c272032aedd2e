"""One worker process: the oracle, or one process of one cluster.

Requests come as JSON lines on stdin, answers go as JSON lines to the original stdout (everything else that is printed
goes to stderr). End of stdin ends the process at once, whatever it is doing: a test run that dies leaves nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from harness import compiler


def _describe(error: BaseException) -> dict[str, Any]:
    """What a test needs to know about an exception."""
    return {
        "type": type(error).__name__,
        "bases": [f"{t.__module__}.{t.__name__}" for t in type(error).__mro__],
        "message": str(error),
        "trace": "".join(traceback.format_exception(error))[-6000:],
    }


def _requests() -> queue.Queue[dict[str, Any]]:
    """Reads stdin on a thread of its own, so that its end is seen while a case runs."""
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            found.put(json.loads(line))
        os._exit(3)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return found


class Worker:
    """Carries out requests in one process.

    Args:
        setup: ``cluster`` (None for the oracle), ``devices`` of each cluster, ``initialize`` arguments (None: join no
            world; tests of this harness itself), ``quick`` (see `harness.compiler`).
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._cluster: int | None = setup["cluster"]
        self._devices = tuple(setup["devices"])
        self._hetccl: Any = None
        if self._cluster is not None and setup["initialize"] is not None:
            import jax_hetccl

            self._hetccl = jax_hetccl
            jax_hetccl.initialize(**setup["initialize"])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carries out one request; never raises."""
        started, sent = time.monotonic(), self._sent(request)
        faulthandler.dump_traceback_later(request.get("limit", 60), exit=False)
        try:
            reply = getattr(self, "do_" + request["op"])(request)
        except BaseException as error:  # also KeyboardInterrupt: the answer says so
            reply = {"error": _describe(error)}
        finally:
            faulthandler.cancel_dump_traceback_later()
        took = time.monotonic() - started
        return {**reply, "seconds": took, "sent": self._sent(request) - sent, "health": self._health()}

    def _sent(self, request: dict[str, Any]) -> int:
        """Bytes that have left this process in its world; 0 where there is none (any more)."""
        if self._hetccl is None or request["op"] != "case":
            return 0
        try:
            return self._hetccl.world().engine.stats()["bytes_sent"]
        except self._hetccl.HetcclError:
            return 0

    def _health(self) -> dict[str, Any] | None:
        try:
            if self._hetccl is not None:
                self._hetccl.check()
        except Exception as error:
            return _describe(error)
        return None

    def do_case(self, request: dict[str, Any]) -> dict[str, Any]:
        """Runs a case and writes its result; with ``each_device``, says of every device how it ended."""
        import jax

        from harness import results
        from harness.case import CASES, MeshSpec, Program
        from harness.env import Env

        name = request["case"]
        importlib.import_module("cases." + name.split(".")[0])
        case = CASES[name]
        spec = MeshSpec(**{k: _tuples(v) for k, v in request["mesh"].items()}) if request.get("mesh") else case.mesh
        params = request["params"] if request.get("params") is not None else case.params
        devices = tuple(request.get("setup_devices", self._devices))  # the oracle's differ from run to run
        env = Env(self._cluster, devices, spec, request["vma"], request["api"], params)
        tree = case.run(env)
        tree = tree.result() if isinstance(tree, Program) else tree
        if request.get("each_device"):
            return {"devices": _each_device(tree, env)}
        tree = jax.block_until_ready(tree)
        return {"leaves": results.save(tree, env, Path(request["out"]))}

    def do_shutdown(self, request: dict[str, Any]) -> dict[str, Any]:
        """Leaves the world in order; says which native or Python threads of ours are left."""
        if self._hetccl is not None:
            self._hetccl.shutdown()
        return {"threads": _our_threads()}

    def do_initialize(self, request: dict[str, Any]) -> dict[str, Any]:
        """Joins a new world in the same process."""
        self._hetccl.initialize(**request["initialize"])
        return {}

    def do_call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Calls a function of a test's module, ``module:name``; what it returns is the answer."""
        module, _, name = request["call"].partition(":")
        return getattr(importlib.import_module(module), name)(**request.get("arguments", {}))

    def do_ping(self, request: dict[str, Any]) -> dict[str, Any]:
        import jax

        return {"jax": jax.__version__, "python": list(sys.version_info[:2]), "devices": len(jax.devices())}


def _our_threads() -> list[str]:
    """Names of this project's threads that run, Python's and native ones."""
    names = {t.name for t in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.add((task / "comm").read_text().strip())
    return sorted(n for n in names if n.startswith("hetccl"))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _each_device(tree: Any, env: Any) -> dict[str, dict[str, Any] | None]:
    """How the result ended on each device of this process: None, or the error."""
    import jax

    ends: dict[str, dict[str, Any] | None] = {}
    positions = env.positions()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            at = str(positions[shard.device])
            ends.setdefault(at, None)
            try:
                shard.data.block_until_ready()
            except Exception as error:
                ends[at] = ends[at] or _describe(error)
    return ends


def main() -> None:
    setup = json.loads(sys.argv[1])
    if setup["quick"]:
        compiler.hurry()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    requests = _requests()
    worker: Worker | None = None

    def send(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply) + "\n")

    try:
        worker = Worker(setup)
        send({"ready": True, **worker.do_ping({})})
    except BaseException as error:
        send({"error": _describe(error)})
    while True:
        request = requests.get()
        if request["op"] == "exit":
            return
        send(
            {
                "id": request["id"],
                **(
                    worker.answer(request)
                    if worker
                    else {"error": {"type": "NotStarted", "bases": [], "message": "", "trace": ""}}
                ),
            }
        )


if __name__ == "__main__":
    main()
