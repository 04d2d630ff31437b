"""Layout of workspaces. Must match <surogate/workspace.h>."""

from __future__ import annotations

ALIGNMENT = 256
"""Every part of a workspace begins at a multiple of this many bytes."""


def aligned(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
