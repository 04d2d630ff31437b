"""`python -m MODULE`, forked from a process that has imported torch and transformers, which takes seconds each time.

`Server.install` writes `surogate` into a virtual environment, and a Python for the processes that it starts. What they
run has the arguments, folder, variables, files, signals and exit status of these programs, and the packages of the
environment. What is not `python -m` with a module of core or of the program is started as always.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from virtualenvs import Environment

PRELOADED = (
    *("torch.distributed", "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama"),
    *("peft", "datasets", "matplotlib.pyplot", "surogate.cli.train", "surogate.training.trainer"),
    *("surogate_core.runtime.team", "surogate.checkpoints.hf"),
)

CLIENT = """#!{python} -ES
import json, os, signal, socket, sys
words = {words} + sys.argv[1:]
safe = words[:1] == ["-P"]
words = words[safe:]
if words[:1] != ["-m"] or words[1].split(".")[0] not in ("surogate", "surogate_core"):
    os.execv({python!r}, [{python!r}, *["-P"] * safe, *words])
here = os.getcwd()
asked = [words[1], words[2:], {first!r} or (here if not safe else ""), here, dict(os.environ), {root!r}]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"-"], [0, 1, 2])
    server.sendall(json.dumps(asked).encode() + b"\\n")
    answers = server.makefile()
    child = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    status = int(answers.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class Server:
    """A process that forks others. It ends with the one that starts it."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "socket"
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=folder,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def install(self, environment: Environment) -> None:
        """Write `surogate` into an environment."""
        programs = environment.root / "bin"
        for name, words in {"surogate": ["-m", "surogate.cli"], "forked-python": []}.items():
            fields = {
                "first": str(programs) if words else "",
                "address": str(self._address),
                "root": str(environment.root),
            }
            program = programs / name
            program.write_text(CLIENT.format(python=str(environment.python), words=words, **fields))
            program.chmod(0o755)

    def close(self) -> None:
        self._process.communicate()


def become(module: str, words: Sequence[str], first: str, folder: str, variables: dict[str, str], root: str) -> None:
    """Be a process of Python of a virtual environment that runs a module. `first`: where it looks for others first; ""
    if nowhere."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    before = sys.path[1:]
    (packages,) = Path(root).glob("lib/python3.*/site-packages")
    site.addsitedir(str(packages))
    named = variables.get("PYTHONPATH", "").split(":")
    sys.path[:] = [*filter(None, (first, *named)), *(path for path in sys.path[1:] if path not in before), *before]
    importlib.invalidate_caches()
    sys.prefix = sys.exec_prefix = root
    sys.executable = f"{root}/bin/forked-python"
    sys.argv = ["", *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def wait_for(child: int, client: socket.socket) -> int:
    """Return the status of a child, which is killed if its client is gone."""
    client.sendall(f"{child}\n".encode())
    ended = os.pidfd_open(child)
    if client.fileno() in select.select([ended, client.fileno()], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def serve(address: str) -> None:
    """Fork for each client a process that forks what it asks for. Return in the latter, and when stdin ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            if os.fork():
                client.close()
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                continue
            server.close()
            files = socket.recv_fds(client, 1, 3)[1]
            asked = json.loads(client.makefile().readline())
            child = os.fork()
            if child:
                for file in files:
                    os.close(file)
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(f"{wait_for(child, client)}\n".encode())
                os._exit(0)
            client.close()
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            return become(*asked)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    serve(sys.argv[1])
