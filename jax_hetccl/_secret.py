"""The job's secret: made by `hetccl secret`, checked before use, shown nowhere."""

from __future__ import annotations

import logging
import os
import re
import secrets

_log = logging.getLogger(__name__)

_HEX = re.compile(r"[0-9a-fA-F]+\Z")
_BASE64 = re.compile(r"[A-Za-z0-9_+/-]+={0,2}\Z")


def generate() -> str:
    """Returns a new secret: 256 random bits as 43 URL-safe characters.

    Example:
      >>> check_strength(generate())
    """
    while True:  # a random text may by chance look like a passphrase or an option; draw again
        text = secrets.token_urlsafe(32)
        if text[0] in "-_":
            continue
        try:
            check_strength(text)
        except ValueError:
            continue
        return text


def read_file(path: str) -> str:
    """Returns the secret in a file; warns if others than its owner may read it.

    Raises:
      OSError, UnicodeDecodeError: it cannot be read.
    """
    with open(path) as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            _log.warning("the secret in %s may be read by other users (mode %o): chmod 600 %s", path, mode, path)
        return file.read().strip()


def check_strength(text: str) -> None:
    """Raises ValueError unless `text` is a random value of at least 128 bits.

    Accepted are hexadecimal texts of 32 digits or more and base64 texts of 22 characters or more.
    Passphrases are refused: their length says nothing about how hard they are to guess, and the
    keys are derived without a slow hash. The error never repeats the secret.
    """
    advice = "; make one with `hetccl secret`"
    if _HEX.match(text):
        bits = 4 * len(text)
    elif _BASE64.match(text):
        bits = 6 * len(text.rstrip("="))
        if text.lower() == text or text.upper() == text:
            raise ValueError("looks like words, not like random bits" + advice)
    else:
        raise ValueError("expected hexadecimal or base64 characters only" + advice)
    if bits < 128:
        raise ValueError(f"has at most {bits} bits, at least 128 are needed" + advice)
    # 22 random base64 or 32 random hex characters have fewer than 8 different ones with p < 1e-6.
    if len(set(text)) < 8:
        raise ValueError("repeats a few characters" + advice)
