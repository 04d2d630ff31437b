"""What ends a trained turn is said, and is in the generation config of every output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from end_to_end.product import invoke

from surogate import run

if TYPE_CHECKING:
    from end_to_end.product import Workplace

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
END = "<|im_end|>"
SAID = "model: trained turns end with <|im_end|>, and the model stops at <|endoftext|>"


def make_base_model(folder: Path, stops: Any = 0) -> int:
    """Give a model the template of a base model as Qwen2.5's: turns end with another token than texts. Return its id.

    stops: eos_token_id of its generation config.
    """
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", END])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2112}))
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 0.9, "eos_token_id": stops}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return int(backend.token_to_id(END))


def chats(here: Workplace, **changes: Any) -> Path:
    rows = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "yes"}]
    path = here.root / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": [*rows, *rows[: 2 * (n % 2)]]}) + "\n" for n in range(8)))
    entry = {"path": str(path), "type": "conversation"}
    once = {"validation_split_ratio": 0, "max_steps": 1, "warmup_steps": 0, "eval_steps": 0}
    return here.write(**{"datasets": [entry], **once, **changes})


def generation(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "generation_config.json").read_text())
    return content


def test_a_trained_end_that_the_model_does_not_stop_at_is_said_and_in_the_output(here: Workplace) -> None:
    end = make_base_model(here.root / "model")
    for loss_scale in ("all", "default"):
        lines: list[str] = []
        config = run.load(chats(here, loss_scale=loss_scale, max_steps=2, save_steps=1))
        run.tokenize(config, lines.append)
        assert [line.startswith(SAID) for line in lines].count(True) == 1
    run.train(config, notice=lambda line: None)
    assert generation(here.out) == {"top_p": 0.9, "eos_token_id": [0, end]}
    run.export(sorted(here.out.glob("step_*"))[0], here.root / "exported")
    assert generation(here.root / "exported") == generation(here.out)


def test_an_adapter_takes_the_end_of_turn_to_the_merged_model(here: Workplace) -> None:
    end = make_base_model(here.root / "model")
    run.train(run.load(chats(here)), notice=lambda line: None)
    base = here.out.rename(here.root / "base")
    (base / "generation_config.json").unlink()  # eos_token_id of config.json counts
    config = chats(here, model=str(base), from_scratch=False, lora=True, merge_adapter=True)
    run.train(run.load(config), notice=lambda line: None)
    assert generation(here.out / "adapter")["eos_token_id"] == [0, end]
    run.merge(here.out / "adapter", here.root / "merged")
    assert (
        generation(here.out / "merged")["eos_token_id"] == generation(here.root / "merged")["eos_token_id"] == [0, end]
    )
    assert "_from_model_config" not in generation(here.root / "merged")


def test_nothing_is_said_or_changed_where_generation_stops_at_every_trained_end(here: Workplace) -> None:
    model = here.root / "model"
    make_base_model(model, stops=[0, make_base_model(model)])
    config = run.load(chats(here))
    assert run.unknown_turn_ends(run.open_run(config)) is None
    lines: list[str] = []
    run.tokenize(config, lines.append)
    assert not any("trained turns end" in line for line in lines)
    run.train(config, notice=lambda line: None)
    written, given = here.out / "generation_config.json", model / "generation_config.json"
    assert written.read_bytes() == given.read_bytes()


def test_a_plan_says_it_of_the_chat_template_alone(here: Workplace) -> None:
    make_base_model(here.root / "model")
    opened = run.open_run(run.load(chats(here)))
    assert (run.unknown_turn_ends(opened) or "").startswith(SAID)
    text = {"path": str(here.root / "documents.jsonl"), "type": "text"}
    assert run.unknown_turn_ends(run.open_run(run.load(chats(here, datasets=[text])))) is None
    (here.root / "model/chat_template.jinja").write_text("{{ 1 / 0 }}")
    assert run.unknown_turn_ends(opened) is None
    printed = invoke("plan", chats(here)).stdout
    (here.root / "model/chat_template.jinja").write_text(CHATML)
    assert "trained turns end with" in invoke("plan", chats(here)).stdout
    assert "trained turns end with" not in printed
