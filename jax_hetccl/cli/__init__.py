"""The `hetccl` command. One file per subcommand, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence

from jax_hetccl.cli import coordinator, demo, doctor, run, secret, topo


def _version() -> str:
    try:
        own = importlib.metadata.version("jax_hetccl")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        own = "(not installed)"
    return f"hetccl {own} (jax {importlib.metadata.version('jax')})"


def parser() -> argparse.ArgumentParser:
    """The command line of all subcommands."""
    top = argparse.ArgumentParser(
        prog="hetccl", description="JAX collectives across clusters of different accelerators."
    )
    top.add_argument("--version", action="version", version=_version())
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for module in (run, demo, doctor, topo, secret, coordinator):
        module.add_parser(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `hetccl` command.

    Args:
        argv: the arguments, without the program's name; `sys.argv[1:]` by default.

    Returns:
        The exit status.

    Example:
        >>> main(["secret", "--out", "job.secret"])  # doctest: +SKIP
        0
    """
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:  # with the usage of the subcommand, which parse_args does not show
        arguments.parser.error(f"unknown arguments: {' '.join(unknown)}")
    return arguments.run(arguments)
