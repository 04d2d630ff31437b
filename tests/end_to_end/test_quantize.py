"""`surogate quantize` writes a model in a weight format, or refuses and leaves everything as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import contents, invoke, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate import run
from surogate_core.errors import ConfigError

FORMATS = ("qlora_bnb", "qlora_fp8", "qlora_fp4")
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.norm.weight"


def drawn(folder: Path, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """Write a tiny model with weights, drawn by transformers, in one file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(folder, **changes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn(tmp_path_factory.mktemp("quantize") / "model")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of the model that the test may damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def spoiled(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[5].fill_(value)


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a tensor is missing": (lambda t: t.pop(GATE), f"lacks {GATE}, which config.json asks for"),
    "another shape": (lambda t: t.update({GATE: torch.ones(64, 64)}), rf"{GATE} is \[64, 64\], expected \[128, 64\]"),
    "three dimensions": (lambda t: t.update({GATE: torch.ones(2, 64, 64)}), rf"{GATE} is \[2, 64, 64\], expected"),
    "another name": (
        lambda t: t.update(extra=t.pop(GATE)),
        f"lacks {GATE}, which config.json asks for, and holds extra, which a model of this config.json does not have",
    ),
    "an unknown tensor": (lambda t: t.update(extra=torch.ones(1)), "holds extra, which"),
    "a copy that differs": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "NaN": (spoiled(GATE, torch.nan), rf"model\.safetensors: {GATE} holds 1 NaN of 8,192, first at \[0, 5\]"),
    "inf outside of the blocks": (spoiled(NORM, torch.inf), rf"model\.safetensors: {NORM} holds 1 inf of 64"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_checkpoint_that_does_not_fit_or_is_not_finite_is_refused(case: str, model: Path, tmp_path: Path) -> None:
    edit, message = DAMAGE[case]
    change(model, edit)
    for key in FORMATS:
        with pytest.raises(ConfigError, match=message):
            run.quantize(str(model), tmp_path / "out", [f"{key}=true"])


def test_what_is_quantized_is_refused(original: Path, tmp_path: Path) -> None:
    run.quantize(str(original), tmp_path / "nf4", ["qlora_bnb=true"])
    with pytest.raises(ConfigError, match=r"the weights are stored quantized. They cannot be quantized again: use the"):
        run.quantize(str(tmp_path / "nf4"), tmp_path / "out", ["qlora_bnb=true"])


def test_a_folder_in_use_is_refused(original: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        run.quantize(str(original), tmp_path, ["qlora_bnb=true"])


def test_a_format_must_be_chosen(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weight format is selected. Set one of: .*qlora_bnb: true"):
        run.quantize(str(original), tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model=other", r"surogate quantize: model: is the first argument, .*model\. Remove it from --set\.$"),
        ("output_dir=x", r"surogate quantize: output_dir: changes nothing here\. Remove .* stored: .*qlora_bnb"),
        ("sequence_len=32", r"surogate quantize: sequence_len: changes nothing here"),
        ("adapter_path=x", r"surogate quantize: adapter_path: changes nothing here"),
        ("resume_from_checkpoint=true", r"surogate quantize: resume_from_checkpoint: changes nothing here"),
        ("qlora_bbn=true", r"qlora_bbn: .*qlora_bnb"),
    ],
)
def test_a_key_that_changes_nothing_is_refused(original: Path, tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.quantize(str(original), tmp_path / "out", ["qlora_bnb=true", key])
    assert not (tmp_path / "out").exists()


def test_help_says_that_the_key_of_a_format_is_required() -> None:
    printed = " ".join(invoke("quantize", "--help").stdout.split())
    assert (
        "Required: KEY=true of a weight format. Without it an error names them." in printed
        and "of the file" not in printed
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "no weight format is selected"),
        (["qlora_bnb=true", "qlora_bnb_block_size=128"], "64 columns, which is no multiple of"),
        (["qlora_bnb=true", "quantize_embedding=true"], "quantize_embedding: quantized checkpoints hold"),
        (["qlora_fp8=true"], "1 NaN"),
    ],
)
def test_what_fails_leaves_the_model_in_its_folder_and_no_new_folder(
    keys: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    run.quantize(str(model), output, ["qlora_bnb=true"])
    change(model, spoiled(NORM, torch.nan))
    before = contents(output)
    with pytest.raises(ConfigError, match=message):
        run.quantize(str(model), output, keys, overwrite=True)
    assert contents(output) == before
    with pytest.raises(ConfigError, match=message):
        run.quantize(str(model), tmp_path / "more/new", keys)
    assert not (tmp_path / "more").exists()


def test_overwrite_sets_the_model_in_the_folder_aside(original: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run.quantize(str(original), output, ["qlora_bnb=true"])
    before = contents(output)
    run.quantize(str(original), output, ["qlora_fp8=true"], overwrite=True)
    assert contents(output / "outputs.set_aside") == before
    assert (output / "model.safetensors").read_bytes() != before["model.safetensors"]
    with pytest.raises(ConfigError, match="is an input, but would be set aside"):
        run.quantize(str(original), original, ["qlora_fp8=true"], overwrite=True)


def test_a_full_disk_ends_it_with_one_line(original: Path, tmp_path: Path, disk_limit: None) -> None:
    done = invoke("quantize", original, tmp_path / "out", "--set", "qlora_bnb=true")
    assert (done.returncode, done.stderr) == (3, f"error: saving {tmp_path / 'out'} failed: File too large.\n")
    assert not (tmp_path / "out").exists()


# Of these sides, squares of 128 split 192 and 320, but not into squares.
@pytest.mark.parametrize(
    ("sides", "keys", "printed"),
    [
        ((192, 320), ["qlora_fp8=true"], "qlora_block_size: 64 avoids that"),
        ((192, 200), ["qlora_fp8=true"], "qlora_block_size: 256 avoids that"),
        ((192, 264), ["qlora_fp8=true"], "No block size avoids that"),
        ((192, 320), ["qlora_fp8=true", "qlora_block_size=64"], ""),
        ((128, 256), ["qlora_fp8=true"], ""),
        ((64, 96), ["qlora_fp8=true"], ""),
        ((192, 320), ["qlora_bnb=true"], ""),
    ],
)
def test_a_notice_names_the_matrix_that_transformers_loads_wrongly_and_the_remedy(
    tmp_path: Path, sides: tuple[int, int], keys: list[str], printed: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = drawn(tmp_path / "model", hidden_size=sides[0], intermediate_size=sides[1])
    lines: list[str] = []
    run.quantize(str(model), tmp_path / "out", keys, notice=lines.append)
    assert len(lines) == bool(printed)
    if printed:
        assert lines[0].startswith(
            "transformers will load model.layers.0.self_attn.q_proj.weight wrongly or not at all"
        )
        assert printed in lines[0]
    if keys[0] == "qlora_fp8=true":
        assert _is_close(tmp_path / "out", model, AutoModelForCausalLM) is not bool(printed)


def _is_close(stored: Path, original: Path, loader: Any) -> bool:
    """Return whether transformers loads the matrices of `stored` with errors of E4M3 only."""
    try:
        ours = loader.from_pretrained(stored, dtype=torch.float32).state_dict()
    except (RuntimeError, ValueError):
        return False
    theirs = loader.from_pretrained(original, dtype=torch.float32).state_dict()
    return all((ours[name] - tensor).norm() < 0.04 * tensor.norm() for name, tensor in theirs.items())
