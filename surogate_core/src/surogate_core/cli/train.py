"""`surogate train`, `pt` and `sft`."""

from __future__ import annotations

import sys

from .. import run
from ..errors import RunLost, RunStopped
from ..machine.timing import mark
from .json_output import print_json
from .options import RunArguments
from .render import print_error
from .restart import restart_if_wanted
from .summary import print_summary, to_json


def train_command(arguments: RunArguments, fit: str | None = None, *, as_json: bool = False) -> int:
    """Train a run, with the fastest settings for the target `fit` if there is one (see `run.fit`).

    Return 130 or 143 if a signal ended it after a save, 3 if a push failed, else 0.
    """
    mark("command line")
    loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
    mark("config, plugins")
    if fit is not None:
        from .fit import fitted

        loaded = fitted(arguments, loaded, fit)
        mark("fit")
    try:
        result = run.train(loaded, _say)
    except RunLost as error:
        restart_if_wanted(loaded.config, error, _say)
        raise
    if not result.writer:
        return result.signal_exit
    if as_json:
        print_json(to_json(result))
    if result.signal_exit:
        saved = result.checkpoint_dir / f"step_{result.steps:08d}"
        _say(f"interrupted after step {result.steps:,} of {result.total_steps:,}; saved: {saved}")
    else:
        print_summary(sys.stdout, result)
        if result.pushed and result.pushed.url:
            _say(f"pushed to {result.pushed.url}")
        elif result.pushed:
            print_error(result.pushed.error)
            return RunStopped.exit_code
    return result.signal_exit


def _say(line: str) -> None:
    print(line, flush=True)
