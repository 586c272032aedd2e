"""``hetccl.barrier``: a meeting of all processes."""

from __future__ import annotations

from jax_hetccl import session


def barrier(name: str, timeout: float | None = None) -> None:
    """Waits until every process of every cluster has called it with this name.

    It goes over the control plane and does not touch devices: wait for their work first (``jax.block_until_ready``)
    where that matters. The n-th call with a name meets the n-th call of the others.

    Args:
      name: which meeting.
      timeout: seconds; the arrival timeout if left out.

    Raises:
      RendezvousError: not everybody came in time; names who is missing.
      PeerLostError: one of the missing has died or left.

    Example:
      >>> hetccl.barrier("checkpoint written")
    """
    world = session.hooks().world
    world.check()
    world.control.meet(f"barrier/{name}", None, world.config.arrival_timeout if timeout is None else timeout)
