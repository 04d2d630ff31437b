"""llama-server of llama.cpp, in a process of its own: the program of `check_llama_server.py`.

    python llama_server.py MODEL.gguf [--lora ADAPTER.gguf] [--template NAME]

Prints the address when it listens, and serves until its input is closed. Context, cache and attention are those that
llama-server has by default.
"""

from __future__ import annotations

import argparse
import sys

import xllamacpp


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--lora")
    parser.add_argument("--template")
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = given.model, ["127.0.0.1"], 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_parallel, params.verbosity = 1, -1
    if given.lora:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(given.lora, 1.0)]
    if given.template:
        params.chat_template = given.template
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
