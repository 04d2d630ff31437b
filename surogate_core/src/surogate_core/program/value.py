"""Values: the named buffers that a program reads and writes. Shapes are concrete; there are no symbolic dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf, isfinite, prod
from typing import TYPE_CHECKING, Literal

from ..dtypes import DTYPES
from ..errors import ProgramError

if TYPE_CHECKING:
    lazy = cached_property
else:

    class lazy:
        """An attribute that is computed when it is first read. `cached_property` of Python 3.11 takes a lock each time:
        half a second of a search, which reads a million."""

        def __init__(self, compute):
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __get__(self, owner, cls):
            if owner is None:
                return self
            value = owner.__dict__[self._compute.__name__] = self._compute(owner)
            return value


Role = Literal["input", "param", "grad", "state", "act", "staged"]
"""The role of a value determines who owns its memory and how long it lives.

input   written by the training loop before a program runs (tokens, lr, step); ops never write it
param   a model weight in its compute dtype; written by the programs `start` and `update`
grad    gradient of a param, accumulated over the micro-steps of an optimizer step
state   anything else that outlives a program: optimizer moments, master weights, amax history, loss sums
act     an activation in the shared arena: lives from the op that writes it to the last op that reads it
staged  a param in the shared arena during one program of `derive`; the loader writes it before that program runs
"""

ALIGNMENT = 256
"""Every buffer begins at a multiple of this many bytes, as memory from cudaMalloc does. Enough for any vector load."""

WEIGHT_LABEL = "weight"
"""Label of a frozen weight that an op makes of its stored form, in front of the ops that read it. The backward pass
makes it again, whatever the user chose to recompute."""

UNFINISHED_LABEL = "unfinished"
"""Label of an activation that later ops complete in its place (`OpDef.group_wise`): until then it holds anything in the
rows that are missing."""

Collects = Literal["", "sum", "max"]

Place = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True)
class Init:
    """Initial contents of a param or state that is not loaded from a checkpoint.

    "zeros", "ones"
    "normal"       mean 0, standard deviation `std`
    "uniform"      in [-`bound`, `bound`)
    "log_uniform"  log(u), u uniform in [`low`, `high`): the initial logarithms of decay rates
    "constant"     `value`
    "values"       `values[i]` in all of row i: one for each index of the first dimension

    A random value is drawn as a whole, in fp32, by a generator that is seeded with the run's seed and its name
    (`runtime.initialize`), so that the bits are the same on any number of ranks. log(u) is computed in fp64. Contents
    are rounded to the dtype of the param or state.

    `residual_projection` marks the two matrices of each block that write to the residual stream. The config key
    `init_projections_to_zero` initializes exactly those to zero.
    """

    kind: Literal["zeros", "ones", "normal", "uniform", "constant", "log_uniform", "values"] = "zeros"
    std: float = 0.0
    bound: float = 0.0
    value: float = 0.0
    low: float = field(default=0.0, repr=False)
    high: float = field(default=0.0, repr=False)
    values: tuple[float, ...] = field(default=(), repr=False)
    residual_projection: bool = False

    def __post_init__(self) -> None:
        fits = {
            **dict.fromkeys(("zeros", "ones", "constant"), True),
            "normal": self.std > 0.0,
            "uniform": self.bound > 0.0,
            "log_uniform": 0.0 < self.low < self.high < inf,
            "values": isinstance(self.values, tuple) and self.values != () and all(map(isfinite, self.values)),
        }
        if not fits.get(self.kind, False):
            raise ProgramError(
                f"{self}: expected zeros, ones, constant, normal with std > 0, uniform with bound > 0, "
                "log_uniform with 0 < low < high or values with a tuple of finite numbers"
            )

    def __repr__(self) -> str:
        """Show further fields where they are set: records of programs, by which runs are compared, hold the text."""
        shown = (f for f in fields(self) if f.repr or getattr(self, f.name) != f.default)
        return f"Init({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclass(frozen=True)
class Shard:
    """The value that a part is of: that of rank r has its elements from r * size of the part on, in order of rows.

    shape  of the whole value
    parts  ranks that hold one. Elements past the end of the whole value are padding.
    owner  the rank whose part is the whole value, in its shape, while those of all others are empty; None: parts of
           equal size
    """

    shape: tuple[int, ...]
    parts: int
    owner: int | None = None

    @property
    def size(self) -> int:
        """Number of elements of the whole value."""
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class Value:
    """One buffer. Values compare by identity.

    `name` is for people; it is unique within the programs of a run. `label` is the kind of activation ("norm",
    "residual", "qkv", "gate_up" ...): memory reports group by it and recomputation selects by it. `block` is the index
    of the transformer block that the value belongs to, or -1 if it belongs to none.

    collects  of a state: how the parts of the micro-steps and workers of an optimizer step are combined: "sum" (the
              loss), "max" (a largest magnitude); "": it does not collect
    derived   of a state: `derive` writes it from params at every start, or the update before it reads it, so
              checkpoints do not hold it
    place     the memory that holds it. That of the host is pinned.
    shard     what the value is a rank's part of; None: every rank holds the whole
    inside    of a part: the whole value in whose memory it lies; None: it has memory of its own
    room      bytes of its memory, if these are more than its elements take (`shards.room`)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    label: str = ""
    block: int = -1
    init: Init | None = None
    collects: Collects = ""
    derived: bool = False
    place: Place = "device"
    shard: Shard | None = None
    inside: Value | None = None
    room: int = 0

    @lazy
    def size(self) -> int:
        """Number of elements; a scalar has one."""
        return prod(self.shape)

    @lazy
    def form(self) -> tuple[tuple[int, ...], str, Role, Place]:
        """The fields that `Op.signature` depends on."""
        return self.shape, self.dtype, self.role, self.place

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds the elements (`Dtype.stored_shape`)."""
        return DTYPES[self.dtype].stored_shape(self.shape)

    @lazy
    def nbytes(self) -> int:
        """Bytes of the buffer, without alignment. Rows of packed elements begin at a byte."""
        return prod(self.stored_shape) * max(DTYPES[self.dtype].bits, 8) // 8

    @property
    def whole_size(self) -> int:
        """Number of elements of the value that it is a part of, or of itself."""
        return self.shard.size if self.shard else self.size

    @property
    def owner(self) -> int | None:
        """The only rank that has its elements; None: all ranks have some."""
        return self.shard.owner if self.shard else None

    def first(self, rank: int) -> int:
        """Return the index of its first element in the value that it is a part of; 0 if it is whole."""
        if self.owner is not None:
            return self.size if rank > self.owner else 0
        return rank * self.size if self.shard else 0

    @lazy
    def memory(self) -> int:
        """Bytes of its memory, without alignment."""
        return self.room or self.nbytes

    @property
    def root(self) -> Value:
        """The value in whose memory it lies: itself, or of rows the whole value."""
        return self

    def __repr__(self) -> str:
        return f"{self.name}:{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False, repr=False)
class Rows(Value):
    """Some rows of an activation, an input or a state, in its memory: `shape[0]` of them, from row `row` of `whole` on.

    A program may write a value row by row. Then it is whole for later ops once each row has been written.
    """

    whole: Value = field(kw_only=True)
    row: int = field(kw_only=True)

    @property
    def root(self) -> Value:
        return self.whole

    @property
    def offset(self) -> int:
        """Bytes from the start of the whole value."""
        return self.row * (self.whole.nbytes // self.whole.shape[0])
