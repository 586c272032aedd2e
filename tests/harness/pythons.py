"""The interpreters of tests with mixed versions, and of those with MaxText.

``HETCCL_TEST_PYTHONS=/path/to/one/python:/path/to/other/python``, ``HETCCL_TEST_MAXTEXT_PYTHON=/path/to/python``. The
variables are taken out of the environment when the tests start: jax_hetccl refuses settings under its prefix that it does
not know.
"""

from __future__ import annotations

import os

_found = tuple(p for p in os.environ.pop("HETCCL_TEST_PYTHONS", "").split(os.pathsep) if p)
_maxtext = os.environ.pop("HETCCL_TEST_MAXTEXT_PYTHON", "")


def other_pythons() -> tuple[str, ...]:
    """Two interpreters with different versions of jax, or an empty tuple."""
    return _found if len(_found) == 2 else ()


def maxtext_python() -> str:
    """An interpreter in which MaxText is installed, and jax_hetccl unless the source tree has it built; or nothing."""
    return _maxtext
