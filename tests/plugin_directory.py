"""The directory of plugins, docs/plugins.toml, and its page: `python tests/plugin_directory.py > docs/plugins.md`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIRECTORY = ROOT / "docs/plugins.toml"
PAGE = ROOT / "docs/plugins.md"
COMMAND = "command"

HEAD = """\
# Plugins

What is known to plug into Surogate. `pip install` a package and it is found; `surogate plugins` lists what is
installed. The list is [plugins.toml](plugins.toml), which says how to add a plugin. `make test-plugins` installs each
into an environment of its own and runs [`surogate plugins test`](test-a-plugin.md) on it.
"""


@dataclass(frozen=True)
class Entry:
    """A plugin of the directory; docs/plugins.toml describes the fields."""

    distribution: str
    provides: Mapping[str, Sequence[str]]
    summary: str
    use: str
    source: str
    needs: str

    @property
    def folder(self) -> Path | None:
        """The folder of this repository that it is in; None: elsewhere."""
        return None if "://" in self.source else ROOT / self.source

    @property
    def is_plugin(self) -> bool:
        """Whether it has definitions, which `surogate plugins test` tests, and not only commands."""
        return set(self.provides) != {COMMAND}


def entries() -> list[Entry]:
    """Return the plugins of the directory, in its order."""
    return [Entry(**fields) for fields in tomllib.loads(DIRECTORY.read_text())["plugin"]]


def page() -> str:
    """Return the page of the directory: a table for each kind."""
    lines = [HEAD]
    for kind in dict.fromkeys(next(iter(entry.provides)) for entry in entries()):
        lines += [f"## {kind.capitalize()}{'es' if kind.endswith('s') else 's'}\n"]
        lines += ["| package | what | use | needs |", "|---|---|---|---|"]
        lines += [_row(entry) for entry in entries() if next(iter(entry.provides)) == kind]
        lines += [""]
    return "\n".join(lines)


def _row(entry: Entry) -> str:
    address = f"../{entry.source}" if entry.folder else entry.source
    return f"| [{entry.distribution}]({address}) | {entry.summary} | `{entry.use}` | {entry.needs} |"


if __name__ == "__main__":
    print(page(), end="")
