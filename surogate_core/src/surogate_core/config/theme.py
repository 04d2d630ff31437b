"""Base of the themes: classes of keys of the YAML file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Keys(BaseModel):
    # Validators are built on first use: most starts of the CLI never validate a theme by itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)
