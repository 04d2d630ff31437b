"""`examples/generate.py` on a checkpoint that transformers saved itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", EXAMPLES / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny-qwen3", local_files_only=True)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_the_same_seed_writes_the_same_text_whatever_came_before(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example()
    out = []
    for arguments in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"]):
        assert example.main([str(checkpoint), "--tokens", "12", "--prompt", "JULIET:", *arguments]) == 0
        out.append(capsys.readouterr().out)
    assert out[0] == out[1] != out[2]
    assert out[0].startswith("JULIET:") and len(out[0]) > len("JULIET:\n\n")
    both = example.generate(checkpoint, ["ROMEO:", "JULIET:"], 12, 1)
    assert both[1].strip("\n") + "\n\n" == out[0]


@pytest.mark.parametrize("steps", [[], ["step_00000050", "step_00000100"]])
def test_a_directory_without_a_checkpoint_is_told_with_what_to_do(
    tmp_path: Path, steps: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in steps:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert load_example().main([str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "config.json, tokenizer.json, *.safetensors not found" in message
    assert ("step_00000100" if steps else "surogate train") in message
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert load_example().main([str(tmp_path)]) == 2
    assert f"surogate merge {tmp_path / 'adapter'} merged" in capsys.readouterr().err


def test_a_path_that_is_no_directory_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example().main([str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err
