"""What is said of the JSON beside an NF4 matrix that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from surogate_core.api import ConfigError
from surogate_qlora_nf4.options import Nf4Options
from surogate_qlora_nf4.quant_state import QuantState, read_state

STATE = {
    "quant_type": "nf4",
    "blocksize": 64,
    "dtype": "bfloat16",
    "shape": [64, 128],
    "nested_blocksize": 256,
    "nested_dtype": "float32",
    "nested_offset": 0.25,
}
MISSING = object()


def read(content: bytes, **options: Any) -> QuantState:
    return read_state(torch.tensor(list(content), dtype=torch.uint8), (64, 128), Nf4Options(**options))


def changed(key: str, value: object) -> bytes:
    state = {**STATE, key: value}
    return json.dumps({name: found for name, found in state.items() if found is not MISSING}).encode()


def test_a_state_of_bitsandbytes_is_read() -> None:
    assert read(json.dumps(STATE).encode()) == QuantState(64, 0.25)
    plain = {key: value for key, value in STATE.items() if not key.startswith("nested")}
    assert read(json.dumps(plain).encode(), qlora_bnb_double_quant=False) == QuantState(64, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not JSON", r"is no JSON \(Expecting value"),
        (b"\xff\xfe\xfd", "is no JSON "),
        (b"[1]", "is no JSON object, but list"),
        (changed("shape", None), r"shape in .* is null; expected \[64, 128\] from config\.json"),
        (changed("shape", [128, 64]), r"shape in .* is \[128, 64\]; expected"),
        (changed("quant_type", "fp4"), 'quant_type in .* is "fp4"; only nf4 can be read'),
        (changed("quant_type", MISSING), "quant_type in .* is missing"),
        (changed("blocksize", 32), "blocksize in .* is 32; only 64, 128, 256, 512 can be read"),
        (changed("blocksize", 4096), "blocksize in .* is 4096; only"),
        (changed("blocksize", [64]), r"blocksize in .* is \[64\]; only"),
        (changed("blocksize", MISSING), "blocksize in .* is missing; only"),
        (changed("nested_blocksize", 64), "nested_blocksize in .* is 64; only 256 can be read"),
        (changed("nested_offset", MISSING), "nested_offset in .* is missing; it must be a number"),
        (changed("nested_offset", "x"), 'nested_offset in .* is "x"; it must be a number'),
        (changed("nested_offset", float("nan")), "nested_offset in .* is NaN; it must be a number"),
        (changed("nested_offset", 1e300), r"nested_offset in .* is 1e\+300; it must be a number"),
    ],
)
def test_a_damaged_state_is_refused_in_one_line_with_what_to_do(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read(content)
    assert str(refused.value).endswith("Use the original checkpoint, or download this one again.")
    assert "\n" not in str(refused.value)


def test_a_state_that_is_not_stored_as_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be bytes, found torch\.float32"):
        read_state(torch.zeros(40), (64, 128), Nf4Options())


def test_another_block_size_names_the_key_to_set() -> None:
    with pytest.raises(ConfigError, match=r"stored in blocks of 128, not 64\. Set qlora_bnb_block_size: 128"):
        read(changed("blocksize", 128))
