"""Keys on the texts that a run writes between its steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .values import Int, Keys, Number, Word, parse_path


def parse_prompts(value: Any) -> Any:
    """Accept a list of texts, or the path of a file; null is no prompt."""
    if value is None:
        return ()
    if isinstance(value, str):
        return parse_path(value)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text.strip() for text in value):
        raise ValueError("must be a list of texts, or the path of a file of prompts")
    return tuple(value)


class SampleKeys(Keys):
    """Samples"""

    sample_prompts: Annotated[tuple[str, ...] | str, BeforeValidator(parse_prompts)] = Field(
        (),
        description="What the model answers during training: a list of texts, or a file of prompts as `surogate "
        "generate --file` reads it. The answers are in the metrics file, the trackers and the console. They change no "
        "bit of the run.",
    )
    sample_every: Int = Field(
        100,
        ge=0,
        description="Answer `sample_prompts` before the first step, every N steps, and after the last one; 0: only "
        "before and after.",
    )
    sample_max_new_tokens: Int = Field(
        64, ge=1, description="Longest sample, in tokens. With its prompt it must fit into `sequence_len`."
    )
    sample_batch_size: Int = Field(
        4, ge=1, description="Prompts that are answered at once. Each takes memory of its own, which is planned."
    )
    sample_temperature: Number = Field(
        0.0, ge=0, le=100, description="0: samples are the most likely tokens. Higher: drawn, by `train_seed`."
    )
    sample_top_p: Number = Field(1.0, gt=0, le=1, description="Draw samples from the likeliest tokens of this share.")
    sample_as: Annotated[Literal["auto", "chat", "raw"], Word] = Field(
        "auto",
        description="chat: answers by the chat template. raw: continues the texts. auto: chat if the run trains turns "
        "that the chat template ends, else raw.",
    )
    sample_on: Annotated[Literal["device", "host"], Word] = Field(
        "device",
        description="Where the copy of the model is that writes samples: in the memory of the first GPU, or of the "
        "host, whose CPU is slow. It is part of the plan. Without a GPU both are the host.",
    )
