"""The tokenizer that dataset types get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.api import Encoded

from ..tokenizer import Tokenizer
from .conversation import ConversationOptions, encode_conversation


class RowTokenizer(Tokenizer):
    """A tokenizer that also encodes conversations."""

    def encode_conversation(self, row: Mapping[str, Any], **options: Any) -> Encoded:
        """Return a row as the dataset type `conversation` encodes it, with its options."""
        return encode_conversation(row, self, ConversationOptions(**options))
