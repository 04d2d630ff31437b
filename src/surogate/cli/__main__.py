"""`python -m surogate.cli` runs `surogate`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # `python -m` puts it there: files of a working folder would be imported, and its plugins found

from .entry import main

main()
