"""The checks of each kind of definition. Importing this package registers them."""

from . import (  # noqa: F401  # in the order in which their results are shown
    package,
    models,
    ops,
    kernels,
    recipes,
    optimizers,
    adapters,
    weight_formats,
    offload,
    formats,
    loggers,
    launchers,
)
