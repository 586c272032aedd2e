"""`hetccl doctor`: what this machine has for exchanges, and what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from jax_hetccl.doctor import BAD, Check, examine

_SIGNS = {"good": "ok", "note": "note", "bad": "BAD"}
_COLOURS = {"good": "green", "note": "yellow", "bad": "bold red"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at this machine: software, limits, GPUs, network",
        description="Looks at what jax_hetccl would use on this machine. Needs no GPU and starts nothing. Exit status: 1 "
        "if something is bad, else 0.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="lines instead of a table")
    how.add_argument("--json", action="store_true", help="a JSON list")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit status."""
    checks = examine()
    if arguments.json:
        print(json.dumps([dataclasses.asdict(c) for c in checks], indent=1))
    elif arguments.plain:
        for c in checks:
            print(plain(c))
    else:
        _table(checks)
    return int(any(c.state == BAD for c in checks))


def plain(check: Check) -> str:
    """One line of a finding."""
    fix = f" -> {check.fix}" if check.fix else ""
    return f"{_SIGNS[check.state]:>4}  {check.name}: {check.found}{fix}"


def _table(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "what", "found", "what to do")
    for c in checks:
        sign = f"[{_COLOURS[c.state]}]{_SIGNS[c.state]}[/]"
        table.add_row(sign, c.name, escape(c.found), escape(c.fix))
    Console().print(table)
