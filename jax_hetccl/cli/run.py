"""`hetccl run`: start all clusters of a program on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from jax_hetccl._config import TRANSPORTS
from jax_hetccl._secret import generate
from jax_hetccl.launch import Console, LaunchError, Supervisor, parse_clusters, parse_pythons, plan_processes
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.launch.spec import FORM, PLATFORMS, default_platform

_EPILOG = f"""\
A cluster is {FORM}: PROCESSES processes with DEVICES devices each; PLATFORM is one of
{", ".join(PLATFORMS)} (default: the first one in JAX_PLATFORMS, else cpu). Clusters are given in rank order.
The word 'python' at the start of the command is the Python that hetccl runs in, or the one of --python.

  hetccl run --cluster left=1x2 --cluster right=2x1@cpu -- python train.py --steps 100

Exit status: 0 if all processes succeed; that of the first process that failed for good (128+n if signal n killed it);
128+n if hetccl got signal n; 124 if --time-limit ran out; 2 for wrong arguments.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="start all clusters of a program on this machine",
        description="Starts every process of every cluster on this machine, joined into one world.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cluster", action="append", default=[], metavar=FORM, help="once per cluster, in rank order")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="CLUSTER=PATH",
        help="the Python that one cluster uses",
    )
    add_settings(parser)
    parser.add_argument(
        "--settle",
        type=seconds,
        default=3.0,
        metavar="S",
        help="after a failure: time for the others to report it (3)",
    )
    parser.add_argument(
        "--grace", type=seconds, default=10.0, metavar="S", help="time from SIGTERM or Ctrl-C to SIGKILL (10)"
    )
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start a cluster that fails again, N times in all, while the others go on without it (0)",
    )
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="stop everything after this time")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each process runs")
    parser.set_defaults(run=run, parser=parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the options that become `HETCCL_*` settings of the processes; read them with `settings`."""
    parser.add_argument("--transport", choices=TRANSPORTS, help="sets HETCCL_TRANSPORT")
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="sets HETCCL_TIMEOUT: a transfer may stand still so long"
    )
    parser.add_argument(
        "--arrival-timeout",
        type=seconds,
        metavar="S",
        help="sets HETCCL_ARRIVAL_TIMEOUT: a peer may come so late",
    )


def settings(arguments: argparse.Namespace) -> dict[str, str]:
    """The `HETCCL_*` variables asked for by the options of `add_settings`."""
    given: Mapping[str, object] = {
        "HETCCL_TRANSPORT": arguments.transport,
        "HETCCL_TIMEOUT": arguments.timeout,
        "HETCCL_ARRIVAL_TIMEOUT": arguments.arrival_timeout,
    }
    return {
        key: f"{value:g}" if isinstance(value, float) else str(value)
        for key, value in given.items()
        if value is not None
    }


def seconds(text: str) -> float:
    """Reads a positive number of seconds (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (0 or more)")
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2, …")
    return int(text)


def say(text: str) -> None:
    """Prints a remark of the launcher itself to standard error."""
    print(f"[hetccl] {text}", file=sys.stderr, flush=True)


def wrong_arguments(arguments: argparse.Namespace, error: Exception) -> int:
    """Prints usage and error as argparse does; returns the exit status for it."""
    arguments.parser.print_usage(sys.stderr)
    print(f"{arguments.parser.prog}: error: {error}", file=sys.stderr)
    return 2


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit status."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        clusters = parse_clusters(arguments.cluster, default_platform(os.environ))
        plans = plan_processes(
            clusters,
            command,
            environ=os.environ,
            coordinator=f"127.0.0.1:{reserve_port()}",
            secret=generate(),
            python=sys.executable,
            pythons=parse_pythons(arguments.python, clusters),
            settings=settings(arguments),
        )
    except LaunchError as error:
        return wrong_arguments(arguments, error)
    supervisor = Supervisor(
        plans,
        Console(),
        say=say,
        settle_s=arguments.settle,
        grace_s=arguments.grace,
        limit_s=arguments.time_limit,
        restarts=arguments.restarts,
    )
    try:
        return supervisor.run().status
    except BrokenPipeError:  # whoever read our output has gone; everything is stopped already
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
