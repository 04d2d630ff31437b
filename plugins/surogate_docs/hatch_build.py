"""Puts the pages of the repository into the wheel, so that nothing is written twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Pages(BuildHookInterface):  # type: ignore[misc]
    """An editable install reads the pages where they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            pages = [*DOCS.rglob("*.md"), DOCS / "llms.txt"]
            build_data["force_include"] |= {str(page): f"surogate_docs/docs/{page.relative_to(DOCS)}" for page in pages}
