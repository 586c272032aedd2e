"""What the clusters agree on before a program runs: the meshes with a spanning axis.

For every such mesh that is its :class:`MeshView`: the axis' local sizes and which rank sits where. Each process
publishes its own the first time it traces over the mesh and waits, bounded, for one process of every other cluster.
After that nothing waits: not tracing, not lowering, not compiling again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_hetccl import _compat
from jax_hetccl._compat import AnyMesh
from jax_hetccl._errors import AgreementError, RendezvousError, UnsupportedError
from jax_hetccl._world import World
from jax_hetccl.exchange import fingerprint

log = logging.getLogger(__name__)

# A wait that is longer than this is worth a line and a look at what the others have instead.
_LOOK_S = 3.0
_NOTICE = "waiting for the other clusters to trace over %s; a program of one cluster alone goes inside hetccl.local()"

# An axis over every device of the world, for jax_hetccl's own programs. It needs no agreement.
WORLD_AXIS = "hetccl_world"


def world_mesh() -> jax.sharding.Mesh:
    """This cluster's devices, in rank order, along :data:`WORLD_AXIS`."""
    devices = sorted(jax.devices(), key=lambda d: d.id)
    return jax.sharding.Mesh(np.asarray(devices), (WORLD_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


@dataclasses.dataclass(frozen=True)
class MeshView:
    """A mesh with a spanning axis, as all clusters see it.

    Attributes:
      names: the mesh's axis names.
      axis: the one that spans.
      shapes: the mesh's sizes in each cluster; they differ along ``axis`` only.
      ranks: the world ranks in each cluster's mesh, an array of that shape.
      cluster: which of them is ours.
    """

    names: tuple[str, ...]
    axis: str
    shapes: tuple[tuple[int, ...], ...]
    ranks: tuple[np.ndarray, ...]
    cluster: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The spanning axis' local size in each cluster."""
        at = self.names.index(self.axis)
        return tuple(shape[at] for shape in self.shapes)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def offset(self) -> int:
        """The global index of our first rank along the spanning axis."""
        return sum(self.sizes[: self.cluster])

    @property
    def key(self) -> str:
        """Names this view; equal in all clusters."""
        return f"{fingerprint((self.names, self.axis, [r.tolist() for r in self.ranks])):016x}"

    def lanes(self, axes: Sequence[str]) -> list[tuple[tuple[int, ...], ...]]:
        """The ranks that reduce together over ``axes``: for each lane, for each cluster, its members.

        Members are in row-major order of ``axes`` as given, as lax orders a local reduce-scatter's pieces.
        """
        where = [self.names.index(a) for a in axes]
        per_cluster = []
        for ranks in self.ranks:
            front = np.moveaxis(ranks, where, range(len(where)))
            members = math.prod(front.shape[: len(where)])
            per_cluster.append(front.reshape(members, -1).T)
        return [tuple(tuple(int(r) for r in c[lane]) for c in per_cluster) for lane in range(len(per_cluster[0]))]


class Agreement:
    """Agrees with the other clusters on meshes and remembers the result. Thread-safe."""

    def __init__(self, world: World):
        self._world = world
        self._lock = threading.Lock()
        self._views: dict[Any, concurrent.futures.Future[MeshView]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._published: dict[str, Mapping[str, Any]] = {}  # our meshes, by key
        self._theirs: dict[tuple[int, str], Mapping[str, Any]] = {}  # the others', by member and key
        self._devices: dict[Any, np.ndarray] = {}  # the last concrete mesh of each shape
        world.control.subscribe("mesh/", self._note)

    def spans(self, name: object) -> bool:
        """Whether an axis of that name spans clusters."""
        return name == WORLD_AXIS or name in self._world.axes

    def spanning_axis(self, names: Sequence[object]) -> str | None:
        """The axis of a mesh that spans; an error if there are several."""
        spanning = [str(n) for n in names if self.spans(n)]
        if len(spanning) > 1:
            raise AgreementError(
                f"the mesh axes {spanning} all span clusters; one mesh can have one spanning axis. "
                "Reduce over a mesh with one of them, or name only one in initialize(axes=...)."
            )
        return spanning[0] if spanning else None

    def view(self, mesh: AnyMesh) -> MeshView:
        """The agreed view of a mesh; the first call for a mesh waits for the other clusters."""
        key = (tuple(mesh.axis_names), tuple(mesh.axis_sizes))
        devices = self.devices(mesh)
        with self._lock:
            agreed, mine = self._views.get(key), concurrent.futures.Future()
            if agreed is None:
                self._views[key] = mine
        if agreed is None:  # this thread agrees, and holds no lock while it waits
            agreed = mine
            try:
                mine.set_result(self._agree(mesh))
            except BaseException as error:
                with self._lock:
                    del self._views[key]
                mine.set_exception(error)
        view = agreed.result()
        ranks = [self._world.rank_of_device(d) for d in devices.flat]
        if ranks != (agreed_ranks := view.ranks[view.cluster].flatten().tolist()):
            text = (
                f"cluster {self._name(view.cluster)}: this mesh {dict(mesh.shape)} has its devices in the order of ranks "
                f"{ranks}, but the clusters agreed on {agreed_ranks} for a mesh of these axes: the other clusters cannot "
                "see the change. Use one order of devices for all meshes of these axes, or other axis names."
            )
            self._world.fail("agreement", text)  # they may be running the program already
            raise AgreementError(text)
        return view

    def devices(self, mesh: AnyMesh) -> np.ndarray:
        """The devices of a mesh; an abstract one stands for the mesh in force, or the last one of its shape."""
        shape = (tuple(mesh.axis_names), tuple(mesh.axis_sizes))
        if isinstance(mesh, jax.sharding.Mesh):
            self._devices[shape] = mesh.devices
            return mesh.devices
        in_force = _compat.concrete_mesh()
        if in_force is not None and (tuple(in_force.axis_names), tuple(in_force.axis_sizes)) == shape:
            self._devices[shape] = in_force.devices
        if shape not in self._devices:
            devices = jax.devices()
            if len(devices) != math.prod(mesh.axis_sizes):
                raise AgreementError(
                    f"cannot tell the devices of the abstract mesh {mesh}: use jax.set_mesh, or pass the "
                    "jax.sharding.Mesh itself to shard_map"
                )
            self._devices[shape] = np.asarray(devices).reshape(mesh.axis_sizes)
        return self._devices[shape]

    def _agree(self, mesh: AnyMesh) -> MeshView:
        world, axis = self._world, self.spanning_axis(mesh.axis_names)
        assert axis is not None
        _refuse_settings()
        if axis == WORLD_AXIS:
            shapes = tuple((c.devices,) for c in world.clusters)
            ranks = tuple(np.arange(c.first_rank, c.first_rank + c.devices) for c in world.clusters)
            return MeshView((WORLD_AXIS,), WORLD_AXIS, shapes, ranks, world.cluster)
        devices = self.devices(mesh)
        mine = {
            "names": [str(n) for n in mesh.axis_names],
            "shape": [int(n) for n in mesh.axis_sizes],
            "ranks": [world.rank_of_device(d) for d in devices.flat],
        }
        key = f"mesh/{axis}/{fingerprint(_further(axis, mine)):016x}"
        with self._lock:
            self._published[key] = mine
        world.control.publish(key, mine)
        assumed = self._assumed(axis, mine)
        if assumed is not None:
            world.control.subscribe(key, functools.partial(self._compare, axis, key, assumed))
            return self._checked(axis, assumed)
        return self._checked(axis, self._collected(axis, key, mine))

    def _collected(self, axis: str, key: str, mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Every cluster's mesh of these axes, one process of each; says who is waited for, and bounded."""
        world = self._world
        first = {m.cluster: m.index for m in reversed(world.control.members)}  # each cluster's first process
        others = [i for c, i in first.items() if c != world.cluster]
        deadline = time.monotonic() + world.config.arrival_timeout
        warned = False
        while True:
            try:
                answers = world.control.collect(key, others, min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            except RendezvousError:
                self._refuse_another(axis, mine)
                if time.monotonic() >= deadline:
                    raise
                if not warned:
                    log.warning(_NOTICE, _show(mine))
                warned = True
            else:
                return [mine if c == world.cluster else answers[first[c]] for c in range(len(first))]

    def _refuse_another(self, axis: str, mine: Mapping[str, Any]) -> None:
        """An error if another cluster waits in turn, with a mesh over this axis that we do not have."""
        with self._lock:
            strangers = [v for k, v in self._theirs.items() if k[1] not in self._published]
        for theirs in strangers:
            if axis in theirs["names"]:
                raise AgreementError(
                    f"clusters {self._name(self._world.cluster)} and {self._name(theirs['cluster'])} disagree about the "
                    f"mesh with the spanning axis {axis!r}: {_show(mine)} here, {_show(theirs)} there. The axis names must "
                    f"be equal and every size except {axis!r}'s."
                )

    def _name(self, cluster: int) -> str:
        return repr(self._world.clusters[cluster].name)

    def _note(self, member: int, key: str, theirs: Any) -> None:
        with self._lock:
            self._theirs[member, key] = {**theirs, "cluster": self._world.control.members[member].cluster}

    def _assumed(self, axis: str, mine: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """What all clusters' meshes look like if the axis' size was given to ``initialize``: this cluster's axes over
        all devices in order. None if that does not fit, or no size was given; then the clusters have to ask.

        It makes tracing and lowering independent of the others; the layouts are compared when they arrive, and every
        message names the layout that its sender had in mind.
        """
        world = self._world
        if world.axes.get(axis) is None:
            return None
        at = mine["names"].index(axis)
        further = math.prod(mine["shape"]) // mine["shape"][at]
        result = []
        for c in world.clusters:
            if c.devices % further:
                return None
            shape = [*mine["shape"][:at], c.devices // further, *mine["shape"][at + 1 :]]
            ranks = list(range(c.first_rank, c.first_rank + c.devices))
            result.append({"names": mine["names"], "shape": shape, "ranks": ranks})
        total = sum(c["shape"][at] for c in result)
        return result if total == world.axes.get(axis) and result[world.cluster] == mine else None

    def _compare(
        self, axis: str, expected: str, assumed: Sequence[Mapping[str, Any]], member: int, key: str, theirs: Any
    ) -> None:
        if key != expected:  # subscriptions are by prefix
            return
        cluster = self._world.control.members[member].cluster
        if theirs != assumed[cluster]:
            self._world.fail(
                "agreement",
                f"cluster {self._world.clusters[cluster].name!r} has the mesh {_show(theirs)} over ranks "
                f"{theirs['ranks']} for the spanning axis {axis!r}, where {_show(assumed[cluster])} over ranks "
                f"{assumed[cluster]['ranks']} was taken for granted from initialize(axes=...). Use meshes over all "
                "devices in order, or initialize without a size.",
            )

    def _checked(self, axis: str, all_clusters: Sequence[Mapping[str, Any]]) -> MeshView:
        world = self._world
        mine = all_clusters[world.cluster]
        at = mine["names"].index(axis)
        sizes = tuple(c["shape"][at] for c in all_clusters)
        agreed = self._sizes.setdefault(axis, sizes)
        total = world.axes.get(axis)
        if sizes != agreed or (total is not None and sum(sizes) != total):
            expected = f"{sum(agreed)} = {agreed}" if sizes != agreed else f"{total} in initialize(axes=...)"
            raise AgreementError(
                f"the spanning axis {axis!r} has the size {sum(sizes)} = {sizes} (by cluster) in this mesh, but was "
                f"agreed as {expected}. Use an axis of another name for a mesh of another size."
            )
        ranks = tuple(np.asarray(c["ranks"]).reshape(c["shape"]) for c in all_clusters)
        return MeshView(
            tuple(mine["names"]), axis, tuple(tuple(c["shape"]) for c in all_clusters), ranks, world.cluster
        )


def _further(axis: str, mesh: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must be equal in all clusters' meshes: the names, and every size except the spanning axis'."""
    return tuple((n, None if n == axis else s) for n, s in zip(mesh["names"], mesh["shape"], strict=True))


def _show(mesh: Mapping[str, Any]) -> str:
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(mesh["names"], mesh["shape"], strict=True)) + ")"


def _refuse_settings() -> None:
    if _compat.removes_size_one_axes():
        raise UnsupportedError(
            "jax_remove_size_one_mesh_axis_from_type drops the collectives of a cluster with one device along a "
            "spanning axis; set it to False"
        )
    if not _compat.uses_shardy():
        raise UnsupportedError("spanning axes need the Shardy partitioner; set jax_use_shardy_partitioner to True")
