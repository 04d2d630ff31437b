"""`--check-finite` names the first op that writes a non-finite number, and does not change a healthy run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.product import losses, make_workplace, records
from safetensors.torch import load_file, save_file

from surogate import run
from surogate_core.errors import NonFiniteError

if TYPE_CHECKING:
    from end_to_end.product import Workplace

ACME = Path(__file__).parents[2] / "plugins/example_third_party/src/acme_surogate"


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The third-party example plugin in addition to the installed ones, and weights of its model after one step."""
    workplace = make_workplace(tmp_path_factory.mktemp("acme"), warmup_steps=0)
    info = workplace.root / "site/acme_surogate_sgd-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-surogate-sgd\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[surogate]\nacme = acme_surogate.plugin\n")
    (info.parent / "acme_surogate").symlink_to(ACME)
    model = workplace.root / "model/config.json"
    changes = {"architectures": ["AcmeMLPForCausalLM"], "model_type": "acme_mlp"}
    model.write_text(json.dumps(json.loads(model.read_text()) | changes))
    done = workplace.surogate("train", workplace.write(max_steps=1), PYTHONPATH=str(info.parent))
    assert done.returncode == 0, done.stderr
    return workplace


def train_on(acme: Workplace, tmp_path: Path, tensor: str, place: tuple[int, ...], value: float) -> Any:
    """Continue training from the saved weights with `--check-finite`, after setting `tensor[place]` to `value`."""
    model = shutil.copytree(acme.out, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights[tensor][place] = value
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = acme.write(model=str(model), from_scratch=False, output_dir=str(tmp_path / "out"))
    return acme.surogate("train", config, "--check-finite", PYTHONPATH=str(acme.root / "site"))


@pytest.mark.slow
def test_the_op_that_overflows_first_is_named_with_its_plugin_and_line(acme: Workplace, tmp_path: Path) -> None:
    """In fp32 a weight of 1e25 is finite and so is its product, but the square of the product is not."""
    done = train_on(acme, tmp_path, "layers.1.up.weight", (3,), 1e25)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and max(map(len, done.stderr.splitlines())) <= 80, done.stderr
    source = (ACME / "mlp.py").read_text().splitlines()
    emitted = 1 + next(n for n, line in enumerate(source) if 'b.apply("acme_squared_relu"' in line)
    for words in (
        r"^error: step 1, micro-step 1: acme_squared_relu wrote NaN or inf\.$",
        r"^  op       \d+ of micro_first: acme_squared_relu, block 1, forward$",
        rf"^  emitted  acme_surogate/mlp\.py:{emitted}$",
        r"^  run by   torch reference of acme-surogate-sgd 0\.1\.0$",
        r"^  wrote    1\.squared_relu:fp32\[256,256\]\n           [\d,]+ inf of 65,536, first at \[\d+, 3\]$",
        r"^  read     1\.up:fp32\[256,256\]\n           finite, largest \d\.\d+e\+2\d$",
        r"^Its inputs are finite, so the error arose in this op\.",
    ):
        assert re.search(words, done.stderr, re.M), f"{words}\n{done.stderr}"


@pytest.mark.slow
def test_a_non_finite_weight_of_the_checkpoint_is_found_before_step_one(acme: Workplace, tmp_path: Path) -> None:
    done = train_on(acme, tmp_path, "layers.0.down.weight", (5, 7), float("nan"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{tmp_path}/model: weights hold NaN or inf" in done.stderr
    assert "  model.safetensors: layers.0.down.weight [64, 256]: 1 NaN of 16,384, first at [5, 7]" in done.stderr
    assert not (tmp_path / "out").exists()


def silent(line: str) -> None:
    pass


def test_a_healthy_run_passes_with_the_same_bits(here: Workplace) -> None:
    """bf16 with separate masters, rounded gradients, recomputation and evaluation."""
    config = here.write(
        model_dtype="bf16",
        master_dtype="fp32",
        param_grad_dtype="bf16",
        optimizer="adamw",
        optimizer_state_dtype="bf16",
        recompute_block=True,
        max_steps=4,
        eval_steps=2,
    )
    plain = run.train(run.load(config), silent)
    notices: list[str] = []
    checked = run.train(run.load(config, ["check_finite=true", f"output_dir={here.root}/checked"]), notices.append)
    assert any(line.startswith("check_finite: runs op by op") for line in notices)
    assert losses(checked.output_dir) == losses(plain.output_dir)
    assert checked.evaluations == plain.evaluations and len(plain.evaluations) == 2
    ours, theirs = (load_file(done.output_dir / "model.safetensors") for done in (checked, plain))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_diverging_run_stops_immediately_and_saves_the_last_good_weights(here: Workplace) -> None:
    config = here.write(learning_rate=1e30, lr_scheduler_type="constant", check_finite=True)
    with pytest.raises(NonFiniteError) as stopped:
        run.train(run.load(config), silent)
    steps = records(here.out, "step")
    assert steps and not any(step.get("skipped") for step in steps)
    last = steps[-1]["step"]
    assert str(stopped.value).startswith(f"step {last + 1}, micro-step 1: ")
    assert str(stopped.value).endswith(f"The weights after step {last} are saved.")
    saved = load_file(here.out / f"step_{last:08d}/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())


def test_a_step_that_would_be_skipped_stops_the_run_and_names_the_input_at_fault(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surogate_core.runtime.worker import Worker

    micro_step = Worker.micro_step

    def poisoned(self: Worker, batch: Any, *, loss_scale: float, index: int, **which: bool) -> None:
        micro_step(self, batch, loss_scale=float("nan") if index == 5 else loss_scale, index=index, **which)

    monkeypatch.setattr(Worker, "micro_step", poisoned)
    with pytest.raises(NonFiniteError, match="step 3, micro-step 2: lm_head_ce_grads") as stopped:
        run.train(run.load(here.write(check_finite=True)), silent)
    assert "passed on inputs that are not finite: loss_scale is written by the training loop" in str(stopped.value)
