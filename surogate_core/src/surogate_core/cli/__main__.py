"""`python -m surogate_core.cli` is `python -m surogate.cli`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # `python -m` puts it there: files of a working folder would be imported

from ..moved import program

program("surogate.cli.__main__", "surogate_core.cli")
