"""Loading any config succeeds or raises one clear error: no traceback, no hang, no message without end.

SUROGATE_FUZZ_SEED=<seed> starts at another seed, SUROGATE_FUZZ_CASES=<n> runs more; a failure prints its seed.
"""

from __future__ import annotations

import copy
import os
import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing.config_mutations import GOOD, mutated

from surogate.config.load import load_config, resolved
from surogate.config.yaml import read_yaml
from surogate_core.errors import SurogateError
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import Registry

CASES = int(os.environ.get("SUROGATE_FUZZ_CASES", "1000"))
LONGEST_LINE = 1_000
"""Each problem is a line, and all of them are listed."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry({})


def _outcome(config: Any, registry: Registry, seed: int) -> bool:
    """Return whether the config was accepted. Fails the test on anything but success or one clear error."""
    mode = random.Random(seed).choice(("train", "pt", "sft"))
    try:
        loaded = load_config(config, registry=registry, mode=mode, source="run.yaml")
        assert load_config(resolved(loaded), registry=registry, mode=mode, source="run.yaml") == loaded
        return True
    except SurogateError as error:
        text = str(error)
        assert error.exit_code == 2, f"seed {seed}: exit code {error.exit_code}: {text[:500]}"
        longest = max(text.splitlines(), key=len)
        assert len(longest) < LONGEST_LINE, f"seed {seed}: {len(longest)} characters: {longest[:500]}"
        assert all(line.startswith("run.yaml: ") and len(line) > 15 for line in text.splitlines()), (
            f"seed {seed}: {text}"
        )
        return False
    except Exception:
        pytest.fail(f"seed {seed}: {traceback.format_exc()[-3000:]}")


@pytest.mark.parametrize("cases", [CASES, pytest.param(4 * CASES, marks=pytest.mark.slow)])
def test_mutated_configs_load_or_are_refused(registry: Registry, cases: int) -> None:
    first = int(os.environ.get("SUROGATE_FUZZ_SEED", 1))
    print(f"seeds {first} to {first + cases - 1}")
    assert _outcome(copy.deepcopy(GOOD), registry, 0), "the unmutated config must load"
    accepted = sum(_outcome(mutated(seed), registry, seed) for seed in range(first, first + cases))
    if cases >= 1000:
        assert 0.02 < accepted / cases < 0.9, f"{accepted} of {cases} accepted: the mutations must reach both outcomes"


def test_mutated_files_are_read_or_are_refused(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD).encode()
    path = tmp_path / "run.yaml"
    first = int(os.environ.get("SUROGATE_FUZZ_SEED", 1))
    for seed in range(first, first + CASES // 5):
        choice = random.Random(seed)
        data = bytearray(text)
        for _ in range(choice.choice((1, 2, 10))):
            at = choice.randrange(len(data))
            piece = choice.choice(
                (b"", b"\t", b"\n", b": ", b"- ", b"{", b"[[[[", b"&a ", b"*a", b"!!int ", b"'", b"\xff", b"|")
            )
            data[at : at + choice.choice((0, 1, 5))] = piece
        path.write_bytes(data)
        try:
            assert isinstance(read_yaml(path), dict)
        except SurogateError as error:
            assert error.exit_code == 2 and len(str(error)) < 1000, f"seed {seed}: {error}"
        except Exception:
            pytest.fail(f"seed {seed}: {traceback.format_exc()[-3000:]}")
