"""The checks of each kind of definition. Importing this package registers them."""

from . import (  # noqa: F401
    adapters,
    checkpoint_forms,
    export_formats,
    formats,
    kernels,
    launchers,
    loggers,
    losses,
    models,
    offload,
    ops,
    optimizers,
    package,
    recipes,
    stacks,
    weight_formats,
)
