"""`python -m surogate_core --cmake-dir`: the folder of SurogateKernels.cmake.

Packages that are built by surogate_core.cmake.build_backend do not need it.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m surogate_core", description="The command line is `surogate`.")
    parser.add_argument(
        "--cmake-dir", action="store_true", required=True, help="print the folder of SurogateKernels.cmake"
    )
    parser.parse_args()
    print(Path(__file__).parent / "cmake")


if __name__ == "__main__":
    main()
