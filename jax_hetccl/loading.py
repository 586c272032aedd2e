"""Loads of programs, kept apart from exchanges that hold a GPU's stream.

A driver may let nobody else call it while it waits for the whole device: when it loads a module or a kernel at its
first launch, and when it allocates. If a stream is held for an exchange then, the copies that would end the exchange
wait for the driver, and the driver for the stream. So whatever loads runs in a *section*, in which no stream is held:
it waits for those that are held, and exchanges in it are waited for on the host.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jax_hetccl import island
from jax_hetccl._world import World

_log = logging.getLogger(__name__)

# Beyond what an exchange may take to end: its failure has to be noticed and agreed on.
_MARGIN_S = 30.0


def section(world: World, devices: Iterable[island.Device]) -> contextlib.AbstractContextManager[None] | None:
    """A section of the GPUs of this process among some devices.

    Args:
      world: whose exchanges hold streams.
      devices: of a program.

    Returns:
      A context manager, for one use; None if there is no such GPU.
    """
    if world.engine is None:
        return None
    mine = [d for d in devices if d.platform != "cpu" and d.process_index == jax.process_index()]
    if not mine:
        return None
    bound = world.config.arrival_timeout + world.config.timeout + _MARGIN_S
    return _inside(world.engine.section([island.ordinal(d) for d in mine]), bound)


@contextlib.contextmanager
def _inside(section: Any, bound: float) -> Iterator[None]:
    try:
        if not section.enter(bound):
            _log.warning(
                "a program is loaded although a stream is still held for an exchange after %.0f s: what its device "
                "does before the exchange takes that long. If the exchange does not end now, HETCCL_TIMEOUT ends it",
                bound,
            )
        yield
    finally:
        section.leave()
