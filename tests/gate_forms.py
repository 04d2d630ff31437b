"""Forms of the gate of experts, by the attributes of its ops."""

from __future__ import annotations

from typing import Any

GPT_OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "offset": 1.0, "interleaved": True}
FORMS: tuple[dict[str, Any], ...] = (
    GPT_OSS,
    {**GPT_OSS, "limit": 1.0},
    {"limit": 0.5},
    {"interleaved": True},
    {"alpha": 0.7, "offset": -1.0},
)
"""The gate of gpt-oss, with a limit that some reach and one that many reach, and each part alone."""
