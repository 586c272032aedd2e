"""Going on with other clusters: without those that are lost, and with those that came back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_hetccl import _values
from jax_hetccl import _world as world_lib
from jax_hetccl._config import Config
from jax_hetccl._errors import ConfigError, HetcclError
from jax_hetccl._world import World
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.join import join
from jax_hetccl.rendezvous.regroup import regroup

# What this process has noticed by itself the clusters agree on a moment later.
_FAILURE_S = 5.0
# How long survivors may take to tell of devices that they have had open all the time.
_KNOWN_S = 20.0


def reinitialize(
    clusters: str | Mapping[str, int] | Sequence[str] | None, at_least: int, timeout: float | None
) -> World:
    """See :func:`jax_hetccl.session.reinitialize`, which also puts the new world's hooks into JAX."""
    world = world_lib.world()
    job, present = world.job, [c.name for c in world.clusters]
    names = None
    if clusters is not None:
        try:
            names = _values.parse_subset(clusters, job.clusters)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"reinitialize(clusters={clusters!r}): {error}") from None
        if job.cluster_name not in names:
            raise ConfigError(
                f"reinitialize(clusters={clusters!r}): without {job.cluster_name}, the cluster that calls it"
            )
    if names is None or set(names) <= set(present):
        if names is None:
            _await_failure(world)
        return world_lib.reform(_regrouping(world, names, at_least, timeout), _KNOWN_S)
    if world.failure is not None:
        raise HetcclError(
            f"reinitialize(clusters={','.join(names)!r}): this world has failed; go on without the lost clusters first, by "
            f"hetccl.reinitialize(): {world.failure}"
        )
    if left_out := sorted(set(present) - set(names)):
        raise ConfigError(
            f"reinitialize(clusters={clusters!r}): leaves out {', '.join(left_out)} and takes in others; do one after the other"
        )
    # Who comes opens its devices only now.
    return world_lib.reform(_joining(world, names, timeout), job.join_timeout if timeout is None else timeout)


def _regrouping(world: World, names: Sequence[str] | None, at_least: int, timeout: float | None) -> world_lib.Meet:
    bound = world.config.arrival_timeout if timeout is None else timeout

    def meet(job: Config, record: dict[str, Any]) -> ControlPlane:
        return regroup(world.control, job, record, clusters=names, at_least=at_least, timeout=bound)

    return meet


def _joining(world: World, names: Sequence[str], timeout: float | None) -> world_lib.Meet:
    def meet(job: Config, record: dict[str, Any]) -> ControlPlane:
        bounded = job if timeout is None else dataclasses.replace(job, join_timeout=timeout)
        return join(bounded, record, world.control, names)

    return meet


def _await_failure(world: World) -> None:
    end = time.monotonic() + _FAILURE_S
    while world.failure is None:
        if time.monotonic() > end:
            raise HetcclError(
                f"reinitialize: {world} is well, so there is no loss to go on from; if this process has an error of its own, "
                "that is the one to look at. To form another world anyway name its clusters: reinitialize(clusters=...)"
            )
        time.sleep(0.02)


def waiting_clusters() -> tuple[str, ...]:
    """The clusters of the job that are not in this world and wait to join it.

    A cluster that comes back calls ``initialize`` as at the start, and waits there. Call this in every process at the
    same step, now and then: all of them get the same answer, at the cost of one round trip on the control plane. If it
    is not empty, :func:`reinitialize` takes them in.

    Returns:
      Names, in the order of the job's clusters; only clusters all of whose processes wait. Empty while the coordinator
      cannot be reached by everybody.

    Raises:
      HetcclError: the world has failed, or there is none.

    Example:
      >>> if step % 100 == 0 and (back := hetccl.waiting_clusters()):
      ...     hetccl.reinitialize(clusters=[*(c.name for c in hetccl.world().clusters), *back])
      ...     step, state = snapshots.resume(state)
    """
    world = world_lib.world()
    world.check()
    control = world.control
    said = control.meet("waiting", control.seekers(), world.config.arrival_timeout)
    return complete(world.job.clusters, [c.name for c in world.clusters], said.values())


def complete(job: Iterable[tuple[str, int]], present: Iterable[str], said: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """The clusters all of whose processes everybody has heard of, without those that are there already.

    Args:
      job: names and numbers of processes of all clusters.
      present: the names of those that are there.
      said: for each process that was asked, the processes (`cluster/process`) that it knows to wait.

    Example:
      >>> complete([("left", 1), ("right", 2)], ["left"], [["right/0", "right/1"], ["right/1", "right/0"]])
      ('right',)
    """
    here = set(present)
    known = set.intersection(*map(set, said))
    return tuple(name for name, count in job if name not in here and all(f"{name}/{p}" in known for p in range(count)))
