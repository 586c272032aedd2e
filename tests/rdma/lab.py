"""What the tests with software RDMA share."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Two devices whose networks reach each other, and the interfaces they belong to.
DEVICES = {"rxe0": "vethA", "rxe1": "vethB"}
DEBIAN_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")


def lacking() -> str:
    """The devices that are not here."""
    return ", ".join(d for d in DEVICES if not Path("/sys/class/infiniband", d).exists())


def options(device: str, **changes: Any) -> dict[str, Any]:
    """How the engine is told of a port: GID 1 is IPv4; what gets no answer is given up after half a second."""
    usual = {"device": device, "port": 1, "gid_index": 1, "traffic_class": 0, "timeout": 14, "retry_count": 6}
    return {**usual, **changes}


def turn(interface: str, state: str) -> None:
    """Takes a network interface `"up"` or `"down"`."""
    subprocess.run(["ip", "link", "set", interface, state], check=True)


def both(one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
    """Calls both at once; returns what each returned or raised."""
    results: list[Any] = [None, None]

    def call(index: int, function: Callable[[], Any]) -> None:
        try:
            results[index] = function()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(i, f)) for i, f in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "neither worked nor failed in a minute"
    return results[0], results[1]
