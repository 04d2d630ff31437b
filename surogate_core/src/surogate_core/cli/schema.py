"""`surogate schema`: the JSON Schema of configs with the installed plugins."""

from __future__ import annotations

import json
from pathlib import Path

from ..config.json_schema import config_schema
from ..config.plugin_files import plugin_files, read_run
from ..plugins.discovery import load_registry


def schema_command(config: Path | None) -> int:
    registry = load_registry(files=plugin_files(read_run(config, ())) if config else ())
    print(json.dumps(config_schema(registry), indent=1))
    return 0
