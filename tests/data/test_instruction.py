from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_formats import GENERATION, chat_tokenizer
from pydantic import ValidationError

from surogate.data.chat.instruction import InstructionOptions, encode_instruction
from surogate.data.tokenizer import Tokenizer
from surogate_core.errors import ConfigError

ROW = {"instruction": "Greet.", "input": "Tom", "output": "Hello, Tom.", "sys": "Be brief."}


@pytest.fixture
def chat(tmp_path: Path) -> Tokenizer:
    return chat_tokenizer(tmp_path / "model", GENERATION)


def both(row: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> tuple[str, str]:
    """Return the text before the trained part, and the trained part."""
    encoded = encode_instruction(row, tokenizer, InstructionOptions(**options))
    at = encoded.trained.index(True)
    trained = [token for token, on in zip(encoded.tokens, encoded.trained, strict=True) if on]
    return tokenizer.decode(encoded.tokens[:at]), tokenizer.decode(trained)


def asked(text: str, system: str = "") -> str:
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


ANSWER = "Hello, Tom.<|im_end|>"


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, asked("Greet.")),
        ({"input_field": "input"}, asked("Greet.\nTom")),
        ({"input_field": "input", "prompt_format": "{input}: {instruction}"}, asked("Tom: Greet.")),
        ({"prompt_format_no_input": "Q: {instruction}\nA: {output}"}, asked("Q: Greet.\nA:")),
        ({"system_prompt": "Be kind."}, asked("Greet.", "Be kind.")),
        ({"system_prompt_type": "field", "system_prompt_field": "sys"}, asked("Greet.", "Be brief.")),
        ({"system_prompt_field": "sys", "prompt_format_no_input": "{system} {instruction}"},
         asked("Be brief. Greet.")),
    ],
)  # fmt: skip
def test_the_prompt_is_filled_in_and_the_output_trained(options: dict[str, Any], prompt: str, chat: Tokenizer) -> None:
    assert both(ROW, chat, **options) == (prompt, ANSWER)


def test_braces_in_the_data_are_text(chat: Tokenizer) -> None:
    assert both({**ROW, "instruction": "{input} {x}"}, chat)[0] == asked("{input} {x}")


def test_a_row_without_input_has_its_own_format(chat: Tokenizer) -> None:
    assert both({**ROW, "input": None}, chat, input_field="input")[0] == asked("Greet.")


def test_without_chat_template_prompt_output_and_eos_are_text(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "plain", None)
    assert both(ROW, tokenizer, use_chat_template=False) == ("Greet.\n", ANSWER)
    with pytest.raises(ConfigError, match="has no chat template"):
        both(ROW, tokenizer)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**ROW, "output": ""}, "column 'output' is empty"),
        ({**ROW, "output": ["x"]}, "column 'output' holds a list .*, not text"),
        ({**ROW, "instruction": "\udc00"}, "column 'instruction' contains half a surrogate pair"),
    ],
)
def test_unusable_rows_are_named(row: dict[str, Any], problem: str, chat: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=problem):
        both(row, chat)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"system_prompt_type": "field"}, "needs system_prompt_field"),
        ({"system_prompt_type": "fixed"}, "needs system_prompt"),
        ({"system_prompt": "a", "system_prompt_field": "b"}, "both given"),
        ({"prompt_format": "{output} and more"}, "has text after"),
        ({"prompt_format": "no placeholder"}, "no placeholder"),
    ],
)
def test_keys_that_contradict_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        InstructionOptions(**options)
