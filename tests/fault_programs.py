"""What members of a world do while something goes wrong: called in worker processes, see `harness.worker`."""

from __future__ import annotations

import atexit
import concurrent.futures
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jax_hetccl as hetccl


def facts() -> dict[str, Any]:
    """What a process holds that could be left behind: descriptors, memory shared with others, threads of ours."""
    from harness.worker import _our_threads

    gc.collect()
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the listing's own
            continue
    maps = Path("/proc/self/maps").read_text()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(descriptors),
        "kinds": sorted(d.partition(":")[0] for d in descriptors),
        # Ours are called so; XLA has some for its compiled code.
        "memfds": sum("memfd:hetccl" in d for d in descriptors) + maps.count("memfd:hetccl"),
        "threads": _our_threads(),
        "tasks": len(os.listdir("/proc/self/task")),
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20),
    }


class Programs:
    """psum, all_gather and sync of values that say which step, rank and cluster they are of.

    Args:
        elements: of each rank's operand.
    """

    def __init__(self, elements: int) -> None:
        world = hetccl.world()
        self.ranks, self.clusters = world.size, len(world.clusters)
        self.cluster = world.cluster
        self.local = list(world.ranks_of_cluster(world.cluster))
        self.elements = elements
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        rows = PartitionSpec("data")

        def reduce_and_gather(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return lax.psum(x, "data"), lax.all_gather(x[:, : elements // 4], "data", tiled=True)

        mapped = jax.shard_map(reduce_and_gather, mesh=mesh, in_specs=rows, out_specs=(rows, rows))
        self._collect = jax.jit(mapped)
        self._sync = jax.jit(lambda tree: hetccl.sync(tree, op="sum"))
        self._sharding = jax.sharding.NamedSharding(mesh, rows)
        self._whole = jax.sharding.NamedSharding(mesh, PartitionSpec())

    def start(self, step: int) -> Any:
        """Dispatches one step and returns what it will bring."""
        mine = np.array([[step * (rank + 1)] for rank in self.local], np.float32)
        shape = (len(self.local), self.elements)
        whole = np.broadcast_to(mine, shape)
        x = jax.make_array_from_callback(shape, self._sharding, lambda index: np.ascontiguousarray(whole[index]))
        values = {"w": np.full(self.elements, step * (self.cluster + 1), np.float32), "n": np.int32(step)}
        tree = jax.tree.map(lambda v: jax.make_array_from_callback(v.shape, self._whole, lambda i: v[i]), values)
        return self._collect(x), self._sync(tree)

    def wrong(self, step: int, result: Any) -> list[str]:
        """What is wrong with the results of a step."""
        (total, gathered), synced = jax.tree.map(_local, result)
        ranks = np.arange(1, self.ranks + 1, dtype=np.float32) * step
        per_rank = np.repeat(ranks[:, None], self.elements // 4, axis=1)
        expected = {
            "psum": (total, np.full((len(total), self.elements), ranks.sum(), np.float32)),
            "all_gather": (gathered, np.tile(per_rank, (len(gathered) // self.ranks, 1))),
            "sync": (synced["w"], np.full(self.elements, step * sum(range(1, self.clusters + 1)), np.float32)),
            "sync of integers": (synced["n"], np.int32(step * self.clusters)),
        }
        return [name for name, (got, want) in expected.items() if not np.array_equal(got, want)]


def _local(array: jax.Array) -> np.ndarray:
    """The part of an array that this process has."""
    if array.is_fully_replicated:
        return np.asarray(array.addressable_shards[0].data)
    return np.concatenate([np.asarray(s.data) for s in array.addressable_shards])


def stream(steps: int = 10**9, elements: int = 1 << 18, pause: float = 0.0, tell: str = "") -> dict[str, Any]:
    """Runs steps until one fails, and checks the result of each.

    Args:
        steps: how many at most.
        elements: see `Programs`.
        pause: seconds between two steps.
        tell: a file that is made when the first step is done.

    Returns:
        ``steps`` that completed, ``wrong`` results, and of the error its ``text``, what `check` raised (``kind``,
        ``check``) and the time ``at`` which both were here, on the clock that all processes of a machine share.
    """
    wrong: list[str] = []
    done = 0
    try:
        programs = Programs(elements)
        for step in range(1, steps + 1):
            result = jax.block_until_ready(programs.start(step))
            wrong += [f"step {step}: {name}" for name in programs.wrong(step, result)]
            done += 1
            if tell and step == 1:
                Path(tell).touch()
            time.sleep(pause)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"steps": done, "wrong": wrong, "text": text, **checked(), "at": time.monotonic()}
    return {"steps": done, "wrong": wrong, "text": "", "kind": "", "check": "", "at": time.monotonic()}


def checked(within: float = 5.0) -> dict[str, str]:
    """What `hetccl.check` raises, for which it waits: its class and its text."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            hetccl.check()
        except hetccl.HetcclError as error:
            return {"kind": type(error).__name__, "check": str(error)}
        time.sleep(0.01)
    return {"kind": "", "check": ""}


class _Plain:
    """A plain TCP connection for each direction, to compare with."""

    def __init__(self, address: str, port: int, first: bool) -> None:
        if first:
            with socket.create_server((address, port)) as server:
                self._out, self._in = server.accept()[0], server.accept()[0]
        else:
            end = time.monotonic() + 30
            while True:
                try:
                    self._in = socket.create_connection((address, port), timeout=5)
                    break
                except OSError:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            self._out = socket.create_connection((address, port), timeout=5)
        for sock in (self._out, self._in):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(60)

    def meet(self) -> None:
        """Returns at about the same time at both ends."""
        self._out.sendall(b"!")
        assert self._in.recv(1) == b"!"

    def swap(self, nbytes: int) -> None:
        """Sends so many bytes and receives as many."""
        data, into = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            sent = pool.submit(self._out.sendall, data)
            got = 0
            while got < nbytes:
                count = self._in.recv_into(into[got:])
                assert count, "the plain stream ended"
                got += count
            sent.result()
        self.meet()

    def close(self) -> None:
        self._out.close()
        self._in.close()


def goodput(address: str, port: int, first: bool, nbytes: int, rounds: int) -> dict[str, Any]:
    """Exchanges arrays with the other cluster, and as many bytes over plain TCP connections, by turns.

    Returns:
        ``wrong`` results, and seconds of each round: ``ours``, ``plain``; ``bytes`` that each moved one way.
    """
    world = hetccl.world()
    elements = nbytes // 4
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    total = jax.jit(jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=rows, out_specs=rows))
    operands = [np.random.default_rng(seed).integers(-1000, 1000, (1, elements)).astype(np.float32) for seed in (0, 1)]
    mine, expected = jnp.asarray(operands[world.cluster]), operands[0] + operands[1]
    plain = _Plain(address, port, first)
    found: dict[str, Any] = {"wrong": [], "ours": [], "plain": [], "bytes": 0}
    try:
        for turn in range(rounds + 1):  # the first one also compiles and connects
            plain.meet()
            before = world.engine.stats()["bytes_sent"]
            started = time.monotonic()
            result = np.asarray(total(mine))
            plain.meet()
            ours = time.monotonic() - started
            found["bytes"] = world.engine.stats()["bytes_sent"] - before
            if not np.array_equal(result, expected):
                found["wrong"].append(turn)
            plain.meet()
            started = time.monotonic()
            plain.swap(found["bytes"])
            if turn:
                found["ours"].append(ours)
                found["plain"].append(time.monotonic() - started)
    finally:
        plain.close()
    return found


def forked(sleep: float) -> dict[str, Any]:
    """Forks while the world runs. The child ends as an interpreter ends, or sleeps first.

    Returns:
        ``pid`` of the child, its ``status`` and ``seconds`` if it did not sleep, and the world's ``sockets`` that it had.
    """
    read, write = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, b"%d" % _connections())
            assert hetccl.HetcclError and _no_world()
            time.sleep(sleep)
            atexit._run_exitfuncs()
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    answer: dict[str, Any] = {"pid": pid, "sockets": int(os.read(read, 16))}
    os.close(read)
    if not sleep:
        answer["status"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {**answer, "took": time.monotonic() - started}


def _connections() -> int:
    """Sockets of this process that have a name: connected, or listening."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(entry))
        except OSError:
            continue
        try:
            with socket.socket(fileno=copy) as sock:
                found += sock.family in (socket.AF_INET, socket.AF_INET6) or bool(sock.getsockname())
        except OSError:
            os.close(copy)
    return found


def _no_world() -> bool:
    try:
        hetccl.world()
    except hetccl.HetcclError:
        return True
    return False


def dispatch() -> dict[str, Any]:
    """Starts steps that nobody waits for; the process then ends."""
    programs = Programs(1 << 16)
    jax.block_until_ready(programs.start(1))
    _left.extend(programs.start(step) for step in (2,))
    return {}


_left: list[Any] = []


def leave(status: int, after: int) -> dict[str, Any]:
    """Ends this process by `os._exit` behind some steps, in the middle of another one."""
    programs = Programs(1 << 18)
    for step in range(1, after + 1):
        jax.block_until_ready(programs.start(step))
    programs.start(after + 1)
    os._exit(status)


def raising(in_program: bool) -> dict[str, Any]:
    """A step in which the user's own code raises, beside a step of the other clusters that goes on."""
    programs = Programs(1 << 10)
    jax.block_until_ready(programs.start(1))

    def raise_it(value: Any) -> Any:
        raise ValueError("by the user")

    try:
        if in_program:
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(raise_it, shape, x))(jnp.float32(1)))
        else:
            raise_it(0)
    except Exception as error:
        assert "by the user" in str(error), error
    result = jax.block_until_ready(programs.start(2))
    return {"wrong": programs.wrong(2, result), "failed": str(hetccl.world().failure or "")}


def two_threads(steps: int) -> dict[str, Any]:
    """Two threads, each with a program over a spanning axis of its own."""
    errors: list[str] = []
    done = {"data": 0, "other": 0}

    def run(axis: str, operation: Any) -> None:
        mesh = jax.make_mesh((jax.device_count(),), (axis,), axis_types=(AxisType.Auto,))
        rows = PartitionSpec(axis)
        f = jax.jit(jax.shard_map(lambda x: operation(x, axis), mesh=mesh, in_specs=rows, out_specs=rows))
        ranks = np.arange(1, hetccl.world().size + 1, dtype=np.float32)
        mine = ranks[list(hetccl.world().ranks_of_cluster(hetccl.world().cluster))]
        for step in range(1, steps + 1):
            got = np.asarray(f(jnp.tile((mine * step)[:, None], (1, 5000))))
            expected = (ranks * step).sum() if operation is lax.psum else (ranks * step).max()
            if not (got == expected).all():
                errors.append(f"{axis} step {step}: {got[0, 0]} instead of {expected}")
            done[axis] = step

    def guarded(axis: str, operation: Any) -> None:
        try:
            run(axis, operation)
        except Exception as error:
            errors.append(f"{axis}: {error}")

    threads = [threading.Thread(target=guarded, args=pair) for pair in (("data", lax.psum), ("other", lax.pmax))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return {"errors": errors, "done": done, "alive": [t.name for t in threads if t.is_alive()]}


def cycles(count: int) -> dict[str, Any]:
    """Leaves the world and joins another one, again and again, with an exchange in each; what grew behind a tenth of it."""
    early: dict[str, Any] = {}
    for turn in range(count):
        hetccl.shutdown()
        hetccl.initialize(axes=("data",))
        _exchange(1)
        if turn == count // 10:
            early = facts()
    return {"early": early, "late": facts()}


def many(count: int) -> dict[str, Any]:
    """So many collectives, in programs of a hundred each; what grew behind a tenth of them."""
    run = _exchange(100)
    early: dict[str, Any] = {}
    for turn in range(count // 100):
        run()
        if turn == count // 1000:
            early = facts()
    return {"early": early, "late": facts()}


def _exchange(times: int) -> Callable[[], None]:
    """Runs a program of so many collectives, and checks its result; returns what runs it again."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")

    def loop(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda i, c: lax.pmax(c, "data") + x * 0, x)

    f = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=rows, out_specs=rows))
    x = jnp.full((jax.device_count(), 256), hetccl.world().cluster + 1.0)

    def run() -> None:
        assert (np.asarray(f(x)) == len(hetccl.world().clusters)).all()

    run()
    return run
