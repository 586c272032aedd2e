"""Memory, limits, transports and network interfaces of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket

from jax_hetccl.doctor.check import BAD, GOOD, NOTE, Check
from jax_hetccl.rendezvous import addresses

MB = 1 << 20
# Shared memory of one pair of ranks with a GPU: two directions of 8 slots of 4 MB.
_PAIR = 2 * 8 * 4 * MB


def host_checks() -> list[Check]:
    return [
        Check("CPU cores", str(len(os.sched_getaffinity(0)))),
        shared_memory_check(_free("/dev/shm")),
        memlock_check(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        files_check(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        _transports(),
        interfaces_check(_interfaces()),
    ]


def shared_memory_check(free: int | None) -> Check:
    """Channels on one host live in memory files, which count as shared memory (a container limits it)."""
    if free is None:
        return Check(
            "shared memory", "no /dev/shm", NOTE, "fine for memory files; libraries inside a cluster may need it"
        )
    found = f"/dev/shm has {free // MB} MB free"
    if free < 4 * _PAIR:
        return Check("shared memory", found, NOTE, "containers: start with --shm-size=8g (or --ipc=host)")
    return Check("shared memory", found)


def memlock_check(limit: int) -> Check:
    """RDMA registers memory; CUDA and HIP pin theirs without this limit."""
    if limit == resource.RLIM_INFINITY:
        return Check("memlock", "unlimited")
    return Check("memlock", f"{limit // 1024} KB", NOTE, "for RDMA: ulimit -l unlimited (docker: --ulimit memlock=-1)")


def files_check(soft: int, hard: int) -> Check:
    """Each direction of a pair of ranks holds up to three descriptors."""
    if soft >= 4096:
        return Check("open files", f"{soft} (hard limit {hard})")
    return Check("open files", f"{soft} (hard limit {hard})", NOTE, "many ranks: ulimit -n 65536")


def interfaces_check(found: dict[str, list[str]]) -> Check:
    """Where other hosts could reach this one."""
    outside = {name: a for name, a in found.items() if name != "lo"}
    text = "; ".join(f"{name} {', '.join(a)}" for name, a in sorted(outside.items()))
    if not outside:
        return Check("network interfaces", "loopback only", NOTE, "clusters on this host only")
    if len(outside) > 1:
        return Check("network interfaces", text, GOOD, "to choose one: HETCCL_SOCKET_IFNAME")
    return Check("network interfaces", text)


def _transports() -> Check:
    try:
        descriptor = os.memfd_create("hetccl-doctor")
        os.close(descriptor)
    except OSError as error:
        return Check("transports", f"tcp; no shm: memfd_create failed ({error})", NOTE, "allow memfd_create (seccomp)")
    try:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
    except OSError as error:
        return Check("transports", f"no loopback socket: {error}", BAD, "bring the interface lo up")
    return Check("transports", "shm (memory files), tcp")


def _interfaces() -> dict[str, list[str]]:
    """Addresses by interface."""
    result: dict[str, list[str]] = {}
    for name, address in addresses.interfaces():
        result.setdefault(name, []).append(address)
    return result


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
