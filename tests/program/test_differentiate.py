"""Reverse-mode differentiation: gradients are complete and correct, and invalid losses are rejected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_programs import VOCABULARY, Run, autograd, family
from small_programs import INIT, Build, draw, everything, train
from torch import Tensor

from surogate_core.api import OpDef, OutSpec, Value
from surogate_core.errors import DisconnectedError, ProgramError
from surogate_core.program.builder import Builder
from surogate_core.program.differentiate import differentiate

T, C, V = 4, 3, 5


def ramp(b: Builder, value: Value) -> Value:
    """Return the loss <value, direction>, whose gradient is `direction`."""
    return b.apply("toy_dot", value, b.input(f"direction{len(b.declared)}", value.shape, value.dtype))


def direction(trained_name: str, shape: tuple[int, ...], dtype: str = "fp64") -> Tensor:
    return draw(Value(trained_name, shape, dtype, "input"))


@pytest.mark.parametrize("seed", range(30))
def test_gradients_of_random_programs_equal_torchs_reverse_mode(seed: int) -> None:
    """Both compute in fp64 and differ only in the order of sums. 1e-12 allows for about a thousand roundings."""
    given = family(seed, dtype="fp64", grad_dtype="fp64")
    run = Run(given)
    run.micro_step("micro_first")
    for name, expected in autograd(given).items():
        assert (run.results()[name] - expected).norm() <= 1e-12 * (expected.norm() + 1e-3), f"seed {seed}: {name}"


def test_gradient_of_a_tied_param_is_the_sum_over_its_uses() -> None:
    tokens = {
        "tokens": torch.tensor([1, 1, 0, 4]),
        "targets": torch.tensor([2, -100, 1, 1]),
        "scale": torch.tensor(0.5),
    }

    def build(tied: bool) -> dict[str, Tensor]:
        def record(b: Builder) -> Value:
            w = b.param("w", (V, C), INIT)
            head = w if tied else b.param("head", (V, C), INIT)
            x = b.apply("embedding", b.input("tokens", (T,), "int32"), w)
            ins = (x, head, b.input("targets", (T,), "int32"), b.input("scale", (), "fp32"))
            return b.apply("lm_head_ce", *ins, chunks=2)

        weight = direction("w", (V, C))
        return train(record, contents={**tokens, "w": weight, "head": weight}).run()

    apart = build(tied=False)
    torch.testing.assert_close(build(tied=True)["w"], apart["w"] + apart["head"], rtol=1e-14, atol=1e-15)


# ------------------------------------------------------------------------- one value as the gradient of several params


@pytest.mark.parametrize("program", ["micro_first", "micro_next"])
def test_a_sum_of_two_params_gives_each_the_gradient(program: str) -> None:
    trained = train(lambda b: ramp(b, b.apply("add", b.param("p", (T, C), INIT), b.param("q", (T, C), INIT))))
    trained.run()
    gradients = trained.run(program)
    expected = direction("direction6", (T, C)) * (1 if program == "micro_first" else 2)
    assert torch.equal(gradients["p"], expected)
    assert torch.equal(gradients["q"], expected)


def test_a_param_added_to_itself_has_twice_the_gradient() -> None:
    def build(b: Builder) -> Value:
        p = b.param("p", (T, C), INIT)
        return ramp(b, b.apply("add", p, p))

    trained = train(build)
    assert torch.equal(trained.run()["p"], 2 * direction("direction5", (T, C)))
    assert torch.equal(trained.run("micro_next")["p"], 4 * direction("direction5", (T, C)))


def test_params_added_to_the_residual_stream_get_its_gradient() -> None:
    def build(b: Builder) -> Value:
        x, residual, w = b.param("x", (T, C), INIT), b.param("r", (T, C), INIT), b.param("w", (C,), INIT)
        norm, _, total = b.emit("add_rmsnorm", x, residual, w, eps=1e-3)
        return b.apply("add", ramp(b, norm), ramp(b, total))

    gradients = train(build).run()
    assert gradients["x"].norm() > 0
    assert torch.equal(gradients["x"], gradients["r"])


@pytest.mark.parametrize("program", ["micro_first", "micro_next"])
def test_an_op_that_takes_a_param_twice_adds_both_contributions(program: str) -> None:
    """d(p * p) = 2 p. The op has no rule, so both gradients are outputs of a single op."""

    def build(b: Builder) -> Value:
        p = b.param("p", (T, C), INIT)
        return ramp(b, b.apply("toy_mul", p, p))

    trained = train(build)
    trained.run()
    expected = 2 * direction("p", (T, C)) * direction("direction5", (T, C))
    got = trained.run(program)["p"]
    torch.testing.assert_close(got, expected * (1 if program == "micro_first" else 2), rtol=1e-14, atol=0)


def test_a_param_gets_a_gradient_that_other_ops_also_read() -> None:
    """The gradient of a position table is that of the residual stream, which the embedding's backward reads too."""

    def build(b: Builder) -> Value:
        x = b.apply("embedding", b.input("tokens", (T,), "int32"), b.param("w", (V, C), INIT))
        return ramp(b, b.apply("add", x, b.param("positions", (T, C), INIT)))

    trained = train(build)
    expected = trained.run()
    assert torch.equal(expected["positions"], draw(Value("direction7", (T, C), "fp64", "input")))
    assert torch.equal(expected["w"].sum(0), expected["positions"].sum(0))
    assert torch.equal(trained.run("micro_next")["positions"], 2 * expected["positions"])


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_a_gradient_in_the_dtype_of_activations_accumulates_in_any_dtype(grad_dtype: str) -> None:
    """The gradient of a sum of bf16 params is bf16. The gradients of the params are stored in `grad_dtype`."""

    def build(b: Builder) -> Value:
        p, q = b.param("p", (T, C), INIT), b.param("q", (T, C), INIT)
        return ramp(b, b.apply("swiglu", b.apply("linear", b.apply("add", p, q), b.param("w", (2, C), INIT))))

    trained = train(build, dtype="bf16", grad_dtype=grad_dtype)
    first = trained.run()
    second = trained.run("micro_next")
    assert torch.equal(first["p"], first["q"])
    assert torch.equal(second["p"], 2 * first["p"])  # doubling is exact in both dtypes


def test_contributions_of_different_dtypes_add_up() -> None:
    """A bf16 copy of a weight has a fp32 contribution from a matrix product and a bf16 one from an elementwise op."""

    def build(b: Builder) -> Value:
        w = b.apply("cast", b.param("w", (C, C), INIT, dtype="fp32"), dtype="bf16")
        x = b.input("x", (T, C), "bf16")
        return ramp(b, b.apply("linear", b.apply("linear", x, w), b.apply("toy_mul", w, w)))

    x, weight = direction("x", (T, C)).bfloat16().double(), direction("w", (C, C)).bfloat16()
    held = weight.double().requires_grad_()
    (((x @ held.T) @ (held * held).T) * direction("direction6", (T, C)).bfloat16().double()).sum().backward()
    assert held.grad is not None
    got = train(build, dtype="bf16", contents={"w": weight}).run()["w"].double()
    assert (got - held.grad).norm() <= 0.02 * held.grad.norm()  # a few bf16 roundings of 2^-8 each


# ------------------------------------------------------------------------------------------- losses that are not fused


def test_the_backward_pass_of_an_unfused_loss_starts_from_one() -> None:
    """The loss is the sum of two heads. No op computes it together with its gradients, so `fill` writes d(loss) = 1."""

    def build(b: Builder) -> Value:
        x, w = b.param("x", (T, C), INIT), b.param("w", (V, C), INIT)
        rest = (b.input("targets", (T,), "int32"), b.input("scale", (), "fp32"))
        losses = [b.apply("lm_head_ce", v, w, *rest, chunks=n) for v, n in ((x, 1), (b.apply("add", x, x), 4))]
        return b.apply("add", *losses)

    targets = torch.tensor([2, -100, 1, 1])
    trained = train(build, contents={"targets": targets, "scale": torch.tensor(0.5)})
    assert [op.kind for op in trained.programs["micro_first"].ops].count("fill") == 1
    x, w = (direction(n, s).requires_grad_() for n, s in (("x", (T, C)), ("w", (V, C))))
    for factor in (1, 2):
        (torch.nn.functional.cross_entropy(factor * x @ w.T, targets, reduction="sum") * 0.5).backward()
    gradients = trained.run()
    torch.testing.assert_close(gradients["x"], x.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients["w"], w.grad, rtol=1e-12, atol=1e-14)


def test_an_output_that_depends_on_no_input_contributes_no_gradient() -> None:
    """Autograd cannot differentiate such an output. The result is zero, not an error."""

    def build(b: Builder) -> Value:
        p = b.param("p", (T,), INIT)
        _, table = b.emit("toy_table", p, b.input("ids", (T,), "int32"))
        return b.apply("add", ramp(b, table), ramp(b, p))

    assert torch.equal(train(build).run()["p"], direction("direction7", (T,)))


def detached(x: Tensor) -> Tensor:
    return x.detach().relu().square()


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.relu().square()


@pytest.mark.parametrize("reference", ["detached", "without_grad"])
def test_a_reference_that_cuts_autograd_stops_the_run(reference: str) -> None:
    """Zero gradients would train silently wrong."""
    cut = OpDef(
        kind="cut", infer=lambda i, a: [OutSpec("y", i[0].shape, i[0].dtype)], reference=f"{__name__}:{reference}"
    )
    trained = train(lambda b: ramp(b, b.apply("cut", b.param("p", (T, C), INIT))), ops={**VOCABULARY, "cut": cut})
    with pytest.raises(
        ProgramError, match=r"the reference of cut gives no gradient \(detach, no_grad\?\): give .* vjp"
    ):
        trained.run()


# ------------------------------------------------------------------------------------------------------------ rejected


def _loss_of(build: Build, trainable: Callable[[Value], bool] = everything) -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        loss = build(b)
        differentiate(b.program("forward", (loss,)), loss, b, trainable, "fp32")


def test_a_loss_that_depends_on_no_trainable_param_is_rejected() -> None:
    def build(b: Builder) -> Value:
        return ramp(b, b.apply("cast", b.param("p", (C,), INIT), dtype="fp32"))

    with pytest.raises(ProgramError, match=r"loss:fp32\[\] depends on no trainable param"):
        _loss_of(build, lambda param: False)


def test_a_trainable_param_used_only_by_a_dead_branch_is_rejected_by_name() -> None:
    def build(b: Builder) -> Value:
        b.apply("cast", b.param("forgotten", (C,), INIT), dtype="fp32")
        return ramp(b, b.param("p", (C,), INIT))

    with pytest.raises(ProgramError, match="not used by the loss: forgotten"):
        _loss_of(build)
    _loss_of(build, lambda param: param.name == "p")  # a frozen param need not reach the loss


def test_a_trainable_param_that_no_op_reads_is_rejected_by_name() -> None:
    def build(b: Builder) -> Value:
        b.param("forgotten", (C,), INIT)
        return ramp(b, b.param("p", (C,), INIT))

    with pytest.raises(ProgramError, match="not used by the loss: forgotten"):
        _loss_of(build)


def test_a_rule_that_ends_the_gradient_of_a_param_is_named() -> None:
    cut = OpDef(
        kind="cut",
        infer=lambda i, a: [OutSpec("y", i[0].shape, i[0].dtype)],
        reference="",
        vjp=lambda b, op, g: (None,),
    )
    b = Builder({**VOCABULARY, "cut": cut}, "fp32")
    with b.record("forward"):
        loss = ramp(b, b.apply("cut", b.apply("cast", b.param("p", (T, C), INIT), dtype="fp32")))
        with pytest.raises(
            DisconnectedError, match=r"cut off by vjp of cut \(block -1, .*\), which gives None: p"
        ) as error:
            differentiate(b.program("forward", (loss,)), loss, b, everything, "fp32")
    assert error.value.cut_by == "cut"


@pytest.mark.parametrize("kind", ["rmsnorm", "add_rmsnorm"])
def test_a_loss_that_reads_a_statistic_is_rejected(kind: str) -> None:
    """The rules cannot differentiate rstd. They must raise an error rather than ignore the gradient."""

    def build(b: Builder) -> Value:
        x = b.param("x", (T, 6), INIT)
        if kind == "rmsnorm":
            out, statistic = b.emit("rmsnorm", x, b.param("w", (6,), INIT), eps=1e-3)
        else:
            out, statistic, _ = b.emit("add_rmsnorm", x, x, b.param("w", (6,), INIT), eps=1e-3)
        return b.apply("add", ramp(b, out), ramp(b, statistic))

    with pytest.raises(ProgramError, match=kind):
        train(build)


def test_states_do_not_propagate_gradients() -> None:
    """Differentiation treats a value that outlives the program as a constant, even if an op writes it."""
    b = Builder(VOCABULARY, "fp64")
    with b.record("forward"):
        x, scale = b.param("x", (T, C), INIT), b.state("scale", (), "fp64", INIT)
        for _ in range(3):
            watched = b.activation("watched", x.shape, x.dtype)
            b.emit("toy_watch", x, scale, outs=[watched])
            x = watched
        loss = ramp(b, x)
        program, _ = differentiate(b.program("forward", (loss,)), loss, b, everything, "fp32")
    assert not [op for op in program.ops if op.phase == "backward" and op.kind == "add"]
