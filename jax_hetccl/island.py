"""This process's own cluster as JAX sees it: joining it with `jax.distributed`, and its devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from jax_hetccl import _compat
from jax_hetccl._config import Config
from jax_hetccl._errors import AgreementError, HetcclError, RendezvousError, UnsupportedError
from jax_hetccl.gpus import BindingsError, Gpu, describe
from jax_hetccl.rendezvous import addresses
from jax_hetccl.rendezvous.control import ControlPlane

_log = logging.getLogger(__name__)

Device: TypeAlias = Any  # `jax.Device` is an attribute that type checkers do not take for a class

# The platforms of clusters, with XLA's names of them, under which custom calls are registered.
XLA_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """One cluster of the world, the same in every process.

    Attributes:
      index: its place in the world.
      name: its name.
      processes: how many processes it has.
      devices: how many devices it has.
      platform: `"cpu"`, `"cuda"` or `"rocm"`.
      device_kinds: the different kinds of devices, sorted.
      jax_version: the version of JAX it runs.
      first_rank: the rank of its first device.
      gpus: for GPUs whose vendor's bindings are installed, their places and what they can do (``gpus.Gpu``), in rank
        order; empty if any is unknown.
    """

    index: int
    name: str
    processes: int
    devices: int
    platform: str
    device_kinds: tuple[str, ...]
    jax_version: str
    first_rank: int
    gpus: tuple[Gpu, ...] = ()


def join_island(config: Config, control: ControlPlane, local_device_ids: Any, timeout: float) -> None:
    """Makes the processes of this cluster one JAX world, unless the user already did.

    Raises:
      AgreementError: the user's `jax.distributed` world is not the cluster that the settings describe.
      RendezvousError: the island cannot be joined.
    """
    name, count = config.clusters[config.cluster]
    if jax.distributed.is_initialized():
        if (jax.process_count(), jax.process_index()) != (count, config.process):
            raise AgreementError(
                f"{config.member_name}: jax.distributed was initialized as process {jax.process_index()} of "
                f"{jax.process_count()}, but HETCCL_CLUSTERS gives {name} {count} process(es); make them agree"
            )
        return
    if count == 1:
        return
    address = _island_address(config, control, timeout)
    if getattr(jax.config, "jax_cpu_collectives_implementation", "gloo") is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            num_processes=count,
            process_id=config.process,
            local_device_ids=local_device_ids,
            initialization_timeout=max(int(timeout), 1),
            coordinator_bind_address=address if config.process == 0 else None,
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"{config.member_name} could not join cluster {name} with jax.distributed at {address}: {error}\n"
            "If JAX was used before: call hetccl.initialize() before anything else that touches JAX devices."
        ) from error


def _island_address(config: Config, control: ControlPlane, timeout: float) -> str:
    """The address where this cluster's processes meet; chosen by its first process."""
    key = f"island/{config.cluster}"
    leader = next(m.index for m in control.members if (m.cluster, m.process) == (config.cluster, 0))
    if config.process == 0:
        host = addresses.local_address(config)
        with addresses.listen_tcp(host, config.port_range) as probe:
            port = probe.getsockname()[1]
        control.publish(key, addresses.endpoint(host, port).removeprefix("tcp://"))
    return control.collect(key, [leader], timeout)[leader]


def abandon() -> None:
    """Lets this process end although its cluster lost a process: JAX would wait 100 s for it and then abort."""
    if jax.distributed.is_initialized():
        _compat.abandon_distributed()


def devices() -> list[Device]:
    """All devices of this cluster in rank order."""
    return sorted(jax.devices(), key=lambda device: device.id)


def describe_devices() -> dict[str, Any]:
    """This process's record for the others: its devices and their places in the cluster."""
    every = devices()
    local = {device.id for device in jax.local_devices()}
    return {
        "platform": vendor(every[0]),
        "kinds": sorted({device.device_kind for device in every}),
        "jax": jax.__version__,
        "total": len(every),
        "positions": [position for position, device in enumerate(every) if device.id in local],
        "gpus": _describe_gpus([device for device in every if device.id in local]),
    }


def _describe_gpus(local: Sequence[Device]) -> list[dict[str, Any]]:
    """This process's GPUs as the vendor's bindings show them; nothing without them: they are optional."""
    platform = vendor(local[0])
    if platform == "cpu":
        return []
    try:
        return [dataclasses.asdict(gpu) for gpu in describe(platform, [ordinal(device) for device in local])]
    except BindingsError as error:
        _log.info("places and abilities of the GPUs are not shown: %s", error)
        return []


def keep_memory(megabytes: float) -> None:
    """Lets the C library keep freed memory for the next step, where XLA takes buffers from it (CPU devices).

    Meant to be called again when the devices are open: before, only `JAX_PLATFORMS` can tell which ones they will be,
    but then it serves the threads best that XLA makes with them.

    Args:
      megabytes: how much at most; 0: nothing is changed.
    """
    platform = vendor(devices()[0]) if _compat.devices_in_use() else getattr(jax.config, "jax_platforms", None)
    if megabytes and platform == "cpu":
        from jax_hetccl import _native

        _native.keep_freed_memory(int(megabytes * (1 << 20)))


def ordinal(device: Device) -> int:
    """The number by which a handler of the FFI knows `device`: the global id on CPU, else the driver's number of it in
    this process, which counts visible devices only."""
    if device.platform == "cpu":
        return device.id
    local = device.local_hardware_id
    return device.id if local is None else local


def vendor(device: Device) -> str:
    """The platform, with "gpu" told apart: clusters of two vendors round differently.

    Raises:
      UnsupportedError: devices of another platform.
    """
    name = device.platform
    if name == "gpu":
        name = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    if name not in XLA_PLATFORMS:
        raise UnsupportedError(
            f"clusters of {name} devices ({device.device_kind}) are not supported; supported platforms: "
            f"{', '.join(XLA_PLATFORMS)}. Choose one with JAX_PLATFORMS."
        )
    return name


def assemble(control: ControlPlane, records: dict[int, Any]) -> tuple[tuple[ClusterInfo, ...], dict[int, int]]:
    """Builds the clusters and the owner (member index) of every rank from all device records.

    Raises:
      AgreementError: processes of one cluster describe it differently.
    """
    clusters: list[ClusterInfo] = []
    owner: dict[int, int] = {}
    first_rank = 0
    for index in sorted({member.cluster for member in control.members}):
        members = [member for member in control.members if member.cluster == index]
        first = records[members[0].index]
        for member in members:
            record = records[member.index]
            for fact in ("total", "platform", "jax"):
                if record[fact] != first[fact]:
                    raise AgreementError(
                        f"cluster {member.cluster_name} is not one JAX world: {fact} is {first[fact]!r} in "
                        f"{members[0].name} but {record[fact]!r} in {member.name}"
                    )
            for position in record["positions"]:
                owner[first_rank + position] = member.index
        if len([rank for rank in owner if rank >= first_rank]) != first["total"]:
            raise HetcclError(f"cluster {members[0].cluster_name}: its processes do not own all of its devices")
        known = {
            position: Gpu(**gpu)
            for member in members
            for position, gpu in zip(
                records[member.index]["positions"], records[member.index].get("gpus", ()), strict=False
            )
        }
        gpus = tuple(gpu for _, gpu in sorted(known.items())) if len(known) == first["total"] else ()
        kinds = tuple(sorted({kind for member in members for kind in records[member.index]["kinds"]}))
        info = ClusterInfo(
            index, members[0].cluster_name, len(members), first["total"], first["platform"], kinds,
            first["jax"], first_rank, gpus,
        )  # fmt: skip
        clusters.append(info)
        first_rank += info.devices
    return tuple(clusters), owner
