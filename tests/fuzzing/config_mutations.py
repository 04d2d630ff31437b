"""Seeded mutations of a good config: keys dropped, renamed, added, and values replaced by odd ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from surogate.config.keys import ALIASES, DEAD, MEANS, NOT_YET, SECTIONS
from surogate.config.schema import TrainConfig

GOOD: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "output_dir": "out",
    "datasets": [{"path": "a.txt", "type": "text", "sample_by": "line"}, {"path": "b", "subset": "c", "samples": 5}],
    "validation_datasets": [{"path": "v.txt"}],
    "max_steps": 10,
    "sequence_len": 128,
    "learning_rate": "2e-4",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "recipe": "bf16",
    "optimizer": "adamw",
    "adamw_beta1": 0.9,
    "model_dtype": "fp32",
    "lmhead_chunks": "auto",
    "recompute_block": True,
    "report_to": ["none"],
    "distributed": {"num_nodes": 1},
    "model_type": "auto",
}

KEYS = sorted({*TrainConfig.model_fields, *NOT_YET, *SECTIONS, *DEAD, *MEANS, *ALIASES, "adamw_epsilon"})

NUMBERS = (0, -1, 1, 3, 2**31, 2**63, -(2**64), 10**400, 10**5000, 0.5, -0.0, 1e-320, 1e308)
OTHERS = (float("nan"), float("inf"), float("-inf"), True, False, None, b"bytes", 1j, (1, 2), {1}, object())
WORDS = ("", "true", "null", "nan", "1e999", "1_000", "$HOME", "$NOT_SET_9", "${", "$$", "auto", "fp16", "../..", "~")
ALPHABETS = (
    "abc_-. ",
    "0123456789.eE+-_",
    "${}%\\'\":#&*!|>@`",
    "\0\x07\x1b\x85\n\r\t\u2028",
    "éß漢🦊\ud800\ufeff\u202e",
)


def _text(random: random.Random) -> str:
    text = "".join(random.choice(random.choice(ALPHABETS)) for _ in range(random.choice((0, 1, 4, 12))))
    return text * random.choice((1, 1, 1, 1, 1, 1, 1, 5000))


def _scalar(random: random.Random) -> Any:
    pool: Sequence[Any] = random.choice((NUMBERS, OTHERS, WORDS, ()))
    return random.choice(pool) if pool else _text(random)


def _deep(random: random.Random) -> Any:
    value: Any = _scalar(random)
    key = _text(random)
    for level in range(random.choice((3, 40, 40, 2000))):
        value = [value] if level % 2 else {key: value}
    return value


def _value(random: random.Random) -> Any:
    return random.choice(
        (
            _scalar,
            _scalar,
            _scalar,
            _deep,
            lambda r: [_scalar(r) for _ in range(r.choice((0, 1, 3)))] * r.choice((1, 1, 1, 500)),
            lambda r: {_text(r): _scalar(r) for _ in range(3)},
            lambda r: {r.choice((1, None, 2.5, True, ("a",))): _scalar(r)},
            lambda r: [copy.deepcopy(GOOD["datasets"][0]) for _ in range(3)],
        )
    )(random)


def _drop(config: dict[Any, Any], random: random.Random) -> None:
    config.pop(random.choice(list(config)), None)


def _rename(config: dict[Any, Any], random: random.Random) -> None:
    key = random.choice(list(config))
    written = str(key)
    at = random.randrange(len(written) + 1)
    config[written[:at] + random.choice(("", "x", "-", _text(random))) + written[at + 1 :]] = config.pop(key)


def _replace(config: dict[Any, Any], random: random.Random) -> None:
    config[random.choice(list(config))] = _value(random)


def _add(config: dict[Any, Any], random: random.Random) -> None:
    config[random.choice((random.choice(KEYS), random.choice(KEYS), _text(random), 7, None))] = _value(random)


def _inside(config: dict[Any, Any], random: random.Random) -> None:
    """Mutate an entry of a dataset or of a section."""
    inner = [entry for key in ("datasets", "validation_datasets") for entry in _entries(config.get(key))]
    inner += [config["distributed"]] if isinstance(config.get("distributed"), dict) else []
    if inner:
        target = random.choice(inner)
        random.choice((_drop, _rename, _replace))(target, random) if target else target.update(path=_value(random))


def _entries(value: Any) -> list[dict[Any, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


MUTATIONS: tuple[Callable[[dict[Any, Any], random.Random], None], ...] = (
    _drop,
    _rename,
    _replace,
    _replace,
    _add,
    _inside,
)


def mutated(seed: int) -> dict[Any, Any]:
    """Return `GOOD` with 1 to 20 random mutations; the same seed gives the same config."""
    choice = random.Random(seed)
    config: dict[Any, Any] = copy.deepcopy(GOOD)
    for _ in range(choice.choice((1, 1, 1, 2, 5, 20))):
        if config:
            choice.choice(MUTATIONS)(config, choice)
    return config
