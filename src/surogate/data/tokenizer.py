"""The fast tokenizer of a model directory. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from surogate_core.api.json_object import read_json_object
from surogate_core.api.regular_file import is_regular, refuse_special
from surogate_core.errors import ConfigError

from ..hub.files import TEMPLATE_DIRECTORY
from .chat.template import ChatTemplate, read_chat_template
from .divide import More, reading, whole
from .line_cuts import LINE_CUT, has_line_cuts

PIECE_CHARS = 1 << 18
"""Longer texts are read in pieces of about this length, if they may be cut: in parallel, and with less memory."""

_PIECES_AT_ONCE = 16
"""Pieces that are encoded in parallel."""
_WINDOW_CHARS = 1 << 10
"""Characters on each side of a cut whose tokens are compared with and without it."""
_TRIED_CUTS = 16
"""Cuts that are compared until more of the text is read."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
HIGHEST_ID = 1 << 24
"""The highest id of a token. Vocabularies in use have 2 % of that."""
_LONG_NUMBER = re.compile(rb":\s*(\d{8,})")
_SPECIAL_TOKENS = "special_tokens_map.json"
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FINGERPRINTED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Tokenizer:
    """Converts text to token ids.

    bos_id, eos_id, pad_id: None if the tokenizer defines none. adds_bos: whether it starts every text with bos.
    vocab_size: largest id + 1. fingerprint: sha256 over the files of the tokenizer, and the date that the chat template
    writes, if it asks for one.
    """

    def __init__(self, directory: Path, where: str = "model", day: date | None = None) -> None:
        """Read tokenizer.json and related files in `directory`. Raises ConfigError, beginning with `where`.

        day: the date that chat templates write which ask for one; None: that of each rendering.
        """
        self.directory, self.day = directory, day
        self._backend = _read_backend(directory, where)
        self._spec: dict[str, Any] = json.loads(self._backend.to_str())
        settings = self._settings = _read_settings(directory, where)
        self.bos_id = self._special("bos", settings, where)
        self.eos_id = self._special("eos", settings, where)
        self.pad_id = self._special("pad", settings, where)
        self.adds_bos = self.bos_id is not None and self._prepends(self.bos_id, settings)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.fingerprint = self._fingerprint()

    def encode_ids(self, text: str) -> list[int]:
        """Return the tokens of `text`, without bos or eos. Special tokens written in the text are recognised."""
        if len(text) > PIECE_CHARS and self._has_line_cuts:
            return list(self._of_pieces(self.pieces(reading(text))))
        return self.encode_batch([text])[0]

    def _of_pieces(self, pieces: Iterator[str]) -> Iterator[int]:
        """Yield the tokens of some pieces after those of others: a backend holds many times the text."""
        while some := list(islice(pieces, _PIECES_AT_ONCE)):
            for ids in self.encode_batch(some):
                yield from ids

    def pieces(self, more: More) -> Iterator[str]:
        """Yield pieces of a text. Their tokens, one after the other, are those of the text.

        A text that must not be cut, by its lines or by the tokenizer, is one piece.
        """
        if not self._has_line_cuts:
            yield from whole(more)
            return
        text, start, ended = "", PIECE_CHARS, False
        while True:
            cut = self._cut(text, start, ended)
            if cut is not None:
                yield text[:cut]
                text, start = text[cut:], PIECE_CHARS
            elif ended:
                yield text
                return
            else:
                start = max(start, len(text) - 2 * _WINDOW_CHARS)
                read = more(max(PIECE_CHARS, len(text)))  # doubling: linear even without any cut
                text, ended = text + read, not read

    def _cut(self, text: str, start: int, ended: bool) -> int | None:
        """Return the first cut after `start`, if the tokens around it are the same with it."""
        for line_break in islice(LINE_CUT.finditer(text, start), _TRIED_CUTS):
            cut = line_break.end()
            before, after = text[max(0, cut - _WINDOW_CHARS) : cut], text[cut : cut + _WINDOW_CHARS]
            if len(after) < _WINDOW_CHARS and not ended:
                return None
            uncut, first, second = self.encode_batch([before + after, before, after])
            if uncut == first + second:
                return cut
        return None

    @cached_property
    def _has_line_cuts(self) -> bool:
        return has_line_cuts(self._spec)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode_ids` of each text, computed on all cores and without the GIL."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return `encode_ids` of a text and, for each token, (start, stop) of its characters."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including special tokens."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        settings = _read_json(self.directory / "tokenizer_config.json", "model") or {}
        return read_chat_template(self.directory, settings, self.day)

    @cached_property
    def added_texts(self) -> tuple[str, ...]:
        """The texts of the added tokens, special or not. The tokenizer reads each as one token."""
        return tuple(token.content for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def added_ids(self) -> tuple[int, ...]:
        """The ids of `added_texts`."""
        return tuple(self._backend.get_added_tokens_decoder())

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens, which are no part of what is said."""
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of `special_texts`."""
        return tuple(id for id, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def added_by_transformers(self) -> tuple[str, ...]:
        """Tokens that tokenizer.json lacks and transformers adds from the other files in the directory."""
        settings = self._settings or {}
        named = [settings.get(name) for name in _NAMED_TOKENS]
        decoder = settings.get("added_tokens_decoder")
        listed = decoder if decoder is not None else (_read_json(self.directory / "added_tokens.json", "model") or {})
        named += list(listed.values()) if decoder is not None and isinstance(decoder, dict) else list(listed)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = settings.get(key) or []
            named += list(more.values() if isinstance(more, dict) else more)
        texts = [token.get("content") if isinstance(token, dict) else token for token in named]
        known = self._backend.get_vocab(with_added_tokens=True)
        return tuple(dict.fromkeys(text for text in texts if isinstance(text, str) and text not in known))

    @property
    def size_in_transformers(self) -> int:
        """Number of tokens after transformers has loaded the tokenizer."""
        return self._backend.get_vocab_size(with_added_tokens=True) + len(self.added_by_transformers)

    @cached_property
    def reads_pieces_as_parts(self) -> bool:
        """Whether pieces tokenised one by one give the bytes of the whole text: nothing is prepended or stripped."""
        added = self._backend.get_added_tokens_decoder().values()
        swallows = any(token.lstrip or token.rstrip for token in added)
        return self.is_byte_level and not self.puts_space_first and not swallows

    @property
    def puts_space_first(self) -> bool:
        """Whether a byte-level tokenizer reads a text as if it began with a space."""
        return '"add_prefix_space": true' in json.dumps(self._spec.get("pre_tokenizer"))

    @property
    def padding_id(self) -> int:
        """The token that fills a row after its last document: pad, else eos, else 0. It has no loss."""
        return next((token for token in (self.pad_id, self.eos_id) if token is not None), 0)

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes of text that each token stands for, int32 [vocab_size]; 0 for special tokens."""
        sizes = np.zeros(self.vocab_size, np.int32)
        added = self._backend.get_added_tokens_decoder()
        for text, token in self._backend.get_vocab(with_added_tokens=True).items():
            if token in added:
                sizes[token] = 0 if added[token].special else len(text.encode())
            elif self.is_byte_level:
                sizes[token] = len(text)  # each character of the vocabulary stands for a byte
            elif _BYTE_TOKEN.fullmatch(text):
                sizes[token] = 1
            else:
                sizes[token] = len(text.replace("▁", " ").encode())
        return sizes

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens consist of bytes, so that every text can be encoded without loss."""
        return '"ByteLevel"' in json.dumps(self._spec.get("pre_tokenizer"))

    def _special(self, name: str, settings: Mapping[str, Any] | None, where: str) -> int | None:
        """Return the id of bos, eos or pad from the tokenizer's settings, else from the model's configuration."""
        if settings is not None and f"{name}_token" in settings:
            token = settings[f"{name}_token"]
            text = token.get("content") if isinstance(token, dict) else token
            if text is None:
                return None
            writable = isinstance(text, str) and not any(0xD800 <= ord(char) < 0xE000 for char in text)  # as UTF-8
            found = self._backend.token_to_id(text) if writable else None
            if found is None:
                raise ConfigError(
                    f"{where}: {_naming_file(self.directory, name)}: {name}_token {text!r} is not in "
                    "tokenizer.json. Take both files from the same model."
                )
            return found
        if name == "bos" and settings is not None:
            return None
        for file in ("generation_config.json", "config.json"):
            value = (_read_json(self.directory / file, where) or {}).get(f"{name}_token_id")
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
        return None

    def _prepends(self, bos_id: int, settings: Mapping[str, Any] | None) -> bool:
        if settings is not None and isinstance(settings.get("add_bos_token"), bool):
            return bool(settings["add_bos_token"])
        return self._backend.encode("a", add_special_tokens=True).ids[:1] == [bos_id]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        templates = sorted((self.directory / TEMPLATE_DIRECTORY).glob("*.jinja"))
        named = [f"{TEMPLATE_DIRECTORY}/{path.name}" for path in templates]
        for name in (*_FINGERPRINTED, *named):
            path = self.directory / name
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{name} {len(content)}\n".encode() + content)
        digest.update(f"{self.bos_id} {self.eos_id} {self.pad_id}".encode())
        if self.is_byte_level and not self._has_line_cuts:  # 0.2.0 cut their long texts, which changed tokens
            digest.update(b" whole")
        if self.day is not None and self.chat_template is not None and self.chat_template.asks_for_date:
            digest.update(f" {self.day}".encode())
        return digest.hexdigest()


def asks_for_date(directory: Path) -> bool:
    """Return whether the chat template of a model writes the date of its rendering."""
    template = read_chat_template(directory, _read_json(directory / "tokenizer_config.json", "model") or {})
    return template is not None and template.asks_for_date


def _read_settings(directory: Path, where: str) -> dict[str, Any] | None:
    """Read tokenizer_config.json; special_tokens_map.json overrides it unless it has `added_tokens_decoder`.

    This is the rule of transformers 5, which reads the second file only for tokenizers older than that key. Returns
    None if neither file exists.
    """
    config = _read_json(directory / "tokenizer_config.json", where)
    special = _read_json(directory / _SPECIAL_TOKENS, where)
    if special is None or "added_tokens_decoder" in (config or {}):
        return config
    return {**(config or {}), **special}


def _naming_file(directory: Path, name: str) -> Path:
    """Return the file that defines bos, eos or pad."""
    special = _read_json(directory / _SPECIAL_TOKENS, "model") or {}
    config = _read_json(directory / "tokenizer_config.json", "model") or {}
    overrides = f"{name}_token" in special and "added_tokens_decoder" not in config
    return directory / (_SPECIAL_TOKENS if overrides else "tokenizer_config.json")


def _read_backend(directory: Path, where: str) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    refuse_special(path)
    if not is_regular(path):
        raise ConfigError(
            f"{where}: {directory} has no tokenizer.json. Write one with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    _refuse_ids(path, where)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and its panics are no Exception
        raise ConfigError(f"{where}: {path} cannot be read: {error}. Download it again.") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _refuse_ids(path: Path, where: str) -> None:
    """Raise ConfigError for an id of a token above HIGHEST_ID: the library makes a table of as many entries."""
    data = path.read_bytes()
    if not any(int(number[:19]) > HIGHEST_ID for number in _LONG_NUMBER.findall(data)):  # nor in the text of a token
        return
    try:
        highest = max(_ids(json.loads(data)), default=0)
    except (ValueError, RecursionError):  # the library says what is wrong
        return
    if highest > HIGHEST_ID:
        raise ConfigError(
            f"{where}: {path}: a token has the id {highest}, and the highest that is read is {HIGHEST_ID:,}. Download "
            "it again."
        )


def _ids(spec: Any) -> Iterator[int]:
    """Yield the ids in a parsed tokenizer.json, as far as it is one."""
    model, added = (spec.get("model"), spec.get("added_tokens")) if isinstance(spec, dict) else (None, None)
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = [*vocab.values()] if isinstance(vocab, dict) else []
    found += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    yield from (number for number in found if isinstance(number, int))


def _read_json(path: Path, where: str) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    try:
        return read_json_object(path)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
