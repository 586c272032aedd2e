"""What identifies this host."""

from __future__ import annotations


def boot_id() -> str:
    """Identifies this running kernel; empty if it does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
