"""LoRA against PEFT, float32, the same random weights; its format; its options."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from models.harness import (
    OPS,
    PlannedModel,
    hf_loss_sum,
    packed_documents,
    random_hf_model,
    relative_error,
    tiny_config,
    valid_tokens,
)
from pydantic import ValidationError
from random_programs import VOCABULARY
from small_programs import INIT, train
from torch import Tensor

from surogate_core.api import Builder, ConfigError, Op, PrecisionRequest, ProgramError, Target, Value
from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import choose
from surogate_core.testing.devices import device
from surogate_core.testing.ops import check_op
from surogate_core.testing.programs import initialize
from surogate_lora.adapter import LORA
from surogate_lora.files import load, merge, save
from surogate_lora.kernels import KERNELS, Rectangle, gaps
from surogate_lora.ops import OPS as OPS_OF_LORA
from surogate_lora.ops import Place
from surogate_lora.options import LoraOptions

peft = pytest.importorskip("peft", reason="PEFT is what LoRA is compared with: pip install peft")

LORA_OPS = {definition.kind: definition for definition in OPS_OF_LORA}
TOLERANCE = 1e-5
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"lora_rank": 4, "lora_alpha": 8},
    "rslora": {"lora_rank": 4, "lora_alpha": 3, "lora_use_rslora": True},
    "some": {"lora_rank": 3, "lora_target_modules": ["v_proj", "up_proj", "layers.1.self_attn.q_proj"]},
    "one": {"lora_rank": 1, "lora_target_modules": "k_proj"},
}


def planned(options: LoraOptions, **settings: Any) -> PlannedModel:
    return PlannedModel(tiny_config(), 3, 24, lmhead_chunks=3, adapters=[(LORA, options)], **settings)


def peft_model(options: LoraOptions) -> Any:
    """PEFT's wrapper of the random model, with B drawn so that A has a gradient."""
    targets = options.lora_target_modules
    config = peft.LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        use_rslora=options.lora_use_rslora,
        target_modules=ALL if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(random_hf_model(tiny_config()), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def adapter_of(model: Any, grads: bool = False) -> dict[str, Tensor]:
    """PEFT's matrices, or their gradients, under our param names."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad if grads else p.detach()
        for name, p in model.named_parameters()
        if ".lora_" in name
    }


def adapter_of_parameters(model: Any) -> dict[str, Tensor]:
    """PEFT's parameters themselves, under our param names."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p
        for name, p in model.named_parameters()
        if ".lora_" in name
    }


def filled(model: PlannedModel, theirs: Any) -> PlannedModel:
    model.load(random_hf_model(tiny_config()).state_dict())
    adapter = adapter_of(theirs)
    assert {v.name for v in model.assembly.trainable} == adapter.keys()
    for name, tensor in adapter.items():
        model.params[name].copy_(tensor)
    return model


@pytest.mark.parametrize("case", CASES)
def test_losses_and_adapter_gradients_equal_pefts(case: str) -> None:
    options = LoraOptions(**CASES[case])
    theirs = peft_model(options)
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    expected = hf_loss_sum(theirs, documents) * scale
    expected.backward()
    model = filled(planned(options), theirs)
    assert model.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=TOLERANCE)
    grads = {v.name.removeprefix("grad."): v for v in model.assembly.declared if v.role == "grad"}
    wanted = adapter_of(theirs, grads=True)
    assert grads.keys() == wanted.keys()
    errors = {name: relative_error(model.buffers.persistent(grads[name]), g) for name, g in wanted.items()}
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}


def test_training_is_pefts_and_leaves_every_bit_of_the_base() -> None:
    options = LoraOptions(**CASES["all-linear"])
    theirs = peft_model(options)
    model = filled(planned(options, weight_decay=0.1), theirs)
    model.executor.run("start")
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    frozen = model.params.keys() - {v.name for v in model.assembly.trainable}
    before = {name: model.params[name].clone() for name in frozen}
    for step in range(1, 6):
        optimizer.zero_grad()
        expected = hf_loss_sum(theirs, documents) * scale
        expected.backward()
        optimizer.step()
        assert model.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=1e-4)
        model.update(step, lr=1e-2)
    assert all(torch.equal(model.params[name], before[name]) for name in frozen)
    states = {v.name for v in model.assembly.declared if v.role in ("state", "grad")}
    assert not [name for name in states if any(name.endswith(f".{f}") for f in frozen)]


def test_lora_plus_has_the_groups_of_pefts_optimizer_and_trains_as_it_does() -> None:
    from peft.optimizers import create_loraplus_optimizer

    options = LoraOptions(**CASES["all-linear"], loraplus_lr_ratio=8.0)
    theirs = peft_model(options)
    model = filled(planned(options, weight_decay=0.1), theirs)
    model.executor.run("start")
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    optimizer = create_loraplus_optimizer(
        theirs, torch.optim.AdamW, lr=2e-3, loraplus_lr_ratio=8.0, loraplus_weight_decay=0.1
    )
    names = {p: name for name, p in adapter_of_parameters(theirs).items()}
    rates = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    update = model.assembly.only("update")
    lrs = {model.assembly.scalars.lr: 2e-3} | {v: 2e-3 * f for f, v in model.assembly.scalars.rates.items()}
    ours = {v.name: lrs[op.ins[1]] for op in update.ops if op.kind == "adamw" for v in op.ins if v.role == "param"}
    assert ours == rates and len(set(rates.values())) == 2
    for step in range(1, 6):
        optimizer.zero_grad()
        (hf_loss_sum(theirs, documents) * scale).backward()
        optimizer.step()
        model.micro_step(packed_documents(), scale)
        model.update(step, lr=2e-3)
    for name, tensor in adapter_of(theirs).items():
        assert relative_error(model.params[name], tensor) <= 1e-4, name


def test_a_ratio_of_rates_that_is_none_is_refused() -> None:
    for ratio in (0, -1, float("inf"), "large"):
        with pytest.raises(ValidationError, match="loraplus_lr_ratio"):
            LoraOptions(loraplus_lr_ratio=ratio)
    plain, even = (planned(LoraOptions(lora_rank=2, loraplus_lr_ratio=r)) for r in (None, 1.0))
    assert not plain.assembly.scalars.rates and not even.assembly.scalars.rates


def test_a_bf16_model_trains_an_fp32_adapter_near_the_fp32_one() -> None:
    """Activations and products are rounded to bf16, 2^-9 each, over the 4 layers' few products in a row."""
    options = LoraOptions(**CASES["all-linear"])
    theirs = peft_model(options)
    exact, rounded = (
        filled(planned(options), theirs),
        filled(planned(options, request=PrecisionRequest(model_dtype="bf16")), theirs),
    )
    assert {v.dtype for v in rounded.assembly.trainable} == {"fp32"}
    assert rounded.micro_step(packed_documents(), 1e-2) == pytest.approx(
        exact.micro_step(packed_documents(), 1e-2), rel=2e-2
    )


def test_a_starts_as_peft_draws_it_and_b_at_zero() -> None:
    """Uniform in +-1/sqrt(in): the variance of n draws is within 5 standard errors, sqrt(4/5/n) of it, of bound^2/3."""
    model = planned(LoraOptions(lora_rank=64))
    initialize((v for v in model.assembly.trainable), model.buffers.persistent, seed=3)
    for value in model.assembly.trainable:
        tensor = model.params[value.name]
        if value.name.endswith("lora_B"):
            assert not tensor.any()
            continue
        bound = value.shape[1] ** -0.5
        assert float(tensor.abs().max()) <= bound
        spread = float(tensor.var()) / (bound**2 / 3)
        assert abs(spread - 1) <= 5 * (0.8 / tensor.numel()) ** 0.5, value.name
    first, second = (model.params[f"model.layers.{i}.mlp.up_proj.lora_A"] for i in (0, 1))
    assert not torch.equal(first, second)


# ------------------------------------------------------------------------------------------------------------- targets


def test_unknown_targets_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"lora_target_modules: 'query' is no linear .* q_proj, k_proj, .* down_proj"):
        planned(LoraOptions(lora_target_modules=("q_proj", "query")))
    with pytest.raises(ConfigError, match="'lm_head'"):
        planned(LoraOptions(lora_target_modules=("lm_head",)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lora_rank": 0},
        {"lora_alpha": 0},
        {"lora_alpha": float("nan")},
        {"lora_dropout": 1.0},
        {"lora_dropout": -0.1},
        {"lora_target_modules": []},
        {"lora_target_modules": [" "]},
        {"lora_target_modules": 3},
        {"lora_r": 3},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LoraOptions(**wrong)


# ----------------------------------------------------------------------------------------------------------------- ops


PLACES = (Place(0, 0, 0, 1.0), Place(0, 3, 0, 1.0), Place(1, 2, 0, 0.5), Place(1, 5, 3, 2.0))
PARTS, WHOLES = ((3, 8), (2, 8), (3, 3), (4, 2)), ((5, 8), (10, 5))


@pytest.mark.parametrize(("of_parts", "dtype"), list(product(("fp32", "bf16"), repeat=2)))
def test_parts_are_packed_at_their_places_and_unpacked_from_them(of_parts: str, dtype: str) -> None:
    parts = [torch.randn(shape).to(TORCH_DTYPES[of_parts]) for shape in PARTS]
    packed = check_op(LORA_OPS["lora_pack"], *parts, shapes=WHOLES, places=PLACES, dtype=dtype)
    covered = [torch.zeros(shape, dtype=torch.bool) for shape in WHOLES]
    for part, at in zip(parts, PLACES, strict=True):
        rows, columns = slice(at.row, at.row + part.shape[0]), slice(at.column, at.column + part.shape[1])
        assert torch.equal(packed[at.whole][rows, columns], (at.scale * up(part)).to(TORCH_DTYPES[dtype]))
        covered[at.whole][rows, columns] = True
    assert not any(whole[~where].any() for whole, where in zip(packed, covered, strict=True))
    again = check_op(LORA_OPS["lora_unpack"], *packed, shapes=PARTS, places=PLACES, dtypes=(of_parts,) * 4)
    for part, back, at in zip(parts, again, PLACES, strict=True):
        inside = (at.scale * up(part)).to(TORCH_DTYPES[dtype])
        assert torch.equal(back, (at.scale * up(inside)).to(part.dtype))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place(0, 3, 0, 1.0), "leaves"),
        (Place(0, -1, 0, 1.0), "leaves"),
        (Place(0, 0, 3, 1.0), "leaves"),
        (Place(0, 1, 1, 1.0), "overlap"),
    ],
)
def test_parts_that_overlap_or_stick_out_are_refused(place: Place, message: str) -> None:
    b = Builder(OPS, "fp32")
    parts = [b.activation("part", (2, 3), "fp32") for _ in range(2)]
    attrs = {"shapes": ((4, 5),), "places": (Place(0, 0, 0, 1.0), place), "dtype": "fp32"}
    with pytest.raises(ProgramError, match=message), b.record("forward"):
        b.apply("lora_pack", *parts, **attrs)


def test_packing_has_the_gradient_of_autograd_through_its_reference() -> None:
    """It is linear, and every number is exact: the gradients are equal."""

    def build(b: Builder) -> Value:
        parts = [b.param(f"part{i}", shape, INIT) for i, shape in enumerate(PARTS)]
        first, second = b.emit("lora_pack", *parts, shapes=WHOLES, places=PLACES, dtype=b.dtype)
        losses = [b.apply("toy_dot", v, b.input(f"d{i}", v.shape, v.dtype)) for i, v in enumerate((first, second))]
        return b.apply("add", *losses)

    by_rule = VOCABULARY | LORA_OPS
    by_torch = by_rule | {"lora_pack": replace(LORA_OPS["lora_pack"], vjp=None)}
    ours, theirs = (train(build, ops=ops).run() for ops in (by_rule, by_torch))
    assert ours.keys() == theirs.keys() and all(g.any() for g in ours.values())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("columns", [(8,), (3, 1, 4), (16, 16)], ids=str)
def test_columns_are_joined_and_split_again(columns: tuple[int, ...], dtype: str) -> None:
    """`check_op` compares rows that are computed by themselves too."""
    parts = [torch.randn(6, count).to(TORCH_DTYPES[dtype]) for count in columns]
    (joined,) = check_op(LORA_OPS["lora_join"], *parts)
    first = 0
    for part in parts:
        assert torch.equal(joined[:, first : first + part.shape[1]], part)
        first += part.shape[1]
    assert first == joined.shape[1]
    again = check_op(LORA_OPS["lora_split"], joined, columns=columns)
    assert all(torch.equal(back, part) for back, part in zip(again, parts, strict=True))
    (scaled,) = check_op(LORA_OPS["lora_scale"], joined, scale=0.3)
    assert torch.equal(scaled, (0.3 * up(joined)).to(joined.dtype))


def test_joining_and_scaling_have_the_gradient_of_autograd_through_its_reference() -> None:
    def build(b: Builder) -> Value:
        parts = [b.param(f"part{i}", (5, columns), INIT) for i, columns in enumerate((3, 1, 4))]
        joined = b.apply("lora_scale", b.apply("lora_join", *parts), scale=0.5)
        return b.apply("toy_dot", joined, b.input("direction", joined.shape, joined.dtype))

    by_rule = VOCABULARY | LORA_OPS
    by_torch = by_rule | {kind: replace(LORA_OPS[kind], vjp=None) for kind in ("lora_join", "lora_scale")}
    ours, theirs = (train(build, ops=ops).run() for ops in (by_rule, by_torch))
    assert len(ours) == 3 and all(g.any() for g in ours.values())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "shapes", "attrs", "message"),
    [
        ("lora_join", [((4, 2), "fp32"), ((5, 2), "fp32")], {}, "as many rows, got .* and .*5,2"),
        ("lora_join", [((4, 2), "fp32"), ((4, 2), "bf16")], {}, "of one dtype"),
        ("lora_join", [((4, 2), "fp32"), ((4,), "fp32")], {}, "must be matrices"),
        ("lora_split", [((4, 5), "fp32")], {"columns": (2, 2)}, r"columns \[2, 2\] are not those of"),
        ("lora_split", [((4, 5), "fp32")], {"columns": (5, 0)}, r"columns \[5, 0\]"),
        ("lora_split", [((4, 5), "fp32")], {"columns": ()}, r"columns \[\]"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(
    kind: str, shapes: list[tuple[tuple[int, ...], str]], attrs: dict[str, Any], message: str
) -> None:
    b = Builder(OPS, "fp32")
    values = [b.activation("part", shape, dtype) for shape, dtype in shapes]
    with pytest.raises(ProgramError, match=message), b.record("forward"):
        b.emit(kind, *values, **attrs)


@pytest.mark.parametrize("seed", range(30))
def test_gaps_and_parts_together_cover_a_matrix_once(seed: int) -> None:
    rng = Random(seed)
    shape = rng.randint(1, 12), rng.randint(1, 12)
    covered = torch.zeros(shape, dtype=torch.int32)
    taken: list[Rectangle] = []
    for _ in range(6):
        row, column = rng.randrange(shape[0]), rng.randrange(shape[1])
        rows, columns = rng.randint(1, shape[0] - row), rng.randint(1, shape[1] - column)
        part = covered[row : row + rows, column : column + columns]
        if not part.any():
            part += 1
            taken.append((row, column, rows, columns))
    for row, column, rows, columns in gaps(shape, taken):
        covered[row : row + rows, column : column + columns] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize(("dtype", "other"), list(product(("fp32", "bf16"), repeat=2)))
def test_every_pair_of_dtypes_has_a_kernel_on_a_gpu(dtype: str, other: str) -> None:
    pack, unpack = packing_ops(dtype, other)
    target = Target(device("a100"))
    for op in (pack, unpack, *joining_ops(dtype)):
        assert choose(KERNELS, op, target).op == op.kind
        with pytest.raises(AssertionError, match="SM80"):
            choose(KERNELS, op, Target(replace(device("a100"), sm=75)))
    with pytest.raises(AssertionError, match="cannot accumulate"):
        choose(KERNELS, replace(pack, accumulate=frozenset({0})), target)
    adding = replace(unpack, accumulate=frozenset({0}))
    if other == "fp32":
        assert choose(KERNELS, adding, target).op == "lora_unpack"
    else:
        with pytest.raises(AssertionError, match="accumulates only into fp32"):
            choose(KERNELS, adding, target)


def test_doubles_are_left_to_the_references() -> None:
    for op in (*packing_ops("fp32", "fp64"), *joining_ops("fp64")):
        with pytest.raises(AssertionError, match="matrices must be fp32 or bf16"):
            choose(KERNELS, op, Target(device("a100")))


def packing_ops(of_wholes: str, of_parts: str) -> tuple[Op, Op]:
    b = Builder(OPS, "fp32")
    with b.record("forward") as ops:
        parts = [b.activation("part", shape, of_parts) for shape in PARTS]
        wholes = b.emit("lora_pack", *parts, shapes=WHOLES, places=PLACES, dtype=of_wholes)
        b.emit("lora_unpack", *wholes, shapes=PARTS, places=PLACES, dtypes=(of_parts,) * len(PARTS))
    pack, unpack = ops
    return pack, unpack


def joining_ops(dtype: str) -> list[Op]:
    b = Builder(OPS, "fp32")
    with b.record("forward") as ops:
        whole = b.apply("lora_join", *(b.activation("part", (5, 8), dtype) for _ in range(2)))
        b.emit("lora_split", whole, columns=(8, 8))
        b.apply("lora_scale", whole, scale=2.0)
    return list(ops)


# ------------------------------------------------------------------------------------------------------------- program


def test_branches_cost_no_pass_over_what_they_add_to() -> None:
    """A block of four projections: each product of the base and its branch are one op, and A of projections that share
    an input is one product."""
    assembly = planned(LoraOptions(lora_rank=4)).assembly
    for name, forward, backward in (("micro_next", 1, 1), ("evaluate", 1, 0)):
        program = assembly.programs[name]
        kinds = Counter(op.kind for op in program.ops if op.block == 1)
        assert (kinds["linear"], kinds["linear_pair"]) == (4 * forward, 4 * forward)
        assert (kinds["linear_dgrad"], kinds["linear_dgrad_pair"], kinds["linear_wgrad"]) == (
            4 * backward,
            4 * backward,
            8 * backward,
        )
        assert (kinds["lora_pack"], kinds["lora_unpack"], kinds["add"], kinds["cast"]) == (forward, backward, 0, 0)


@pytest.mark.parametrize("targets", [("k_proj",), ("q_proj", "v_proj"), ("up_proj", "down_proj")])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_some_projections_of_a_fused_matrix_have_branches(targets: tuple[str, ...], dropout: float) -> None:
    assembly = planned(LoraOptions(lora_rank=4, lora_target_modules=targets, lora_dropout=dropout)).assembly
    trained = {v.name.rsplit(".", 2)[-2] for v in assembly.trainable}
    assert trained == set(targets)
    kinds = Counter(op.kind for op in assembly.programs["micro_next"].ops if op.block == 1)
    assert kinds["linear_pair"] == len(
        {("down" if t == "down_proj" else "mlp" if t == "up_proj" else "qkv") for t in targets}
    )


# --------------------------------------------------------------------------------------------------------------- files


def saved(tmp_path: Path, case: str) -> tuple[PlannedModel, LoraOptions, Path]:
    """A model of a random adapter, its base beside it, and the adapter's folder."""
    options = LoraOptions(**CASES[case])
    model = filled(planned(options), peft_model(options))
    random_hf_model(tiny_config()).save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    save({v.name: model.params[v.name] for v in model.assembly.trainable}, folder, str(tmp_path / "base"), options)
    return model, options, folder


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_is_saved_with_equal_logits(tmp_path: Path, case: str) -> None:
    model, _, folder = saved(tmp_path, case)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    ours = model.logits(packed_documents()).view(3, 24, -1)
    for row, logits in zip(packed_documents(), ours, strict=True):
        with torch.no_grad():
            expected = torch.cat([theirs(input_ids=torch.tensor(document)[None]).logits[0] for document in row])
        assert relative_error(logits[: len(expected)], expected) <= TOLERANCE


def test_pefts_own_files_are_read_back_to_the_bit(tmp_path: Path) -> None:
    options = LoraOptions(**CASES["rslora"])
    theirs = peft_model(options)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load(tmp_path / "adapter", options)
    assert ours.keys() == adapter_of(theirs).keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in adapter_of(theirs).items())


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_pefts(tmp_path: Path, case: str) -> None:
    _, options, folder = saved(tmp_path, case)
    found = merge(folder)
    assert found.base_model == str(tmp_path / "base")
    base = random_hf_model(tiny_config()).state_dict()
    expected = peft_model(options).merge_and_unload().state_dict()
    changed = {name for name in base if not torch.equal(base[name], expected[name])}
    assert found.changes.keys() == changed
    for name in changed:
        assert relative_error(found.changes[name](base[name]), expected[name]) <= 1e-6, name
        assert found.changes[name](base[name].bfloat16()).dtype == torch.bfloat16


def test_the_config_has_what_vllm_asks_for(tmp_path: Path) -> None:
    _, _, folder = saved(tmp_path, "all-linear")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (4, 8, "none")
    assert config["target_modules"] == sorted(ALL)
    assert config["task_type"] == "CAUSAL_LM" and config["modules_to_save"] is None and config["use_dora"] is False


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"r": 8}, "r is 8, but lora_rank is 4"),
        ({"lora_alpha": 16}, "lora_alpha is 16, but lora_alpha is 8"),
        ({"use_rslora": True}, "use_rslora is True, but lora_use_rslora is False"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}, but lora_rank_pattern is {}"),
        ({"r": True}, "r must be a whole number"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_its_key(tmp_path: Path, change: dict[str, Any], printed: str) -> None:
    _, options, folder = saved(tmp_path, "all-linear")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"adapter_config.json: .*{printed}"):
        load(folder, options)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    _, options, folder = saved(tmp_path, "one")
    tensors, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: is truncated or corrupt"):
        load(folder, options)
    tensors.unlink()
    with pytest.raises(ConfigError, match=r"holds no adapter_model.safetensors"):
        merge(folder)
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: is not valid JSON"):
        merge(folder)
    config.unlink()
    with pytest.raises(ConfigError, match=r"holds no adapter_config.json"):
        merge(folder)
