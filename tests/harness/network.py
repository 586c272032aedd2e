"""Hosts on a network that loses, delays, reorders and limits packets: what `tc netem` does, on every kernel.

Each host is a network namespace with a TUN device; a process of ours moves the packets between the devices, so that the
conditions are its own and can change at any moment. The TCP of both ends is the kernel's. Namespaces and devices end with
the process. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import heapq
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DATA_BYTES = 500  # packets above this carry data


@dataclasses.dataclass
class Conditions:
    """What happens to packets between any two hosts.

    Attributes:
        rate_mbit: of what one host receives, in Mbit/s.
        delay_ms: on the way.
        lose_every: of this many packets with data one is lost; 0: none.
        reorder_every: of this many packets one comes `reorder_ms` late; 0: none.
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


def lacking() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


class Network:
    """Some hosts. A context manager."""

    def __init__(self, hosts: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.network", str(hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        self.namespaces: list[str] = json.loads(self._answers.readline())

    def address(self, host: int) -> str:
        """The host's IPv4 address."""
        return _address(host)

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


def _address(host: int) -> str:
    return f"10.99.0.{host + 1}"


# --- in the process that moves packets -----------------------------------------------------------


class _Mover:
    def __init__(self, devices: list[int]) -> None:
        self._devices = devices
        self._conditions = Conditions()
        self._way: list[tuple[float, int, int, bytes]] = []  # due, number, host, packet
        self._free = [0.0] * len(devices)  # when the way to a host is free again
        self._seen = [0] * len(devices)
        self._data = [0] * len(devices)
        self._counts = {"moved": 0, "lost": 0}

    def run(self) -> None:
        places = {device: host for host, device in enumerate(self._devices)}
        requests = sys.stdin.fileno()
        selector = selectors.DefaultSelector()  # descriptors may be above 1023, which `select.select` does not take
        for source in (requests, *self._devices):
            selector.register(source, selectors.EVENT_READ)
        while True:
            timeout = max(0.0, self._way[0][0] - time.monotonic()) if self._way else None
            for key, _ in selector.select(timeout):
                ready = key.fd
                if ready != requests:
                    self._read(ready, places[ready])
                elif line := sys.stdin.readline():
                    self._conditions = Conditions(**json.loads(line))
                    print(json.dumps(self._counts), flush=True)
                else:
                    return
            self._deliver()

    def _read(self, device: int, source: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            if packet[0] >> 4 == 4 and 0 <= (host := packet[19] - 1) < len(self._devices):
                self._send(packet, source, host)

    def _send(self, packet: bytes, source: int, host: int) -> None:
        now, conditions = time.monotonic(), self._conditions
        self._seen[host] += 1
        lost = source in conditions.cut or host in conditions.cut
        if len(packet) > _DATA_BYTES:
            self._data[host] += 1
            lost |= conditions.lose_every > 0 and self._data[host] % conditions.lose_every == 0
        begin = max(now, self._free[host])
        if lost or begin - now > conditions.queue_ms / 1e3:
            self._counts["lost"] += 1
            return
        self._free[host] = begin + len(packet) * 8 / (conditions.rate_mbit * 1e6)
        due = self._free[host] + conditions.delay_ms / 1e3
        if conditions.reorder_every > 0 and self._seen[host] % conditions.reorder_every == 0:
            due += conditions.reorder_ms / 1e3
        self._counts["moved"] += 1
        heapq.heappush(self._way, (due, self._counts["moved"], host, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._way and self._way[0][0] <= now:
            _, _, host, packet = heapq.heappop(self._way)
            try:
                os.write(self._devices[host], packet)
            except BlockingIOError:
                self._counts["lost"] += 1


def _open_host(host: int) -> tuple[int, int]:
    """Makes a namespace with a device; returns the descriptors of both. This process then is in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
    commands = f"addr add {_address(host)}/24 dev tun0\nlink set tun0 up\nlink set lo up\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    return os.open("/proc/self/ns/net", os.O_RDONLY), device


def main() -> None:
    opened = [_open_host(host) for host in range(int(sys.argv[1]))]
    print(json.dumps([f"/proc/{os.getpid()}/fd/{namespace}" for namespace, _ in opened]), flush=True)
    _Mover([device for _, device in opened]).run()


if __name__ == "__main__":
    main()
