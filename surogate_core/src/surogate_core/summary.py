"""What a person reads when a run has ended."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

LABEL_WIDTH = 18


def final_summary(
    *,
    run_name: str,
    status: str,
    step: int,
    total_steps: int,
    tokens: int,
    seconds: float,
    output_dir: Path | str,
    train_loss: float | None = None,
    eval_loss: float | None = None,
    best_eval_loss: float | None = None,
    best_eval_step: int | None = None,
    unigram_loss: float | None = None,
    bits_per_byte: float | None = None,
    outputs: Sequence[str] = (),
    checkpoint: Path | str | None = None,
) -> str:
    """A block of plain text, 80 columns (a longer path is not broken, so that it can be copied).

    status: "done", "interrupted" or "failed". step: optimizer steps done, of total_steps. tokens: trained in this
    process, in `seconds`. Losses in nats a token; unigram_loss is that of predicting each validation token by its
    frequency in the training data. outputs: names in output_dir. checkpoint: directory that transformers loads. A
    line whose values are None is left out.
    """
    done = f"{step:,} steps" if step == total_steps else f"{step:,} of {total_steps:,} steps"
    lines = ["", f"{run_name}: {status}, {done}"]

    def add(label: str, text: str) -> None:
        indent = " " * (2 + LABEL_WIDTH)
        lines.append(
            textwrap.fill(
                text,
                80,
                initial_indent=f"  {label:<{LABEL_WIDTH}}",
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )

    rate = f" ({count_text(tokens / seconds)} tokens/s)" if seconds > 0 else ""
    add("trained on", f"{count_text(tokens)} tokens in {duration_text(seconds)}{rate}")
    if train_loss is not None:
        add("training loss", f"{train_loss:.4f}")
    if eval_loss is not None:
        best = f", best {best_eval_loss:.4f}" if best_eval_loss is not None else ""
        best += f" at step {best_eval_step:,}" if best and best_eval_step is not None else ""
        add("validation loss", f"{eval_loss:.4f}{best}")
    if unigram_loss is not None:
        gain = ""
        if eval_loss is not None:
            gap = unigram_loss - eval_loss
            gain = f"; the model is {abs(gap):.4f} nats {'below' if gap >= 0 else 'ABOVE'}"
        add("unigram loss", f"{unigram_loss:.4f}{gain}")
    if bits_per_byte is not None:
        add("bits per byte", f"{bits_per_byte:.4f}")
    add("output", str(output_dir))
    if outputs:
        add("", ", ".join(outputs))
    if checkpoint is not None:
        lines.append(f"\n  To load it: transformers.AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})")
    return "\n".join(lines)


def count_text(count: float) -> str:
    """At most 5 characters, 3 digits: 512, 1.25k, 12.5k, 125k, 19.7M, 1.10B."""
    for limit, suffix in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "B")):
        scaled = count / limit * 1e3
        if scaled < 999.5:
            if suffix == "":
                return f"{scaled:.0f}"
            decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{decimals}f}{suffix}"
    return f"{count / 1e12:.3g}T"


def duration_text(seconds: float) -> str:
    """4.2 s, 2 min 15 s, 3 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
