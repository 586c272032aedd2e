"""``hetccl.barrier``: a meeting of all processes."""

from __future__ import annotations

from jax_hetccl import session
from jax_hetccl._errors import RendezvousError
from jax_hetccl._world import World

_FAMILY = "barrier/"


def barrier(name: str, timeout: float | None = None) -> None:
    """Waits until every process of every cluster has called it with this name.

    It goes over the control plane and does not touch devices: wait for their work first (``jax.block_until_ready``)
    where that matters. The n-th call with a name meets the n-th call of the others.

    Args:
      name: which meeting.
      timeout: seconds; the arrival timeout if left out.

    Raises:
      RendezvousError: not everybody came in time; names who is missing, and the barriers that these called instead.
      PeerLostError: one of the missing has died or left.

    Example:
      >>> hetccl.barrier("checkpoint written")
    """
    world = session.hooks().world
    world.check()
    bound = world.config.arrival_timeout if timeout is None else timeout
    try:
        world.control.meet(_FAMILY + name, None, bound)
    except RendezvousError as error:
        raise RendezvousError(f"barrier {name!r}: {error}{_elsewhere(world, name)}") from None


def _elsewhere(world: World, name: str) -> str:
    """Who has called another barrier that not everybody has come to."""
    found = []
    for member in world.control.members:
        calls = world.control.published(_FAMILY, member.index)
        others = sorted({key.removeprefix(_FAMILY).rpartition("/")[0] for key in calls} - {name})
        if others and member.index != world.control.me:
            found.append(f"{member.name} called barrier {', '.join(map(repr, others))} instead")
    return f" {'; '.join(found)}." if found else ""
