"""GPUs and the drivers that exchanges use."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from jax_hetccl import gpus
from jax_hetccl._config import QUEUES
from jax_hetccl.doctor.check import BAD, GOOD, NOTE, Check

LIBRARIES = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"}


def gpu_checks() -> list[Check]:
    checks: list[Check] = []
    for platform, library in LIBRARIES.items():
        present = loads(library)
        checks.append(library_check(platform, library, present))
        if present is None:
            checks.append(queues_check(platform))
            try:
                checks += [device_check(platform, gpu) for gpu in gpus.describe(platform)]
            except gpus.BindingsError as error:
                checks.append(Check(f"{platform} devices", str(error), NOTE, "only the details below are missing"))
    return checks


def loads(library: str) -> str | None:
    """Why a library cannot be opened, or None."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


def library_check(platform: str, library: str, why: str | None) -> Check:
    """The driver library of a vendor."""
    name = f"{platform} driver"
    if why is None:
        return Check(name, library)
    if "cannot open shared object file: No such file" in why:
        return Check(name, f"{library} is not there", NOTE, f"only for clusters of {platform} devices")
    return Check(name, why, BAD, f"repair the {platform} driver: its library is there but does not load")


def queues_check(platform: str, environ: Mapping[str, str] | None = None) -> Check:
    """The hardware queues that a process's streams share."""
    queues = QUEUES[platform]
    name, found = f"{platform} hardware queues", queues.found(environ)
    if found is None:
        return Check(name, f"{queues.variable} not set: initialize sets it to {queues.enough}")
    text = f"{queues.variable}={found}"
    if found >= queues.enough:
        return Check(name, text)
    return Check(
        name, text, NOTE, f"fewer than {queues.enough}: copies may get stuck behind streams that wait; unset it"
    )


def device_check(platform: str, gpu: gpus.Gpu) -> Check:
    """One GPU, as an exchange would use it."""
    yes = {None: "unknown", 0: "no"}
    facts = [
        f"PCI {gpu.pci}",
        f"NUMA node {'unknown' if gpu.numa is None else gpu.numa}",
        f"stream memory operations {yes.get(gpu.stream_memops, 'yes')}",
        f"dma-buf {yes.get(gpu.dma_buf, 'yes')}",
        f"GPUDirect RDMA {yes.get(gpu.gpu_direct_rdma, 'yes')}",
    ]
    if gpu.rdma_writes_ordering is not None:
        facts.append(f"RDMA writes ordering {gpu.rdma_writes_ordering}, flush options {gpu.rdma_flush_options}")
    text = ", ".join(facts)
    if gpu.stream_memops == 0:
        return Check(f"{platform} device {gpu.ordinal}", text, NOTE, "host functions are used instead (slower)")
    return Check(f"{platform} device {gpu.ordinal}", text, GOOD)
