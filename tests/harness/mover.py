"""A network of our own making, on every kernel that has TUN devices: this process moves the packets between them.

Started by `harness.network.Network`. The conditions are this process's own and can change at any moment. The TCP of both
ends is the kernel's. Namespaces and devices end with the process.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import selectors
import struct
import subprocess
import sys
import time

from harness.network import Conditions, address, enter_new_namespace, serve_namespaces

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DATA_BYTES = 500  # packets above this carry data


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
    namespace = enter_new_namespace()
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
    commands = f"addr add {address(host)}/24 dev tun0\nlink set tun0 up\nlink set lo up\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    return namespace, device


def main() -> None:
    opened = [_open_host(host) for host in range(int(sys.argv[1]))]
    serve_namespaces([namespace for namespace, _ in opened])
    _Mover([device for _, device in opened]).run()


if __name__ == "__main__":
    main()
