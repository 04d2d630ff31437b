"""Operand dtypes that a recipe does not serve: another package does, or the run is refused with its name."""

from __future__ import annotations

import pytest
from end_to_end.product import Workplace

from surogate import run
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import cpu, device

FP8 = {"matmul_dtype": "e4m3", "gradient_dtype": "e5m2"}


@pytest.mark.parametrize(("pair", "kind"), [("e4m3/e5m2", "fp8_linear"), ("e2m1/e2m1", "nvfp4_linear")])
def test_an_installed_lowering_serves_the_pair_in_place_of_the_recipe(
    pair: str, kind: str, workplace: Workplace
) -> None:
    dtypes = dict(zip(("matmul_dtype", "gradient_dtype"), pair.split("/"), strict=True))
    plan = run.plan(run.load(workplace.write(**dtypes, model_dtype="bf16")), cpu())
    assert plan.inputs.lowering is not None and plan.inputs.lowering.name == pair
    assert kind in {op.kind for op in plan.assembly.programs["micro_first"].ops}
    assert run.plan(run.load(workplace.write()), cpu()).inputs.lowering is None


@pytest.mark.parametrize(
    ("package", "dtypes", "others"),
    [("surogate-recipe-fp8", FP8, "e2m1, e2m1"), ("surogate-recipe-nvfp4", {"matmul_dtype": "e2m1"}, "e4m3, e5m2")],
)
def test_without_the_package_the_pair_is_refused_with_its_name(
    package: str, dtypes: dict[str, str], others: str, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUROGATE_PLUGINS", f"-{package}")
    loaded = run.load(workplace.write(**dtypes))
    message = rf"pairs .*: \(fp32, fp32\), \(bf16, bf16\), \({others}\)\. Try: pip install {package}"
    with pytest.raises(ConfigError, match=message):
        run.plan(loaded, cpu())


def test_a_pair_that_no_package_serves_is_refused_with_those_that_are(workplace: Workplace) -> None:
    with pytest.raises(ConfigError, match=r"bf16 with gradient_dtype: fp32 is served neither .*e4m3, e5m2"):
        run.plan(run.load(workplace.write(matmul_dtype="bf16", gradient_dtype="fp32")), cpu())


def test_dtypes_that_the_recipe_overrides_are_told(workplace: Workplace) -> None:
    given = {"recipe": "fp8-hybrid", "model_dtype": None, "matmul_dtype": "bf16", "master_dtype": "fp32"}
    plan = run.plan(run.load(workplace.write(**given)), cpu())
    assert plan.overridden == ("matmul_dtype: bf16 is overridden: recipe fp8-hybrid uses e4m3",)
    assert run.plan(run.load(workplace.write()), cpu()).overridden == ()


def test_a_lowering_can_refuse_the_device(workplace: Workplace) -> None:
    with pytest.raises(ConfigError, match="cannot run on NVIDIA A100 80GB: FP8 products need SM89"):
        run.plan(run.load(workplace.write(**FP8)), device("a100"))
