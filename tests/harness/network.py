"""Hosts on a network that loses, delays, reorders and limits packets.

Each host is a network namespace. What is between them is a process's, of one of two kinds: `tc netem`, the kernel's own
emulation, where the kernel has it (`harness.netem`), and a process that moves packets itself, everywhere (`harness.mover`).
Needs root.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_CLONE_NEWNET = 0x40000000
# By name: the module whose process makes the network, and a command that works in a namespace of its own if there can be one.
KINDS = {
    "mover": ("harness.mover", "ip link"),
    "netem": (
        "harness.netem",
        "ip link add hub type bridge && ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root netem delay 1ms",
    ),
}


@dataclasses.dataclass
class Conditions:
    """What happens to packets between any two hosts.

    Attributes:
        rate_mbit: of what one host receives, in Mbit/s.
        delay_ms: on the way.
        lose_every: of this many packets one is lost (with netem on average, else exactly, of those with data); 0: none.
        reorder_every: of this many packets one comes `reorder_ms` later than the others (with netem on average, and
            `delay_ms` earlier instead); 0: none.
        reorder_ms: see there.
        queue_ms: what would wait longer for its turn is dropped.
        cut: hosts that nothing reaches and that reach nobody, without a word.
    """

    rate_mbit: float = 1000.0
    delay_ms: float = 0.0
    lose_every: int = 0
    reorder_every: int = 0
    reorder_ms: float = 3.0
    queue_ms: float = 100.0
    cut: tuple[int, ...] = ()


def lacking(kind: str = "mover") -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if kind == "mover" and not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "-n", "sh", "-c", KINDS[kind][1]], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no {kind} in network namespaces here: {tried.stderr.strip()}"


class Network:
    """Some hosts. A context manager."""

    def __init__(self, hosts: int, kind: str = "mover") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", KINDS[kind][0], str(hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        self.namespaces: list[str] = json.loads(self._answers.readline())

    def address(self, host: int) -> str:
        """The host's IPv4 address."""
        return address(host)

    def become(self, **conditions: Any) -> dict[str, int]:
        """Sets the conditions from now on (see `Conditions`; those not given take their defaults).

        Returns:
            Packets ``moved`` and ``lost`` (for whatever reason) so far.
        """
        self._requests.write(json.dumps(conditions) + "\n")
        return json.loads(self._answers.readline())

    def close(self) -> None:
        """Ends it. The namespaces end when no process is left in them."""
        self._requests.close()
        self._process.wait(10)
        self._answers.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- what the processes of both kinds share ------------------------------------------------------


def address(host: int) -> str:
    """The IPv4 address of a host, in a network of 24 bits."""
    return f"10.99.0.{host + 1}"


def enter_new_namespace() -> int:
    """Moves this process into a new network namespace; returns a descriptor of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def serve_namespaces(descriptors: list[int]) -> None:
    """Tells the `Network` where the namespaces are, as long as this process lives."""
    print(json.dumps([f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]), flush=True)
