"""Surogate in Python: what the command line does.

    import surogate

    result = surogate.train("run.yaml", max_steps=50)
    print(result.losses[-1], result.output_dir)

Keyword arguments are keys of the config.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it. Nothing is imported here: `python -m surogate` looks into the working folder
if TYPE_CHECKING:
    from surogate_core import __version__
    from surogate_core.api import ConfigError, EvalReport, PluginError, RunStopped, StepReport, SurogateError
    from surogate_core.planning.plan import Plan

    from .config.load import LoadedConfig
    from .data.tokenized import PackedFacts, ShownDocument, Tokenized, TokenizedDataset
    from .pages.reports import RunReport
    from .python import Result, load, plan, pt, report, sft, tokenize, train, verify
    from .run import export, merge, quantize
    from .training.active_run import ActiveRun
    from .training.callbacks import Callback, CallbackError, every

__all__ = [
    "ActiveRun",
    "Callback",
    "CallbackError",
    "ConfigError",
    "EvalReport",
    "LoadedConfig",
    "PackedFacts",
    "Plan",
    "PluginError",
    "Result",
    "RunReport",
    "RunStopped",
    "ShownDocument",
    "StepReport",
    "SurogateError",
    "Tokenized",
    "TokenizedDataset",
    "__version__",
    "every",
    "export",
    "load",
    "merge",
    "plan",
    "pt",
    "quantize",
    "report",
    "sft",
    "tokenize",
    "train",
    "verify",
]

_HOMES = {
    "surogate_core": "__version__",
    "surogate_core.api": "ConfigError EvalReport PluginError RunStopped StepReport SurogateError",
    "surogate_core.planning.plan": "Plan",
    "surogate.config.load": "LoadedConfig",
    "surogate.data.tokenized": "PackedFacts ShownDocument Tokenized TokenizedDataset",
    "surogate.pages.reports": "RunReport",
    "surogate.python": "Result load plan pt report sft tokenize train verify",
    "surogate.run": "export merge quantize",
    "surogate.training.active_run": "ActiveRun",
    "surogate.training.callbacks": "Callback CallbackError every",
}
"""Module -> the names that it provides."""


def __getattr__(name: str) -> object:
    """Import a name's module when the name is asked for: a command starts with its own modules alone."""
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names.split():
            value: object = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *globals()]
