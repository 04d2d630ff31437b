from __future__ import annotations

import pytest
from acme_plugin.plugin import Options, encode

from surogate_core.api import ConfigError


class Bytes:
    """A tokenizer: the bytes of a text, and 256 at the end of a document."""

    eos_id = 256

    def encode_ids(self, text: str) -> list[int]:
        return list(text.encode())


def test_only_the_answer_is_trained() -> None:
    found = encode({"question": "ab", "answer": "c"}, Bytes(), Options())
    assert found.tokens == [97, 98, 99, 256]
    assert found.trained == [False, False, True, True]


def test_a_row_without_text_is_an_error() -> None:
    with pytest.raises(ConfigError, match="must be text"):
        encode({"question": "ab", "answer": None}, Bytes(), Options())
