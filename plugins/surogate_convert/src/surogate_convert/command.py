"""`surogate convert`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from surogate_core.api import ConfigError, refuse_checkpoint

from .convert import Converted
from .convert import convert as converted_from
from .rules import TOOLS

WIDTH = 100


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and equal parts each in full."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML, JSON, shell or Python file of another trainer.")],
    tool: Annotated[
        str | None, typer.Option("--from", metavar="TOOL", help=f"{', '.join(TOOLS)}. Default: by the keys of FILE.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="New file for the config. Default: stdout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print config and notes as one JSON document.")] = False,
) -> None:
    """Convert a config of axolotl, TRL, LLaMA-Factory or Unsloth. What has no counterpart is named.

    Examples:
    surogate convert axolotl.yaml --output run.yaml
    surogate convert train.py --from trl
    """
    if tool is not None and tool not in TOOLS:
        raise ConfigError(f"--from {tool}: is not known. Give {', '.join(TOOLS)}.")
    done = converted_from(file, tool)
    config = yaml.dump(done.config, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    text = "\n".join(_head(file, done)) + f"\n\n{config}"
    if output is not None:
        _write_new(output, text)
    if as_json:
        print(json.dumps(to_json(done), indent=2, default=str))
    elif output is None:
        print(text, end="")
    print(f"{file}: {done.tool.title}; {_counts(done)}", file=sys.stderr)
    for key, said in done.missing:
        print(f"  no counterpart: {key}: {said}", file=sys.stderr)


def to_json(done: Converted) -> dict[str, object]:
    """Return config and notes as data: the contract of `surogate convert --json`."""
    notes = {name: [{"key": key, "note": said} for key, said in found] for name, found in _notes(done)}
    keys = {"converted": done.converted, "missing": len(done.missing), "unneeded": len(done.unneeded)}
    return {"tool": done.tool.name, "config": done.config, "keys": keys, **notes, "added": done.added}


def _counts(done: Converted) -> str:
    """Return what became of the values of the file: the three numbers add up to all of them."""
    return (
        f"{done.converted} of {len(done.leaves)} keys converted, {len(done.missing)} have no counterpart, "
        f"{len(done.unneeded)} are not needed"
    )


def _notes(done: Converted) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
    yield "differs", done.differs
    yield "missing", done.missing
    yield "unneeded", done.unneeded


def _by_reason(found: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for key, said in found:
        reasons.setdefault(said, []).append(key)
    return reasons


def _write_new(path: Path, text: str) -> None:
    """Write a new file whole, or none. Raises ConfigError."""
    refuse_checkpoint(path, "--output: ")
    made = False
    try:
        with path.open("x", encoding="utf-8") as new:
            made = True
            new.write(text)
    except OSError as error:
        if made:
            path.unlink()
        remedy = "Make room" if made else "Give a new file"
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}. {remedy}.") from None


def _head(file: Path, done: Converted) -> Iterator[str]:
    """Yield the notes as comments."""
    yield f"# Converted from {done.tool.title}: {file.name}"
    yield f"# {_counts(done)}"
    for title, found in (("Differs in meaning", done.differs), ("No counterpart", done.missing)):
        if found:
            yield f"#\n# {title}:"
        for key, said in found:
            yield from _comment(f"{key}: {said}")
    if done.unneeded:
        yield "#\n# Not needed:"
    for said, keys in _by_reason(done.unneeded).items():
        yield from _comment(f"{', '.join(keys)}: {said}")
    if done.added:
        yield f"#\n# Defaults of {done.tool.title}, set because those of Surogate are others:"
        yield from _comment(", ".join(done.added))


def _comment(text: str) -> list[str]:
    """Return lines of a comment. A value with a line break stays in it."""
    plain = " ".join(text.split())
    return textwrap.wrap(plain, WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_long_words=False)
