"""The result of `surogate profile` as a table, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surogate.cli.json_output import print_json
from surogate.cli.options import RunArguments
from surogate.cli.render import print_warning
from surogate_core.api import refuse_checkpoint
from surogate_core.errors import ConfigError

from .picture import draw
from .profiling import profile
from .step_profile import Group, StepProfile
from .table import lines

PICTURE_SUFFIX = ".png"


def profile_command(
    arguments: RunArguments,
    *,
    steps: int,
    top: int,
    picture: Path | None,
    random_tokens: bool,
    random_weights: bool,
    as_json: bool,
) -> int:
    """Print the profile, and draw it to `picture` if given. Returns 0.

    Raises ConfigError for a file that cannot be written, before anything is measured.
    """
    if picture is not None and picture.suffix != PICTURE_SUFFIX:
        raise ConfigError(f"--picture: {picture}: the picture is a PNG. Give a name that ends in {PICTURE_SUFFIX}.")
    _check_writable(picture)
    measured = profile(
        arguments.config,
        arguments.overrides,
        steps=steps,
        use_random_tokens=random_tokens,
        use_random_weights=random_weights,
        mode=arguments.mode,
        notice=print_warning,
    )
    if as_json:
        print_json(to_json(measured))
    else:
        print("\n".join(lines(measured, top)))
    if picture is not None:
        _write(picture, draw(measured))
    return 0


def to_json(measured: StepProfile) -> dict[str, Any]:
    """The profile as data: the contract of `surogate profile --json`. Figures are sums over a step."""
    device = measured.device
    return {
        "model": measured.model,
        "recipe": measured.recipe,
        "device": {
            "name": device.name,
            "title": device.title,
            "bandwidth": device.bandwidth,
            "flops": dict(device.flops),
            "source": device.source,
        },
        "weights": measured.weights,
        "batches": measured.batches,
        "method": measured.method,
        "event_seconds": measured.event_seconds,
        "step": {
            "seconds": measured.seconds,
            "all_seconds": list(measured.steps),
            "ops_seconds": measured.total.seconds,
            "gaps_seconds": measured.gaps,
            "planned_seconds": measured.planned_seconds,
            "tokens": measured.tokens,
            "tokens_per_second": measured.tokens / measured.seconds,
        },
        "programs": [{"program": group.ops[0].program, **_figures(group)} for group in measured.by_program()],
        "kinds": [{"kind": group.kind, **_figures(group)} for group in measured.by_kind()],
        "ops": [
            {
                "program": timed.program,
                "index": timed.index,
                "kind": timed.op.kind,
                "phase": timed.op.phase,
                "block": timed.op.block if timed.op.block >= 0 else None,
                "ins": [repr(value) for value in timed.op.ins],
                "outs": [repr(value) for value in timed.op.outs],
                "accumulates": bool(timed.op.accumulate),
                **_figures(Group((timed,), device)),
            }
            for timed in measured.ops
        ],
    }


def _figures(group: Group) -> dict[str, float]:
    names = ("calls", "seconds", "bytes", "flops", "bandwidth_share", "peak_share", "planned_seconds")
    return {name: getattr(group, name) for name in names}


def _check_writable(path: Path | None) -> None:
    if path is None:
        return
    refuse_checkpoint(path, "--picture: ")
    if path.is_dir():
        raise ConfigError(f"--picture: {path} is a directory. Give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--picture: the directory {path.parent} does not exist. Make it, or give another path.")


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--picture: {path} cannot be written: {error.strerror}.") from None
