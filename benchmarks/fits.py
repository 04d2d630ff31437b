"""The largest published models whose LoRA on an NF4 base fits a card: the table of docs/qlora.md.

    python benchmarks/fits.py
    python benchmarks/fits.py --card 8 --card 24

Takes ten minutes of one core. Every run is planned, for an H200 whose memory is limited to that of the card: 97 % of
the GiB in its name, because devices report less than those. Rank 16 on all linear layers, 8 rows of 2,048 tokens per
optimizer step. "On the card" is a run with one row per micro-step, recomputation as the planner chooses it, and the
residual stream on the host if it is faster so. "With `--fit`" is what `surogate plan --fit` finds, which may also keep
the stored weights on the host and change the rows per micro-step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from surogate import run
from surogate.config.load import LoadedConfig, load_config
from surogate_core.machine.devices import GIB
from surogate_core.planning.plan import Plan
from surogate_core.plugins.discovery import load_registry

MODELS = Path(__file__).parent / "models"
FAMILIES = {
    "Qwen3": ("32b", "14b", "8b", "4b", "1.7b", "0.6b"),
    "Llama": ("3.1-70b", "3.1-8b", "3.2-3b", "3.2-1b"),
}
"""The models of a family, the largest first."""
CARDS = (8, 12, 16, 24, 48, 80)
USABLE = 0.97
"""Of the memory in the name of a card. The device table has 0.98 to 0.99 for cards without ECC."""
RUN = {
    "qlora_bnb": True,
    "lora_rank": 16,
    "sequence_len": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
}
HEADINGS = ("card", "on the card", "GiB", "tokens/s", "with `--fit`", "GiB", "host GiB", "tokens/s")


@dataclass(frozen=True)
class Fitting:
    """A model that fits, and its plan."""

    model: str
    plan: Plan

    @property
    def gib(self) -> str:
        return f"{self.plan.report.device_bytes['total'] / GIB:.2f}"

    @property
    def host_gib(self) -> str:
        return f"{self.plan.report.pinned_bytes / GIB:.2f}"

    @property
    def speed(self) -> str:
        return f"{self.plan.report.tokens_per_second:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", type=int, action="append", help="GiB in the name of the card")
    arguments = parser.parse_args(sys.argv[1:])
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for card in arguments.card or CARDS:
        for family in FAMILIES:
            print(f"| {' | '.join(row(family, card))} |", flush=True)


def row(family: str, card: int) -> Sequence[str]:
    """Return the cells of a row: the largest model of the family on a card, and with `--fit`."""
    alone = next((found for size in FAMILIES[family] if (found := on_card(family, size, card))), None)
    fitted = next((found for size in FAMILIES[family] if (found := with_fit(family, size, card))), None)
    cells = (alone.model, alone.gib, alone.speed) if alone else ("none", "", "")
    more = (fitted.model, fitted.gib, fitted.host_gib, fitted.speed) if fitted else ("none", "", "", "")
    return f"{card} GiB", *cells, *more


def on_card(family: str, size: str, card: int) -> Fitting | None:
    """Return a model with its weights on the card, or None if it does not fit."""
    plans = (run.plan(config(family, size, memory(card), kept), "h200") for kept in (False, True))
    fitting = [plan for plan in plans if plan.report.fits]
    return Fitting(title(family, size), min(fitting, key=lambda plan: plan.report.step.seconds)) if fitting else None


def with_fit(family: str, size: str, card: int) -> Fitting | None:
    """Return a model with the fastest settings that fit and change nothing that it learns, or None."""
    proposals = run.fit(config(family, size), memory(card), "h200").proposals
    plans: Iterator[Plan] = (proposal.plan for proposal in proposals if not proposal.resort)
    plan = next(plans, None)
    return Fitting(title(family, size), plan) if plan else None


def title(family: str, size: str) -> str:
    return f"{family}-{size.upper()}"


def memory(card: int) -> str:
    return f"{card * USABLE:.2f}GiB"


def config(family: str, size: str, limit: str | None = None, offload_residual: bool = False) -> LoadedConfig:
    model = title(family, size).lower()
    raw = {**RUN, "model": str(MODELS / model), "offload_residual": offload_residual, "device_memory_limit": limit}
    return load_config(raw, registry=load_registry(), mode="sft", source=model)


if __name__ == "__main__":
    main()
