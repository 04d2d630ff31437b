"""A key of the config that a user gave as an option or an argument of the command line."""

from __future__ import annotations

import re
from typing import Final

_OPTION: Final = re.compile(r"No such option: --?(?P<key>[\w-]+)")
_ARGUMENT: Final = re.compile(r"unexpected extra arguments?(?:\(s\))? \((?P<key>\w+)=(?P<value>[^\s)]*)")


def usage_hint(message: str) -> str:
    """Return how the key in a message about wrong usage is set; "" if the message names none."""
    from ..config.keys import PACKAGES
    from ..config.schema import TrainConfig

    if found := _ARGUMENT.search(message):
        return f". A key of the file is set by --set {found['key']}={found['value']}"
    if found := _OPTION.search(message):
        key = found["key"].replace("-", "_")
        if key in TrainConfig.model_fields or key in PACKAGES:
            return f". It is a key of the file, which is set by --set {key}=VALUE"
    return ""
