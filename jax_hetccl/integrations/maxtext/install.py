"""Puts the replacements into MaxText, for the world that this process is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax_hetccl import session
from jax_hetccl._errors import ConfigError
from jax_hetccl.integrations.maxtext import data, gradients, names, settings, state


def install() -> None:
    """Replaces MaxText's functions; see docs/maxtext.md. Call it once, after ``hetccl.initialize``."""
    world = session.hooks().world
    batches = _Batches()
    loss = names.LOSS.get()
    names.CONFIG.replace(lambda original: _configuration(original, batches))
    names.LOSS.replace(gradients.loss_fn)
    names.ACCUMULATION.replace(lambda original: gradients.accumulation(original, loss))
    names.CLIPPING.replace(gradients.clipping)
    names.SETUP.replace(state.setup)
    names.MANAGER.replace(lambda original: state.manager(original, first=world.cluster == 0))
    names.SAVE.replace(state.save)
    names.SYNTHETIC.replace(lambda original: data.synthetic(original, batches.rows))
    names.ITERATOR.replace(lambda original: data.iterator(original, batches.processes))


class _Batches:
    """What each cluster takes of a global batch. Known when all clusters have read their configuration."""

    def __init__(self) -> None:
        self.loaded: list[int] = []  # rows, by cluster

    def rows(self) -> tuple[int, int]:
        cluster = session.hooks().world.cluster
        return sum(self.loaded[:cluster]), sum(self.loaded)

    def processes(self, own: Sequence[int]) -> list[int]:
        world = session.hooks().world
        sizes = [c.processes for c in world.clusters]
        if len(own) != sizes[world.cluster]:
            raise ConfigError(
                f"{len(own)} of the {sizes[world.cluster]} processes of cluster {world.clusters[world.cluster].name} would read "
                "data (expansion_factor_real_data, or a small batch). Every process reads data when clusters are linked: "
                "use expansion_factor_real_data=-1 and per_device_batch_size=1 or more"
            )
        return data.among_all(own, sum(sizes[: world.cluster]), sum(sizes[world.cluster + 1 :]))


def _configuration(original: Callable[..., Any], batches: _Batches) -> Callable[..., Any]:
    """``pyconfig.initialize``: refuses what cannot span clusters and what differs between them, in all processes alike."""

    def initialize(argv: Any = None, *args: Any, **kwargs: Any) -> Any:
        world = session.hooks().world
        config = original(argv, *args, **kwargs)
        if world.cluster:  # logs and metrics of each cluster in a folder of its own
            own = f"run_name={config.run_name}-{world.clusters[world.cluster].name}"
            config = original([*(a for a in argv if not a.startswith("run_name=")), own], *args, **kwargs)
        keys = config.get_keys()
        said = world.control.meet(
            "maxtext",
            {
                "refused": settings.refusals(keys),
                "equal": {key: str(keys.get(key)) for key in settings.EQUAL},
                "rows": int(config.global_batch_size_to_load),
            },
            world.config.arrival_timeout,
        )
        members = world.control.members
        refused = {text: members[m].name for m, theirs in reversed(said.items()) for text in theirs["refused"]}
        if refused:
            raise ConfigError(
                "MaxText cannot span clusters with " + "; ".join(f"{text} ({who})" for text, who in refused.items())
            )
        differs = settings.difference({members[m].name: theirs["equal"] for m, theirs in said.items()})
        if differs is not None:
            raise ConfigError(f"MaxText's settings must agree: {differs}")
        rows = {members[m].cluster: theirs["rows"] for m, theirs in said.items()}
        batches.loaded = [rows[info.index] for info in world.clusters]
        return config

    return initialize
