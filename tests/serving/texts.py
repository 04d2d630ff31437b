"""Texts and conversations whose tokens servers must make as training does."""

# ruff: noqa: RUF001  (texts of six scripts)

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXTS = (
    *("Hello, world!", "To be, or not to be: that is the question.", "naïve café déjà vu", "Ünïcödé GRÖSSE straße"),
    *("ÉCOLE École éCOLE eÉe", "cafe\u0301 nai\u0308ve", "İstanbul'da ılık", "łódź żółć ĄĘ", "ǅ ǈ ʰx Ⅷ ½ x²"),
    *("12", "1234567", "3.14159e-10", "1,000,000", "٣٤٥ ४५६", "a1b22c333"),
    *(" leading", "trailing ", "two  spaces", "many          spaces", "\ttab\tand\t\ttabs"),
    *("line\nbreak", "\n\n\nthree", " \n \n ", "crlf\r\nline\r\n", "a\u00a0b\u2003c"),
    *("it's IT'S they'LL we'Ve I'D", "don’t ‘quoted’ “text”"),
    *("def f(x):\n    return x ** 2  # square\n", "for (int i=0;i<n;i++){a[i]+=1;}"),
    *("https://example.org/a/b?c=d&e=%20f", '<div class="x">&amp;</div>'),
    *("你好，世界！", "私は学生です。カタカナ", "한국어 문장입니다.", "สวัสดีครับ", "नमस्ते दुनिया", "مرحبا بالعالم"),
    *("🙂🎉🚀", "👩‍👩‍👧‍👦 🏳️‍🌈", "€100 £5 ¥9 ©®™", "∀x∈ℝ: x²≥0 ⇒ ∑"),
    *("snake_case camelCase PascalCase SCREAMING_CASE", "!!!???...", "~`!@#$%^&*()_+-=[]{}|;':\",./<>?"),
    *("a/b//c/\n/d", "\u200bzero\u200bwidth", "", "x"),
    *("{first}user text{second}", "{second} spaced {first}\n{first}"),
)
"""`{first}` and `{second}` stand for special tokens of the tokenizer."""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wéather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool]
CHATS: tuple[Conversation, ...] = (
    ([{"role": "user", "content": "Hi, naïve 123"}], None, True),
    (
        [
            {"role": "user", "content": "  two\n\nlines "},
            {"role": "assistant", "content": "Sure: 42."},
            {"role": "user", "content": "ok"},
        ],
        None,
        True,
    ),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "私は"},
            {"role": "assistant", "content": "はい"},
        ],
        None,
        False,
    ),
    ([{"role": "user", "content": "Weather?"}], [TOOL], True),
)


def rendered(folder: Path) -> list[str]:
    """Return the conversations as text, but those that the template refuses."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer, texts = PreTrainedTokenizerFast.from_pretrained(folder), []
    for messages, tools, prompt in CHATS:
        try:
            texts.append(
                tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
            )
        except TemplateError:  # of a system message, in some
            continue
    return texts
