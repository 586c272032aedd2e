"""The command line of `worker` and `reference`."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse() -> argparse.Namespace:
    """Reads it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, required=True, help="what corpus.Corpus.save wrote")
    parser.add_argument("--reports", type=Path, required=True, help="folder for the records")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows-per-device", type=int, required=True)
    return parser.parse_args()
