"""`python -m surogate_core --cmake-dir`, `--include-dir`: the folders that packages need to compile kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m surogate_core", description="The command line is `surogate`.")
    parser.add_argument("--cmake-dir", action="store_true", help="print the folder of SurogateKernels.cmake")
    parser.add_argument("--include-dir", action="store_true", help="print the folder of <surogate/...> headers")
    arguments = parser.parse_args()
    if not (arguments.cmake_dir or arguments.include_dir):
        parser.error("name a folder to print: --cmake-dir or --include-dir")
    if arguments.cmake_dir:
        print(FOLDER / "cmake")
    if arguments.include_dir:
        print(FOLDER / "include")


if __name__ == "__main__":
    main()
