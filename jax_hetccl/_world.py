"""The world: who is there, and the resources that connect them."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jax_hetccl import _compat, _limits, forking, island, tables
from jax_hetccl._config import Config, ask_for_queues, growing_memory, resolve
from jax_hetccl._engines import EngineFactory, ensure_tls, native_engine, native_segment
from jax_hetccl._errors import HetcclError, error_from
from jax_hetccl.connect import Channels, SegmentFactory, rdma_options, staging
from jax_hetccl.failure import FailureMonitor
from jax_hetccl.gpus import Gpu
from jax_hetccl.island import ClusterInfo
from jax_hetccl.rendezvous import channels, coordinator
from jax_hetccl.rendezvous.acceptor import Acceptor
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.join import join
from jax_hetccl.rendezvous.member import narrowed
from jax_hetccl.rendezvous.regroup import AHEAD
from jax_hetccl.routes import Equipment, Routes

_log = logging.getLogger(__name__)

# How long an orderly end waits for exchanges that are still under way.
_DRAIN_S = 10.0
_CLOSE_S = 3.0
# How long members that have met may take at least to tell of their devices.
_DEVICES_S = 5.0

Meet = Callable[[Config, dict[str, Any]], ControlPlane]


class World:
    """All clusters, as one process sees them. Made by `initialize`; attributes never change.

    Attributes:
      epoch: 64-bit identity of this world; another one after every `initialize`.
      config: the settings.
      job: the settings that `initialize` was given; another list of clusters than in `config` if some are lost.
      clusters: all clusters in order.
      cluster: index of this process's cluster.
      process: index of this process in its cluster.
      axes: spanning axes and their global size, None where it is agreed at the first trace.
      control: messages between all processes.
      engine: the native engine, which owns the data channels.
      size: number of ranks (devices) in all clusters.
      routes: the ports of all ranks for RDMA.
    """

    def __init__(
        self,
        config: Config,
        control: ControlPlane,
        clusters: tuple[ClusterInfo, ...],
        owner: dict[int, int],
        engine: Any,
        acceptor: Acceptor,
        routes: Routes,
        make_segment: SegmentFactory | None = None,
        job: Config | None = None,
    ) -> None:
        """Takes over the resources; `initialize` is how to get a world."""
        self.epoch = control.epoch
        self.config = config
        self.job = job or config
        self.clusters = clusters
        self.cluster = config.cluster
        self.process = config.process
        self.axes: dict[str, int | None] = dict(config.axes)
        self.control = control
        self.engine = engine
        self.size = len(owner)
        self._listening = forking.listening(config, control)
        self._owner = owner
        first = clusters[self.cluster].first_rank
        self._rank_of_id = {device.id: first + i for i, device in enumerate(island.devices())}
        self._closed = threading.Event()
        self._monitor = FailureMonitor(engine, control, self._under_way, owner)
        self.routes = routes
        opener = channels.Opener(config, control, routes.link)
        ports = {i: rdma_options(config, port) for i, port in enumerate(routes.ports(control.me)) if not port.why_not}
        self._channels = Channels(
            engine,
            control,
            opener,
            acceptor,
            owner,
            self._monitor.report,
            make_segment,
            self._staged,
            ports,
            config.tls,
        )
        self._monitor.start()

    def rank_of_device(self, device: island.Device) -> int:
        """Returns the world rank of a device of this cluster."""
        try:
            return self._rank_of_id[device.id]
        except KeyError:
            raise ValueError(f"{device} is not a device of cluster {self.config.cluster_name}") from None

    def rank_name(self, rank: int) -> str:
        """Returns a rank as people see it, such as `right/0 rank 3`."""
        return f"{self.control.members[self._owner[rank]].name} rank {rank}"

    def process_of_rank(self, rank: int) -> tuple[int, int]:
        """Returns `(cluster index, process index)` of the process that owns `rank`."""
        member = self.control.members[self._owner[rank]]
        return member.cluster, member.process

    def member_of_rank(self, rank: int) -> int:
        """Returns the index, among all processes, of the one that owns `rank`."""
        return self._owner[rank]

    def cluster_of_rank(self, rank: int) -> int:
        """Returns the index of the cluster that `rank` belongs to."""
        return self.control.members[self._owner[rank]].cluster

    def ranks_of_cluster(self, cluster: int) -> range:
        """Returns the ranks of a cluster."""
        info = self.clusters[cluster]
        return range(info.first_rank, info.first_rank + info.devices)

    def _under_way(self, member: int) -> str:
        """A line about a message that is queued or moving, with `member` if there is one; empty if there is none."""
        waits = [] if self.engine is None else self.engine.waits()
        with_it = [text for rank, _, text in waits if self._owner.get(rank) == member]
        return next(iter(with_it or [text for *_, text in waits]), "")

    def _staged(self, *ranks: int) -> tuple[int, int]:
        return staging(self.config, [self.clusters[self.cluster_of_rank(rank)].platform for rank in ranks])

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this process's devices."""
        return tuple(rank for rank, member in sorted(self._owner.items()) if member == self.control.me)

    def ensure_channels(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Opens the channels `(src_rank, dst_rank)` whose source is local; others are ignored.

        Idempotent, thread-safe, bounded. Incoming channels are opened by their senders and taken in
        the background.

        Raises:
          RendezvousError: a peer cannot be reached.
          HetcclError: the world has failed or is shut down.
        """
        self.check()
        self._channels.ensure(pairs)

    def transports(self) -> dict[tuple[int, int], str]:
        """Returns the transport of every open channel `(src, dst)` of this process."""
        return self._channels.transports()

    @property
    def failure(self) -> HetcclError | None:
        """The world's first error, or None while all is well."""
        if self._monitor.error is None and self.engine is not None and (adopted := self.engine.failure()) is not None:
            return error_from(adopted.kind, adopted.message)  # the clusters have not agreed on one yet
        return self._monitor.error

    def fail(self, kind: str, message: str) -> None:
        """Reports a failure to the whole world, for example one noticed while tracing."""
        self._monitor.report(kind, message)

    def watch(self, look: Callable[[], None]) -> None:
        """Has ``look`` called a few times a second while the world is well; it calls :meth:`fail` if it is not."""
        self._monitor.watch(look)

    def check(self) -> None:
        """Raises the world's first error, if it has failed; also if it is shut down."""
        if self.failure:
            raise type(self.failure)(*self.failure.args)
        if self._closed.is_set():
            raise HetcclError("this world has been shut down; call hetccl.initialize() again")

    def close(self) -> None:
        """Ends this process's part of the world in an orderly way; bounded, idempotent."""
        if self._closed.is_set():
            return
        self._drain()
        self._closed.set()
        self._monitor.close()
        with _logged("closing the acceptor"):
            self._channels.close()
        if self.engine is not None:
            # The handlers keep the engine until it has closed: it answers what is pending, with no engine they fail.
            with _logged("closing the engine"):
                self.engine.close(_CLOSE_S)
        with _logged("taking channels"):
            self._channels.join()
        _use_engine(None)
        island_members = [m.index for m in self.control.members if m.cluster == self.cluster]
        if self.failure and any(self.control.broken(member) for member in island_members):
            island.abandon()
        with _logged("closing the control plane"):
            self.control.close(_CLOSE_S)

    def forget(self) -> None:
        """What becomes of it in a forked child: nothing. The parent's world goes on."""
        self._closed.set()
        forking.release(self, self._listening)

    def _drain(self) -> None:
        """Lets exchanges finish that were dispatched but not waited for."""
        deadline = time.monotonic() + min(_DRAIN_S, self.config.timeout)
        while self.engine is not None and not self.failure and time.monotonic() < deadline:
            if not self.engine.stats().get("in_flight", 0):
                return
            time.sleep(0.005)

    def __repr__(self) -> str:
        parts = ", ".join(f"{c.name}: {c.devices} {c.platform}" for c in self.clusters)
        return f"World({self.config.member_name} of [{parts}], epoch={self.epoch:016x})"

    def table(self) -> str:
        """Returns the clusters as a table for people."""
        routed = self.engine.stats()["routed"] if self.engine is not None else []
        return tables.world(f"world {self.epoch:016x}", self.clusters, self.cluster, self.routes.choices, routed)


_lock = threading.RLock()
_current: World | None = None


def initialize(
    coordinator: str | tuple[str, int] | None = None,
    clusters: str | Mapping[str, int] | Sequence[tuple[str, int]] | None = None,
    cluster: str | int | None = None,
    process: int | None = None,
    secret: str | None = None,
    axes: str | Sequence[str] | Mapping[str, int | None] | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    **settings: Any,
) -> World:
    """Joins this process with all clusters. Call it once, before anything else that uses JAX devices.

    Every argument can come from the environment instead (`HETCCL_COORDINATOR` for `coordinator`, …);
    an argument wins. Processes of one cluster are joined with `jax.distributed` unless that has been
    done already.

    Args:
      coordinator: `host:port` where all processes meet; the first process of the first cluster hosts it
        unless `hetccl coordinator` runs there.
      clusters: `"left:1,right:2"` or `{"left": 1, "right": 2}`: names and numbers of processes, in rank
        order, the same everywhere.
      cluster: this process's cluster, by name or index.
      process: this process's index in its cluster.
      secret: the job's secret; needed unless the coordinator is a loopback address.
      axes: spanning axes: `("data",)`, or `{"data": 8}` if the global size is known.
      local_device_ids: passed on to `jax.distributed.initialize`.
      **settings: `timeout`, `arrival_timeout`, `join_timeout`, `transport`, `socket_ifname`, `ib_hca`, `ib_gid_index`,
        `ib_tc`, `ib_timeout`, `ib_retry_cnt`, `ib_odp`, `port_range`, `bucket_mb`, `stream_sync`, `on_integer_failure`,
        `slot_kb`, `slots`, `checksum`, `tls`, `keep_memory_mb`, `secret_file`, `coordinator_external`.

    Returns:
      The world.

    Raises:
      ConfigError: settings are missing or wrong; lists all problems and all valid settings.
      RendezvousError: not everybody came; names who is missing.
      AgreementError: the processes of a cluster do not form the JAX world that the settings describe.

    Example:
      >>> import jax_hetccl as hetccl
      >>> hetccl.initialize("localhost:7000", {"left": 1, "right": 1}, "left", axes=("data",))  # doctest: +SKIP
      World(left/0 of [left: 1 cpu, right: 1 cpu], epoch=…)
    """
    config = resolve(
        coordinator=coordinator,
        clusters=clusters,
        cluster=None if cluster is None else str(cluster),
        process=process,
        secret=secret,
        axes=axes,
        **settings,
    )
    global _current
    with _lock:
        if _current is not None:
            raise HetcclError(f"initialize: already in {_current}; call hetccl.shutdown() first")
        _limits.ensure_descriptors(config.member_name, len(config.member_names) - 1)
        if config.tls:
            ensure_tls(config.member_name)
        with _limits.explained(f"{config.member_name} cannot join"):
            _current = form(config, native_engine, native_segment, local_device_ids)
        atexit.register(shutdown)
        return _current


def reform(meet: Meet, known_s: float) -> World:
    """Replaces this process's world by one that `meet` joins.

    If that fails before all members of the new world know each other's devices, the old world is left as it was; an
    error after that leaves none.

    Args:
      meet: see `form`.
      known_s: how many seconds members that have met may take to tell of their devices.
    """
    global _current
    with _lock:
        old = world()

        def retire(control: ControlPlane) -> None:
            global _current
            hosts = control.inherit(old.control)
            with _logged("telling who goes on"):  # to those who may not have come as far
                old.control.publish(AHEAD, [member.name for member in control.members])
            _current = None
            old.close()
            if control.me == 0 and not hosts:
                with _logged("hosting the coordinator for clusters that come back"):
                    control.host(coordinator.host(old.job))

        _limits.ensure_descriptors(old.job.member_name, len(old.job.member_names) - 1)
        with _limits.explained(f"{old.job.member_name} cannot go on"):
            _current = form(old.job, native_engine, native_segment, meet=meet, retire=retire, known_s=known_s)
        return _current


def form(
    job: Config,
    engine_factory: EngineFactory,
    make_segment: SegmentFactory | None = None,
    local_device_ids: Any = None,
    *,
    meet: Meet = join,
    retire: Callable[[ControlPlane], None] = lambda control: None,
    known_s: float | None = None,
) -> World:
    """Joins the world that `job` describes; `initialize` without the process-wide state.

    Args:
      job: the settings.
      engine_factory: makes the engine once the control plane stands.
      make_segment: makes the shared memory of a shm channel; None: tcp only.
      local_device_ids: see `initialize`.
      meet: how to get the control plane of the new world; it may have fewer clusters than `job`.
      retire: ends the world that this one replaces, when the new one's members know everything about each other.
      known_s: how many seconds members that have met may take to tell of their devices; None: what `meet` left of
        `job.join_timeout`.
    """
    deadline = time.monotonic() + job.join_timeout
    # Before anything opens the devices:
    island.keep_memory(job.keep_memory_mb)
    stuck = ask_for_queues(_compat.devices_in_use())
    listening, reach = channels.listeners(job)
    with contextlib.ExitStack() as undo:  # if anything fails, the latest first, as `World.close` does
        acceptor = Acceptor(listening)
        undo.callback(_end, "taking channels", acceptor.join)
        undo.callback(_end, "closing the acceptor", acceptor.close)
        versions = {name: _version(name) for name in ("jax", "jax_hetccl")}
        equipment = Equipment.of(job)
        record = {
            **reach,
            "rdma": equipment.record(),
            "versions": versions,
            "python": sys.version.split()[0],
            "agree": job.agree,
        }
        control = meet(job, record)
        if known_s is not None:
            deadline = time.monotonic() + known_s
        undo.callback(_end, "closing the control plane", control.close, 1.0)
        config = narrowed(job, control.members)
        island.join_island(config, control, local_device_ids, deadline - time.monotonic())
        island.keep_memory(config.keep_memory_mb)
        mine = island.describe_devices()
        mine["nics"] = equipment.distances(len(mine["positions"]), [Gpu(**gpu) for gpu in mine["gpus"]])
        control.publish("devices", mine)
        left = max(deadline - time.monotonic(), _DEVICES_S)
        devices = control.collect("devices", timeout=left)
        clusters, owner = island.assemble(control, devices)
        routes = Routes(control.members, owner, {index: record["nics"] for index, record in devices.items()})
        if problem := stuck.get(clusters[config.cluster].platform):
            _log.warning("%s: %s", config.member_name, problem)
        if clusters[config.cluster].platform != "cpu" and (problem := growing_memory()):
            _log.warning("%s: %s", config.member_name, problem)
        retire(control)
        engine = engine_factory(config, control, frozenset(c.platform for c in clusters))
        if engine is not None:
            undo.callback(_end, "closing the engine", engine.close, _CLOSE_S)
        undo.callback(_end, "closing the acceptor", acceptor.close)  # before the engine it hands channels to
        world = World(config, control, clusters, owner, engine, acceptor, routes, make_segment, job)
        undo.callback(_end, "closing the failure monitor", world._monitor.close)
        if engine is not None:
            _introduce(world)
            _use_engine(engine)
        undo.pop_all()
    return world


def _introduce(world: World) -> None:
    """Tells the engine who is who."""
    for rank in range(world.size):
        world.engine.set_rank_name(rank, world.rank_name(rank))
    platform = island.XLA_PLATFORMS[world.clusters[world.cluster].platform]
    for device in jax.local_devices():
        try:
            world.engine.set_local_device(island.ordinal(device), world.rank_of_device(device), platform)
        except RuntimeError as error:
            raise HetcclError(f"{world.config.member_name} cannot use {device} for exchanges: {error}") from error


def _use_engine(engine: Any) -> None:
    native = sys.modules.get("jax_hetccl._native")
    if native is not None:
        native.set_engine(engine)


def shutdown() -> None:
    """Leaves the world in an orderly way. Does nothing without a world; never hangs.

    `jax.distributed`, if `initialize` started it, stays up: it belongs to the process.
    """
    global _current
    with _lock:
        ending, _current = _current, None
    if ending is not None:
        atexit.unregister(shutdown)
        ending.close()


def _forget() -> None:
    """In a forked child, which has none of the threads, and where another thread may have held any lock."""
    global _current, _lock
    _lock = threading.RLock()
    parents, _current = _current, None
    if parents is not None:
        atexit.unregister(shutdown)
        parents.forget()


os.register_at_fork(after_in_child=_forget)


def world() -> World:
    """Returns this process's world. Raises HetcclError if there is none."""
    if _current is None:
        raise HetcclError("there is no world: call hetccl.initialize() first")
    return _current


def current() -> World | None:
    """Returns this process's world, or None."""
    return _current


def check() -> None:
    """Raises the world's first error if any cluster has failed; else does nothing."""
    world().check()


def _version(distribution: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return "unknown"


@contextlib.contextmanager
def _logged(what: str):
    try:
        yield
    except Exception:
        _log.exception("%s", what)


def _end(what: str, close: Callable[..., None], *args: Any) -> None:
    """Closes something without hiding the error that led here."""
    with _logged(what):
        close(*args)
