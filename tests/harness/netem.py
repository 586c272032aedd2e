"""A network by `tc netem`: hosts with a veth each, whose other ends a bridge joins in a namespace of its own.

Started by `harness.network.Network`. Conditions are those of the bridge's ends, towards the hosts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

from harness.network import Conditions, address, enter_new_namespace, serve_namespaces

_PACKET_BYTES = 1500


def _run(*command: str, text: str | None = None) -> str:
    return subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.PIPE).stdout


def _netem(conditions: Conditions) -> list[str]:
    """The arguments of `tc qdisc … netem`."""
    rate = conditions.rate_mbit * 1e6
    waiting_s = (conditions.queue_ms + conditions.delay_ms) / 1e3  # netem's limit counts what is on the way too
    arguments = ["limit", str(math.ceil(waiting_s * rate / 8 / _PACKET_BYTES)), "rate", f"{conditions.rate_mbit}mbit"]
    if conditions.delay_ms:
        arguments += ["delay", f"{conditions.delay_ms}ms"]
    if conditions.lose_every:
        arguments += ["loss", f"{100 / conditions.lose_every}%"]
    if conditions.reorder_every:
        arguments += ["reorder", f"{100 / conditions.reorder_every}%"]
    return arguments


class _Hub:
    """Made in the namespace of the bridge."""

    def __init__(self, hosts: list[int]) -> None:
        self._devices = [f"host{number}" for number in range(len(hosts))]
        self._conditions = Conditions()
        _run("ip", "-batch", "-", text="link add hub type bridge\nlink set hub up\nlink set lo up\n")
        for number, (namespace, device) in enumerate(zip(hosts, self._devices, strict=True)):
            # Packets as a wire carries them: neither the loss of one nor the length of a queue is of 64 KB.
            single = "gso_max_segs 1 gso_max_size 1500"
            inside = [
                f"link add eth0 {single} type veth peer name {device} {single} netns {os.getpid()}",
                f"addr add {address(number)}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ]
            there = f"--net=/proc/{os.getpid()}/fd/{namespace}"
            _run("nsenter", there, "ip", "-batch", "-", text="\n".join(inside) + "\n")
            _run("ip", "-batch", "-", text=f"link set {device} master hub\nlink set {device} up\n")
            _run("tc", "qdisc", "add", "dev", device, "root", "netem", *_netem(self._conditions))

    def counts(self) -> dict[str, int]:
        found = {"moved": 0, "lost": 0}
        for device in self._devices:
            shown = json.loads(_run("tc", "-s", "-j", "qdisc", "show", "dev", device))
            [root] = [discipline for discipline in shown if discipline["kind"] == "netem"]
            found["moved"] += root["packets"]
            found["lost"] += root["drops"]
        return found

    def become(self, conditions: Conditions) -> None:
        before, self._conditions = self._conditions, conditions
        # A device without a bridge receives and loses what comes, and nothing is sent to it; its link stays up.
        for host in set(conditions.cut) - set(before.cut):
            _run("ip", "link", "set", self._devices[host], "nomaster")
        for host in set(before.cut) - set(conditions.cut):
            _run("ip", "link", "set", self._devices[host], "master", "hub")
        if _netem(conditions) != _netem(before):
            for device in self._devices:
                _run("tc", "qdisc", "change", "dev", device, "root", "netem", *_netem(conditions))


def main() -> None:
    hosts = [enter_new_namespace() for _ in range(int(sys.argv[1]))]
    enter_new_namespace()
    hub = _Hub(hosts)
    serve_namespaces(hosts)
    for line in sys.stdin:
        hub.become(Conditions(**json.loads(line)))
        print(json.dumps(hub.counts()), flush=True)


if __name__ == "__main__":
    main()
