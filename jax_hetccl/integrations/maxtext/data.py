"""Each cluster's own part of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class _Enlarged:
    """A configuration with another number of rows."""

    def __init__(self, config: Any, rows: int):
        self._config, self.global_batch_size_to_load = config, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def synthetic(original: Callable[..., Any], rows: Callable[[], tuple[int, int]]) -> Callable[..., Any]:
    """``SyntheticDataIterator.__init__``: this cluster's rows of the batch that one world of all devices would make.

    MaxText makes one batch from a fixed seed, and gives it again for every step. Without this, each cluster would train on
    the same rows.

    Args:
      original: the constructor.
      rows: how many rows the clusters before this one take, and how many all of them take.
    """

    def init(self: Any, config: Any, mesh: Any) -> None:
        first, everywhere = rows()
        original(self, _Enlarged(config, everywhere), mesh)
        own = slice(first, first + config.global_batch_size_to_load)
        self.config, self.data = config, tuple(x[own] for x in self.data)

    return init


def iterator(original: Callable[..., Any], processes: Callable[[Sequence[int]], list[int]]) -> Callable[..., Any]:
    """``create_process_specific_iterator``: a process reads its part of the data set among the processes of all clusters.

    Args:
      original: makes the iterator. The pipelines take a process's place in ``process_indices``, and its length, for the
        index and number of their shards.
      processes: enlarges ``process_indices`` by the other clusters' processes.
    """

    def make(
        config: Any, mesh: Any, process_indices: Sequence[int], input_iterator: Any, is_training: bool = True
    ) -> Any:
        return original(config, mesh, processes(process_indices), input_iterator, is_training)

    return make


def among_all(own: Sequence[int], before: int, after: int) -> list[int]:
    """A cluster's process indices at their place among the reading processes of all clusters.

    Args:
      own: the indices of the processes of this cluster that read.
      before: how many read in the clusters before it.
      after: how many read in those behind it.

    Returns:
      A list in which the others' places hold numbers that are no process's, so that ``in``, ``index`` and ``len`` say
      what a pipeline needs.

    Example:
      >>> among_all([0, 1], 1, 2)
      [-1, 0, 1, -1, -1]
    """
    return [-1] * before + list(own) + [-1] * after
