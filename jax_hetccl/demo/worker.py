"""The program of every process of both clusters, started by `hetccl demo`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax_hetccl as hetccl

from . import options
from .corpus import Corpus
from .records import Reporter
from .training import AXIS, Share, Trainer

_REDUCTIONS = 50


def counters(stats: Mapping[str, Any]) -> dict[str, int]:
    """What this process has sent to other clusters so far; no channel leads anywhere else."""
    peers = stats["peers"].values()
    return {
        "bytes_sent": sum(peer["bytes_sent"] for peer in peers),
        "messages": sum(peer["messages_sent"] for peer in peers),
    }


def main() -> None:
    """Joins the world, trains this cluster's share, reports."""
    given = options.parse()
    world = hetccl.initialize(axes=(AXIS,))
    cluster = world.clusters[world.cluster]
    reporter = Reporter(given.reports / f"{cluster.name}-{world.process}.jsonl")
    trainer = Trainer(
        Corpus.load(given.corpus),
        Share(cluster.first_rank, given.rows_per_device),
        seed=world.cluster,  # a different start in each cluster, which broadcast must make equal
        equalize=hetccl.broadcast,
    )

    def mark(name: str) -> None:
        reporter.write("traffic", mark=name, counters=counters(world.engine.stats()))

    reporter.train(trainer, given.steps, mark)
    seconds = trainer.time_reductions(_REDUCTIONS, mark)
    reporter.write("reductions", repetitions=_REDUCTIONS, seconds=seconds)
    hetccl.shutdown()


if __name__ == "__main__":
    main()
