"""What a person reads when a run has ended."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

LINE_WIDTH = 80
LABEL_WIDTH = 17


def final_summary(
    *,
    steps: int,
    tokens: int,
    seconds: float,
    output_dir: Path | str,
    run_name: str = "",
    training_loss: float | None = None,
    validation_loss: float | None = None,
    best_validation_loss: float | None = None,
    unigram_loss: float | None = None,
    bits_per_byte: float | None = None,
    weights: str = "the checkpoint",
    outputs: Sequence[str] = ("metrics.jsonl", "loss.png", "run.yaml"),
    load: str | None = None,
) -> str:
    """The end of a finished run as a block of plain text of 80 columns; only a path longer than that sticks out.

    tokens: trained on, in `seconds`. Losses in nats a token; unigram_loss is that of a model that knows only how
    often each token occurs. output_dir: where the trained `weights` are, and beside them `outputs`. load: the line of
    Python that loads them; None: that of a checkpoint. A line whose value is None is left out.
    """
    rate = f", {count_text(tokens / seconds)} tokens/s" if seconds > 0 else ""
    rows = [("trained", f"{count_text(tokens)} tokens in {duration_text(seconds)}{rate}")]
    if training_loss is not None:
        rows.append(("training loss", f"{training_loss:.4f} nats per token"))
    if validation_loss is not None:
        best = best_validation_loss if best_validation_loss != validation_loss else None
        rows.append(
            ("validation loss", f"{validation_loss:.4f} nats per token" + (f", best {best:.4f}" if best else ""))
        )
    if unigram_loss is not None:
        rows.append(("unigram model", f"{unigram_loss:.4f}" + _compared(validation_loss, unigram_loss)))
    if bits_per_byte is not None:
        rows.append(("bits per byte", f"{bits_per_byte:.4f}"))
    rows.append(("output", f"{output_dir}: {weights}, {', '.join(outputs)}"))
    done = f"done, {steps:,} step{'s' * (steps != 1)}"
    lines = [f"{run_name}: {done}" if run_name else done]
    lines += [_row(label, text) for label, text in rows]
    lines.append("  to load it in Python:")
    lines.append(f"    {load or f'transformers.AutoModelForCausalLM.from_pretrained({str(output_dir)!r})'}")
    return "\n".join(lines)


def _compared(validation_loss: float | None, unigram_loss: float) -> str:
    if validation_loss is None:
        return ""
    gap = unigram_loss - validation_loss
    return f"; this model is {abs(gap):.4f} {'below' if gap >= 0 else 'ABOVE'}"


def _row(label: str, text: str) -> str:
    """`label` and `text` in two columns. Words, and so paths, are not broken: they are there to be copied."""
    return textwrap.fill(
        text,
        LINE_WIDTH,
        initial_indent=f"  {label:<{LABEL_WIDTH}}",
        subsequent_indent=" " * (LABEL_WIDTH + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


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


def parameters_text(count: int) -> str:
    """8.19B, 596.0M, 9.2K, 512: parameters as models are named after them."""
    if count < 1000:
        return str(count)
    for unit, suffix in ((1e3, "K"), (1e6, "M")):
        if round(count / unit, 1) < 1000:
            return f"{count / unit:.1f}{suffix}"
    return f"{count / 1e9:.2f}B"


def duration_text(seconds: float) -> str:
    """4.2 s, 2 min 15 s, 3 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
