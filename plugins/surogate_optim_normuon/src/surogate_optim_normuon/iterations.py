"""The iterations that orthogonalize a matrix. No torch here.

X is transposed if it has more rows than columns, and divided by `safety * ||X|| + epsilon` (Frobenius norm). Then, for
each (a, b, c): A = X X^T; B = b A + c A A; X = a X + B X. The singular values of X approach 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Iterations:
    """The coefficients of each iteration, and what X is divided by before the first."""

    coefficients: tuple[tuple[float, float, float], ...]
    safety: float
    epsilon: float


METHODS: Mapping[str, Iterations] = {
    # Amsel et al. 2025, "The Polar Express", as used by modded-nanogpt: the best polynomial for each iteration in turn.
    "polar_express": Iterations(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        1.02,
        1e-6,
    ),
    # Jordan et al. 2024, "Muon".
    "newton_schulz": Iterations(((3.4445, -4.7750, 2.0315),) * 5, 1.0, 1e-7),
}
