"""`hetccl demo`: train a small model on two clusters, and check the result against one stock JAX world."""

from __future__ import annotations

import argparse
from pathlib import Path

from jax_hetccl.cli.run import add_settings, settings, wrong_arguments
from jax_hetccl.launch import LaunchError

_DESCRIPTION = """\
Trains a character-level transformer on two clusters (left: 2 processes, right: 1), then the same steps in one
JAX world without jax_hetccl. Fails unless the loss falls, all processes hold the same bits and both curves
agree.
"""


def _steps(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps (2 or more)")
    return int(text)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small model on two clusters of this machine",
        description=_DESCRIPTION,
    )
    parser.add_argument("--steps", type=_steps, default=200, help="training steps (200)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("hetccl-demo"),
        metavar="DIR",
        help="for logs, figures and plot (hetccl-demo)",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="CLUSTER=PATH",
        help="the Python of cluster left or right",
    )
    add_settings(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit status."""
    from jax_hetccl.demo.main import Demo  # here, because the other subcommands need none of its libraries

    try:
        demo = Demo(arguments.out, arguments.steps, arguments.python, settings(arguments))
    except LaunchError as error:
        return wrong_arguments(arguments, error)
    return demo.run()
