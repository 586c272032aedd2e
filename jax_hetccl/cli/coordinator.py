"""`hetccl coordinator`: the meeting point of a job, as a process of its own."""

from __future__ import annotations

import argparse
import logging
import signal
import sys

from jax_hetccl._config import resolve
from jax_hetccl._errors import HetcclError
from jax_hetccl.rendezvous.coordinator import serve

_DESCRIPTION = """\
Serves joins until it is stopped. Without it, the first process of the first cluster does. Options not given
come from the environment (HETCCL_COORDINATOR, HETCCL_CLUSTERS, HETCCL_SECRET, HETCCL_SECRET_FILE).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "coordinator",
        help="run the meeting point of a job as a process of its own",
        description=_DESCRIPTION,
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="the address that all processes are given")
    parser.add_argument("--clusters", metavar="NAME:PROCESSES,...", help="all clusters in rank order")
    parser.add_argument("--secret-file", metavar="FILE", help="the job's secret, as `hetccl secret --out` wrote it")
    parser.add_argument("--bind", metavar="ADDRESS", help="listen on this local address, if it is another one")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="[hetccl coordinator] %(message)s")
    try:
        config = resolve(
            member=False,
            coordinator=arguments.coordinator,
            clusters=arguments.clusters,
            secret_file=arguments.secret_file,
        )
        coordinator = serve(config, arguments.bind)
    except HetcclError as error:
        print(f"hetccl coordinator: {error}", file=sys.stderr)
        return 1
    interrupted: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        coordinator.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    clusters = ",".join(f"{name}:{processes}" for name, processes in config.clusters)
    print(f"[hetccl coordinator] {config.coordinator_text} serves {clusters}", file=sys.stderr, flush=True)
    coordinator.wait()
    return 0 if interrupted else 1  # a coordinator that ends by itself has failed, and has logged why
