"""Prints the header <surogate/dtype.h>, made of the table in dtypes.py: `python dtype_header.py > surogate/dtype.h`.

dtypes.py is loaded by its path, because core may not be installed where a package is built from a checkout.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

HEADER = """\
// Element types of buffers, and their codes in the arguments of launchers and bindings. Written by dtype_header.py from
// surogate_core/dtypes.py.
#pragma once

#include <cstdint>

namespace surogate {{

enum DType : int {{ {enumerators} }};

// Bits per element; 0 for an unknown code.
constexpr int bits_of(int dtype) {{
    constexpr int bits[] = {{{bits}}};
    return dtype >= 0 && dtype < {count} ? bits[dtype] : 0;
}}

// Bytes per element; 0 for an unknown code and for elements of less than a byte.
constexpr int64_t bytes_of(int dtype) {{ return bits_of(dtype) / 8; }}

constexpr const char* name_of(int dtype) {{
    constexpr const char* names[] = {{{names}}};
    return dtype >= 0 && dtype < {count} ? names[dtype] : "unknown dtype";
}}

}}  // namespace surogate"""


def table() -> ModuleType:
    spec = spec_from_file_location("dtypes", Path(__file__).resolve().parents[1] / "dtypes.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["dtypes"] = module  # a dataclass looks up its own module
    spec.loader.exec_module(module)
    return module


def header() -> str:
    """Return the text of the header. The codes must be 0, 1, 2, ... without gaps, because they index its arrays."""
    in_order = sorted(table().DTYPES.values(), key=lambda dtype: dtype.code)
    codes = [dtype.code for dtype in in_order]
    if codes != list(range(len(codes))):
        raise SystemExit(f"dtypes.py: codes must be 0 to {len(codes) - 1}, got {codes}")
    return HEADER.format(
        enumerators=", ".join(f"{dtype.name.upper()} = {dtype.code}" for dtype in in_order),
        bits=", ".join(str(dtype.bits) for dtype in in_order),
        names=", ".join(f'"{dtype.name}"' for dtype in in_order),
        count=len(codes),
    )


if __name__ == "__main__":
    print(header())
