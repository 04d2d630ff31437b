"""Plugins of one Python file each, without a package. The key `plugins` and SUROGATE_PLUGINS name them.

The version of such a plugin is a hash of the file, so a resumed run and the processes of a run notice another content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from ..errors import PluginError
from .provided import Plugin

_DIGITS = 12


def plugin_of(path: str) -> Plugin:
    """Return the plugin in the file `path`, which is absolute. Raises PluginError if the file cannot be read."""
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        found = "is a folder" if file.is_dir() else "no such file" if not file.exists() else "is not a file *.py"
        raise PluginError(f"{path}: {found}; a plugin without a package is one Python file")
    version = hashlib.sha256(_source(path)).hexdigest()[:_DIGITS]
    module = f"{re.sub(r'[^a-zA-Z0-9_]', '_', file.stem)}_{version}"
    return Plugin(file.stem, file.name, version, module, file=path)


def import_file(plugin: Plugin) -> ModuleType:
    """Import the file of a plugin once. Its module is in `sys.modules`, where the references of its ops are found."""
    if plugin.module in sys.modules:
        return sys.modules[plugin.module]
    spec = importlib.util.spec_from_file_location(plugin.module, plugin.file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[plugin.module] = module
    try:
        exec(compile(_source(plugin.file), plugin.file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[plugin.module]
        raise
    return module


def place_of(error: BaseException, file: str) -> str:
    """Return "file:line" of an error in a file of a plugin: that of the mistake in its syntax, or of its own code."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}:{error.lineno}"
    line, trace = 0, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return f"{file}:{line}" if line else file


@cache
def _source(path: str) -> bytes:
    """Read a file once in a process: what is hashed is what runs."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PluginError(f"{path}: cannot be read: {error.strerror}") from None
