"""Sizes and rules of a mixture of experts. A family reads them from `config.json` (`config_json.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from surogate_models.api import DecoderDims

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Router:
    """The rule that finds the experts of a token, and the weights of its routes.

    The k experts with the highest scores are chosen. A softmax over the logits of these k alone, as in gpt-oss, is a
    `normalize`d softmax over all.

    scoring        a score is a share of the softmax over all experts, or the sigmoid of its logit
    normalize      the weights of a token's routes are divided by their sum
    epsilon        what is added to that sum
    scale          what the weights are multiplied by at last
    corrected      a bias is added to the scores where experts are compared, and not to their weights. It is in fp32
                   and never trained.
    groups         experts are of this many equal groups, one after another. Groups are compared by the sum of their
                   two best scores.
    chosen_groups  the number of groups that a token's experts are of
    biased         the linear layer that computes the logits has a bias
    wide           the logits of a run in bf16 are in fp32
    """

    scoring: Scoring = "softmax"
    normalize: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    biased: bool = False
    wide: bool = False

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the op `route`, besides k. Those with the default of the op are left out."""
        defaults = {"scoring": "softmax", "epsilon": 0.0, "scale": 1.0, "groups": 1, "chosen_groups": 1}
        given = {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}
        return {"normalize": self.normalize, **given}


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The activation of an expert: gate * sigmoid(alpha * gate) * (up + offset). The default is SwiGLU.

    limit        the gate is at most this, and up from -limit to limit; 0: without limit
    interleaved  rows of gate and up alternate in the checkpoint and the param, and do not follow each other
    """

    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0
    interleaved: bool = False

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the op `weighted_swiglu`. Those with the default of the op are left out."""
        return {name: value for name, value in vars(self).items() if value != getattr(SWIGLU, name)}


SWIGLU = Gate()
"""The activation of most experts."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The mixture of a layer.

    n_experts     experts of a layer
    k             experts that a token goes to
    d_expert      width of an expert
    router        the rule that finds them
    gate          the activation of an expert
    biased        both products of an expert add a bias
    d_shared      width of the MLP that every token goes to besides, of all shared experts together; 0: there is none
    shared_gated  what that MLP returns is multiplied by the sigmoid of a linear layer of one row
    """

    n_experts: int
    k: int
    d_expert: int
    router: Router = field(default_factory=Router)
    gate: Gate = SWIGLU
    biased: bool = False
    d_shared: int = 0
    shared_gated: bool = False


@dataclass(frozen=True, kw_only=True)
class MixtureDims(DecoderDims):
    """Sizes of a model with the same mixture in each layer: `MixtureDims(**vars(read_dims(...)), mixture=...)`.

    dense    layers that have an MLP of width d_ff instead
    """

    mixture: Mixture
    dense: frozenset[int] = frozenset()
