"""The text to train on, the Python standard library's own sources, and the batches drawn from it.

Everything random is drawn here, once, and handed to all processes in one file: clusters may run different
versions of Python and NumPy, and must still see the same text and the same batches.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

import numpy as np

# Printable ASCII and the end of a line; every other character becomes the last one.
ALPHABET = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
VOCABULARY = len(ALPHABET)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text and the batches to draw from it.

    Attributes:
        tokens: the text as indices into `ALPHABET`, uint8.
        offsets: `[steps, rows]`: where each row of each global batch starts.
        length: characters in a row; a row has one more, the target of the last one.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    length: int

    def rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` of the global batch of one step, int32 `[stop - start, length + 1]`."""
        offsets = self.offsets[step, start:stop]
        return self.tokens[offsets[:, None] + np.arange(self.length + 1)].astype(np.int32)

    def save(self, path: Path) -> None:
        """Writes everything to one `.npz` file."""
        np.savez(path, tokens=self.tokens, offsets=self.offsets, length=self.length)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Reads what `save` wrote."""
        with np.load(path) as file:
            return cls(file["tokens"], file["offsets"], int(file["length"]))


def encode(text: str) -> np.ndarray:
    """Text as indices into `ALPHABET`; tabs count as four spaces.

    Example:
        >>> encode("a b").tolist()
        [66, 1, 67]
    """
    table = np.full(0x110000, VOCABULARY - 1, np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(VOCABULARY)
    codes = np.frombuffer(text.replace("\t", "    ").encode("utf-32-le"), np.uint32)
    return table[codes]


def standard_library(limit: int = 1_000_000) -> str:
    """The sources of this Python's standard library: its top-level modules, by name.

    Args:
        limit: at most so many characters.

    Raises:
        FileNotFoundError: this Python has no source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(folder.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, texts)) >= limit:
            break
    text = "".join(texts)[:limit]
    if len(text) < 10_000:
        raise FileNotFoundError(f"{folder} holds no Python sources to train on; use a Python that has them")
    return text


def make(steps: int, rows: int, length: int, seed: int = 0, text: str | None = None) -> Corpus:
    """Reads the text and draws all batches.

    Args:
        steps: how many global batches.
        rows: rows of a global batch.
        length: characters in a row.
        seed: of the draw.
        text: to train on; `standard_library()` by default.
    """
    tokens = encode(standard_library() if text is None else text)
    offsets = np.random.default_rng(seed).integers(0, len(tokens) - length - 1, (steps, rows))
    return Corpus(tokens, offsets, length)
