"""The bundled tokenizer is made from the bundled text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from surogate.data.tokenizer import Tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOKENIZER = EXAMPLES / "tiny-qwen3"


def test_script_writes_the_committed_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "make_tokenizer.py"), "--out", str(tmp_path)], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TOKENIZER / name).read_bytes()


def test_tokenizer_covers_the_text_exactly() -> None:
    text = (EXAMPLES / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer(TOKENIZER)
    ids = np.array(tokenizer.encode_ids(text))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2048, 0, 0, None)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode()) == 1_115_394


def test_transformers_reads_the_same_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    text = (EXAMPLES / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:3000] + "\n\n é 12 "
    theirs = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    assert theirs(text)["input_ids"] == Tokenizer(TOKENIZER).encode_ids(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token, theirs.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    assert json.loads((TOKENIZER / "tokenizer_config.json").read_text())["bos_token"] is None
