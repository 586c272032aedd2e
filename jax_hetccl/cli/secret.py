"""`hetccl secret`: make the secret of a job."""

from __future__ import annotations

import argparse
import os
import sys

from jax_hetccl._secret import generate


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "secret",
        help="make the secret of a job",
        description="Makes a new secret. Give the same one to every process, as HETCCL_SECRET or as "
        "HETCCL_SECRET_FILE.",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write it to a new file that only you can read, not to the screen"
    )
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit status."""
    secret = generate()
    if arguments.out is None:
        print(secret)
        return 0
    try:
        # Made with its final mode and never over an existing file: another's, or the secret of a running job.
        descriptor = os.open(arguments.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        hint = "; remove it first or choose another name" if isinstance(error, FileExistsError) else ""
        print(f"hetccl secret: {arguments.out}: {error.strerror}{hint}", file=sys.stderr)
        return 1
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
    print(f"{arguments.out}: set HETCCL_SECRET_FILE to this file for every process", file=sys.stderr)
    return 0
