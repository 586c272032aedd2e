"""Members of a world as threads of one process: the real control plane, without JAX."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, Self

from jax_hetccl import _secret
from jax_hetccl._config import Config, resolve
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.join import join

SECRET = _secret.generate()
CLUSTERS = "left:2,right:1"


def config(name: str, port: int, host: str = "127.0.0.1", **settings: Any) -> Config:
    """Settings of the member `cluster/process`."""
    cluster, _, process = name.partition("/")
    settings = {"clusters": CLUSTERS, "secret": SECRET, "join_timeout": 20, **settings}
    return resolve({}, coordinator=(host, port), cluster=cluster, process=int(process), **settings)


def until(condition: Callable[[], object], seconds: float = 5) -> bool:
    """Waits for a condition; whether it came to hold."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


class Meeting:
    """Joins several members at once. A context manager that closes all of them."""

    def __init__(self, port: int | None = None, **settings: Any) -> None:
        self.port = port or reserve_port()
        self.settings = settings
        self.members: dict[str, ControlPlane] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(32)

    def start(self, name: str, record: dict[str, Any] | None = None, **settings: Any) -> concurrent.futures.Future:
        """Starts to join in the background."""
        return self._pool.submit(join, config(name, self.port, **{**self.settings, **settings}), record)

    def join(self, *names: str) -> list[ControlPlane]:
        """Joins these members and waits until all are in."""
        futures = {name: self.start(name, {"who": name}) for name in names}
        for name, future in futures.items():
            self.members[name] = future.result(30)
        return [self.members[name] for name in names]

    def close(self, *names: str) -> None:
        """Closes these members, or all."""
        closing = [self.members.pop(name) for name in (names or list(self.members))]
        list(self._pool.map(lambda control: control.close(), closing))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._pool.shutdown()
