"""Training on conversations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from end_to_end.product import losses

from surogate import run

if TYPE_CHECKING:
    from end_to_end.product import Workplace

TEMPLATE = """
{%- for message in messages %}
{{- '### ' + message.role + '\n' + message.content }}
{%- if message.role == 'assistant' %}{{- eos_token }}{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant\n' }}{%- endif %}"""


def test_packed_loss_equals_unpacked_loss_and_depends_on_the_mask(here: Workplace) -> None:
    """One step over all rows: the mean over the same labels, whichever rows hold them."""
    (here.root / "model/chat_template.jinja").write_text(TEMPLATE)
    rows = [[("user", "Who goes there? " * (n % 3 + 1)), ("assistant", "A friend. " * (n % 2 + 1))] for n in range(12)]
    lines = [{"messages": [{"role": role, "content": said} for role, said in row]} for row in rows]
    (here.root / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = {"path": str(here.root / "chat.jsonl"), "type": "conversation"}
    config = here.write(
        datasets=[entry], validation_split_ratio=0, max_steps=1, warmup_steps=0, sequence_len=64, eval_steps=0
    )

    def first_loss(name: str, *overrides: str) -> float:
        step = ("per_device_train_batch_size=12", "gradient_accumulation_steps=1")
        out = here.root / name
        run.train(run.load(config, [*step, *overrides, f"output_dir={out}"]), notice=lambda line: None)
        assert (out / "chat_template.jinja").read_text() == TEMPLATE
        return losses(out)[0]

    packed = first_loss("packed")
    assert first_loss("unpacked", "sample_packing=false") == pytest.approx(packed, rel=1e-5)
    assert first_loss("all", "loss_scale=all") != pytest.approx(packed, rel=1e-5)
