"""Reads the training command of a shell script: options of the program, of its launcher, and the environment."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surogate_core.api import ConfigError

from .leaves import Leaf, leaves_of
from .source import Source, typed

_COMMENT = re.compile(r"(?m)(^|(?<=\s))#[^'\"\n]*$")
_REDIRECT = re.compile(r"(?<=\s)\d?>>?(?:&\d|\s*[\w./${}-]+)")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}$]*))?\}|\$(\w+)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_BEFORE = {"do", "then", "else", "{", "exec", "nohup", "time", "sudo", "export", "declare", "local", "readonly"}

_LAUNCHERS = {"accelerate", "torchrun", "deepspeed", "uv", "srun", "mpirun", "numactl"}

_TRAINS: Mapping[str, frozenset[str]] = {
    "trl": frozenset({"sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "ppo"}),
    "llamafactory-cli": frozenset({"train"}),
    "axolotl": frozenset({"train"}),
    "unsloth": frozenset({"train"}),
    "unsloth-cli.py": frozenset(),
}
"""Program of a tool -> its commands that train; none: it has no commands."""

_NAMED = {"train", *_TRAINS["trl"], "reward_modeling", "online_dpo", "xpo", "nash_md", "gkd", "bco", "prm"}
"""Kinds of training, as a command of a program or the name of one of its scripts."""


def read_command(path: Path, text: str) -> Source:
    """Return what the one training command of a shell script sets. Raises ConfigError."""
    commands = _commands(path, text)
    variables = _variables(commands)
    found = [(place, words) for words in commands if (place := _program(words)) is not None]
    known = [(place, words) for place, words in found if Path(words[place]).name in _TRAINS or "-m" in words[:place]]
    training = [row for row in known if _trains(*row)] or [row for row in found if row not in known and _trains(*row)]
    if not training:
        raise ConfigError(f"{path}: has no options (--key value). Give the command line of a run.")
    if len(training) > 1:
        raise ConfigError(
            f"{path}: trains {len(training)} times: {'; '.join(' '.join(words)[:50] for _, words in training)}. "
            "Convert one command at a time, each in a file of its own."
        )
    source = Source([])
    _read(*training[0], variables, source)
    for place, words in known:
        if words is not training[0][1]:
            source.leaves.append(
                Leaf(("commands", Path(words[place]).name), " ".join(words[place:]), table="launchers")
            )
    return source


def _commands(path: Path, text: str) -> list[list[str]]:
    plain = _REDIRECT.sub(" ", _COMMENT.sub("", text.replace("\\\r\n", " ").replace("\\\n", " ")))
    if "<<" in plain:
        raise ConfigError(f"{path}: has a text in place (<<). Give a file with the training command alone.")
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        words = [*lexer]
    except ValueError as error:
        raise ConfigError(f"{path}: is not a command line: {error}.") from None
    commands: list[list[str]] = [[]]
    for word in words:
        if word and not word.strip(";&|\n"):
            commands.append([])
        elif commands[-1] or word not in _BEFORE:
            commands[-1].append(word)
    return [words for words in commands if words]


def _variables(commands: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the variables that are assigned one text in the whole script."""
    given: dict[str, set[str]] = {}
    for words in commands:
        matches = [_ASSIGNED.fullmatch(word) for word in words]
        for match in matches if all(matches) else ():
            assert match is not None
            given.setdefault(match[1], set()).add(match[2])
    return {name: values.pop() for name, values in given.items() if len(values) == 1}


def _program(words: Sequence[str]) -> int | None:
    """Return the place of the program that trains, after its launcher."""
    first = next((Path(word).name for word in words if not _ASSIGNED.fullmatch(word)), "")
    if not (first in _LAUNCHERS or first in _TRAINS or first.endswith(".py") or first.startswith("python")):
        return None
    for place, word in enumerate(words):
        name = Path(word).name
        module = place > 0 and words[place - 1] == "-m" and word.split(".")[0] in ("axolotl", "llamafactory", "trl")
        if name in _TRAINS or module or (name.endswith(".py") and not word.startswith("-")):
            return place
    return None


def _trains(place: int, words: Sequence[str]) -> bool:
    commands = _TRAINS.get(Path(words[place]).name)
    if commands:
        return any(word in commands for word in words[place + 1 : place + 2])
    if words[place - 1 : place] == ["-m"]:
        return words[place].rpartition(".")[2] in _NAMED | {"cli", "launcher"}
    return any(word.startswith("--") for word in words[place:])


def _read(place: int, words: Sequence[str], variables: Mapping[str, str], source: Source) -> None:
    """Read environment, launcher, program, command and options of one command."""
    program = Path(words[place]).name
    source.words |= {program, *words[place].split(".")}
    launcher = [*words[:place]]
    while launcher and (match := _ASSIGNED.fullmatch(launcher[0])):
        source.leaves.append(Leaf(("environment", match[1]), typed(match[2]), table="launchers"))
        del launcher[0]
    _options(launcher, variables, source, ("launcher",))
    rest = [*words[place + 1 :]]
    name = program.removesuffix(".py").rpartition(".")[2]
    if rest and rest[0] in _NAMED and program in _TRAINS:
        name = rest.pop(0)
    if name in _NAMED and name != "train":
        source.leaves.append(Leaf(("command",), name))
        source.words.add(name)
    _options(rest, variables, source, ())
    source.words |= {leaf.place[0] for leaf in source.leaves if not leaf.table}


def _options(words: Sequence[str], variables: Mapping[str, str], source: Source, under: tuple[str, ...]) -> None:
    """Add a leaf for each option with its values, and for each word without one."""
    table = "launchers" if under else ""
    given: list[tuple[str, list[str]]] = []
    waiting = [*words]
    while waiting:
        word, known = _expanded(waiting.pop(0), variables)
        if known and " --" in f" {word}" and " " in word.strip():  # a variable that holds options
            waiting[:0] = word.split()
        elif word.startswith("-") and not _NUMBER.fullmatch(word):
            name, equals, value = word.lstrip("-").partition("=")
            given.append((name.replace("-", "_"), [value] if equals else []))
        elif given and (given[-1][0] or not known):
            given[-1][1].append(word)
        elif under:
            source.words.add(Path(word).name)
        elif match := _ASSIGNED.fullmatch(word):  # key=value, as llamafactory-cli takes them
            given += [(match[1], [match[2]]), ("", [])]
        else:
            given += [("config" if word.endswith((".yaml", ".yml", ".json")) else word, [word]), ("", [])]
    for owner, (name, values) in enumerate(((name, values) for name, values in given if name), 1):
        if not values and name.startswith("no_"):
            name, values = name.removeprefix("no_"), ["false"]
        if under and name in ("m", "u"):  # python -m module
            continue
        code = any("$" in word or "`" in word for word in values)
        found: list[Any] = [_typed(word) for word in values] or [True]
        if code:
            source.leaves.append(Leaf((*under, name), " ".join(values), owner=owner, code=True, table=table))
        else:
            source.leaves += leaves_of(found[0] if len(found) == 1 else found, (*under, name), owner=owner, table=table)


def _expanded(word: str, variables: Mapping[str, str]) -> tuple[str, bool]:
    """Return a word with its variables replaced, and whether all of them are known."""
    for _ in range(8):
        before = word
        word = _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), word)
        if word == before:
            break
    return word, "$" not in word and "`" not in word


def _typed(word: str) -> Any:
    if word[:1] in "{[" and word:
        try:
            return json.loads(word)
        except ValueError:
            return word
    return typed(word)
