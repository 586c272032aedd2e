"""Tests with software RDMA: need the devices rxe0 and rxe1 whose networks reach each other (see CONTRIBUTING.md).

`tests/test_rdma_lab.py` runs them in a kernel that has these, on machines that have it.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEVICES = ("rxe0", "rxe1")
DEBIAN_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")


def pytest_configure(config: pytest.Config) -> None:
    lacking = [d for d in DEVICES if not Path("/sys/class/infiniband", d).exists()]
    config.stash[_LACKING] = ", ".join(lacking)


_LACKING: pytest.StashKey[str] = pytest.StashKey()


@pytest.fixture(autouse=True)
def _devices(request: pytest.FixtureRequest) -> None:
    if lacking := request.config.stash[_LACKING]:
        pytest.skip(f"no software RDMA here ({lacking}); tests/test_rdma_lab.py runs this where it is")


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module `pyverbs_peer`. Debian's pyverbs serves any Python of the version it is built for."""
    import sys

    try:
        import pyverbs.device
    except ImportError:
        if not DEBIAN_PYVERBS.exists():
            pytest.skip("no pyverbs: apt-get install python3-pyverbs")
        folder = tmp_path_factory.mktemp("pyverbs")
        (folder / "pyverbs").symlink_to(DEBIAN_PYVERBS)
        sys.path.insert(0, str(folder))
        try:
            import pyverbs.device  # noqa: F401
        except ImportError as error:
            pytest.skip(f"Debian's pyverbs is for another Python: {error}")
    import pyverbs_peer

    return pyverbs_peer


def options(device: str, **changes: Any) -> dict[str, Any]:
    """How the engine is told of a port here: GID 1 is IPv4; a packet without an answer is given up after half a second."""
    usual = {"device": device, "port": 1, "gid_index": 1, "traffic_class": 0, "timeout": 14, "retry_count": 6}
    return {**usual, **changes}


@pytest.fixture
def link() -> Iterator[Callable[[str, str], None]]:
    """Takes a network interface up or down; all are up again after the test."""
    down: set[str] = set()

    def turn(interface: str, state: str) -> None:
        subprocess.run(["ip", "link", "set", interface, state], check=True)
        (down.add if state == "down" else down.discard)(interface)

    yield turn
    for interface in down.copy():
        turn(interface, "up")


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
    assert not any(thread.is_alive() for thread in threads)
    return results[0], results[1]


@contextlib.contextmanager
def stream() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connected pair of stream sockets."""
    one, other = socket.socketpair()
    with one, other:
        yield one, other
