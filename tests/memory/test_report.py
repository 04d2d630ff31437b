"""Reports: bytes equal those that are allocated, FLOPs those computed by hand, times the estimate of each op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from models.harness import plan_inputs

from surogate_core.api import DeviceInfo, KernelDef, Op, OpDef, PrecisionRequest, Program, Support, Target, Value
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import DEVICES, GIB, cpu, device
from surogate_core.machine.prices import GPU as PRICES_OF_GPUS
from surogate_core.machine.prices import arithmetic_share
from surogate_core.memory.cost import Cost, OpCosts, op_cost, program_cost
from surogate_core.planning.report import Report, largest_values, summarise
from surogate_core.program import verify as verify_module
from surogate_core.runtime.arena import Buffers
from surogate_core.standard_ops import OPS as STANDARD_OPS
from surogate_models.ops import OPS as MODEL_OPS
from surogate_optim_adamw.adamw import ADAMW_OP

OPS = {definition.kind: definition for definition in (*STANDARD_OPS, *MODEL_OPS, ADAMW_OP)}
H200 = device("h200")

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TINY = QWEN3_0_6B | {
    "vocab_size": 311,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
PRODUCTS = {"linear", "linear_dgrad", "linear_wgrad", "lm_head_ce", "lm_head_ce_grads"}


def assembled(config: Mapping[str, Any], **changes: Any) -> tuple[Assembly, PlanInputs]:
    sizes = {"batch_size": 2, "seq_len": 64, "max_documents": 18, "request": PrecisionRequest(), "target": Target(H200)}
    given = plan_inputs(config, **{**sizes, **changes})
    return assemble(given), given


def reported(config: Mapping[str, Any], grad_accum_steps: int = 1, **changes: Any) -> tuple[Report, Assembly]:
    assembly, given = assembled(config, **changes)
    return summarise(assembly, replace(given, grad_accum_steps=grad_accum_steps)), assembly


MIXTURES = [
    {},
    {"recompute": frozenset({"block"})},
    {"lmhead_chunks": 32},
    {"request": PrecisionRequest(model_dtype="fp32")},
    {"request": PrecisionRequest(model_dtype="bf16", matmul_dtype="fp32", master_dtype="fp32")},
    {"request": PrecisionRequest(param_grad_dtype="bf16", optimizer_state_dtype="bf16")},
]


# --------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("changes", MIXTURES, ids=range(len(MIXTURES)))
def test_the_parts_sum_to_the_allocated_bytes(changes: dict[str, Any]) -> None:
    report, assembly = reported(TINY, **changes)
    parts = {name: nbytes for name, nbytes in report.device_bytes.items() if name != "total"}
    assert list(parts) == ["weights", "gradients", "optimizer", "activations", "workspace", "runtime"]
    assert report.device_bytes["total"] == sum(parts.values())
    assert Buffers(assembly.memory).nbytes == report.device_bytes["total"] - H200.runtime_bytes
    assert report.device_bytes["activations"] + report.device_bytes["workspace"] == assembly.memory.arena_bytes
    assert all(nbytes >= 0 for nbytes in parts.values())
    assert report.host_bytes["total"] == sum(v for k, v in report.host_bytes.items() if k != "total") > 0


@pytest.mark.parametrize("changes", MIXTURES, ids=range(len(MIXTURES)))
def test_persistent_bytes_are_those_of_the_values(changes: dict[str, Any]) -> None:
    """Except for the alignment of each value to 256 bytes."""
    report, assembly = reported(TINY, **changes)
    for part, role in (("weights", "param"), ("gradients", "grad"), ("optimizer", "state")):
        sizes = [v.nbytes for v in assembly.declared if v.role == role]
        assert sum(sizes) <= report.device_bytes[part] < sum(sizes) + 256 * len(sizes)


def test_the_report_has_the_live_bytes_at_the_peak_by_label() -> None:
    report, assembly = reported(TINY)
    arena = max(assembly.memory.arenas.values(), key=lambda arena: arena.arena_bytes)
    assert sum(report.activations_by_label.values()) == arena.lower_bound <= arena.arena_bytes
    assert list(report.activations_by_label.values()) == sorted(report.activations_by_label.values(), reverse=True)
    assert report.peak.startswith("micro_") and f"op {arena.peak_op}: " in report.peak


def test_the_largest_values_are_grouped_by_shape_and_named_by_kind() -> None:
    """The groups hold the largest values of the plan."""
    _, assembly = reported(TINY)
    largest = largest_values(assembly)[:10]
    arena = max(assembly.memory.arenas.values(), key=lambda arena: arena.arena_bytes)
    values = [v for s in assembly.memory.segments.values() for v in s.offsets] + [life.value for life in arena.lives]
    sizes = [same.nbytes for same in largest for _ in range(same.count)]
    assert sizes == sorted((v.nbytes for v in values), reverse=True)[: len(sizes)]
    names = [name for same in largest for name in same.names]
    assert len({(same.nbytes, same.dtype, same.shape) for same in largest}) == len(largest) == 10
    assert not any(part.isdigit() for name in names for part in name.split("."))
    _, everything = reported(TINY, seq_len=2, max_documents=2)
    (gate_up,) = (same for same in largest_values(everything) if "grad.layers.*.mlp.gate_up" in same.names)
    assert gate_up.count == TINY["num_hidden_layers"] * len(gate_up.names)


@pytest.mark.parametrize(
    ("model", "master", "state", "bytes_per_param"),
    [
        ("bf16", "bf16", "fp32", 8),
        ("bf16", "fp32", "fp32", 12),
        ("bf16", "bf16", "bf16", 4),
        ("fp32", "fp32", "fp32", 8),
    ],
)
def test_optimizer_bytes_of_qwen3_0_6b(model: str, master: str, state: str, bytes_per_param: int) -> None:
    """Two moments, and a master unless it is the param itself, for each of 596,049,920 parameters."""
    request = PrecisionRequest(model_dtype=model, master_dtype=master, optimizer_state_dtype=state)
    report, _ = reported(QWEN3_0_6B, request=request)
    assert report.device_bytes["optimizer"] == pytest.approx(596_049_920 * bytes_per_param, rel=1e-4)
    assert report.device_bytes["weights"] == pytest.approx(596_049_920 * (2 if model == "bf16" else 4), rel=1e-4)
    assert report.device_bytes["gradients"] == pytest.approx(596_049_920 * 4, rel=1e-4)


def test_a_plan_fits_if_its_total_is_at_most_the_memory() -> None:
    report, _ = reported(TINY)
    total = report.device_bytes["total"]
    for memory, fits in ((total, True), (total - 1, False)):
        assert replace(report, device=replace(H200, memory_bytes=memory)).fits is fits


# --------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(("batch_size", "seq_len"), [(1, 4096), (8, 1024)])
def test_flops_of_qwen3_0_6b_are_those_computed_by_hand(batch_size: int, seq_len: int) -> None:
    """6 N T for the matrices (2 N T forward, twice that backward), including the tied embedding as LM head. Attention
    has 2 products forward and 5 backward of T x T/2 x 2048 per row, with two operations each. Norms, SwiGLU and RoPE
    add less than 1 %."""
    tokens = batch_size * seq_len
    qkv, o = 1024 * (16 + 2 * 8) * 128, 16 * 128 * 1024
    mlp = 3 * 1024 * 3072
    n_matmul = 28 * (qkv + o + mlp) + 151936 * 1024
    assert n_matmul == 595_984_384  # all parameters except those of the norms
    attention = 28 * 7 * tokens * seq_len * 16 * 128
    assembly, _ = assembled(QWEN3_0_6B, batch_size=batch_size, seq_len=seq_len)
    for name in ("micro_first", "micro_next"):
        flops: dict[str, int] = {}
        for op in assembly.programs[name].ops:
            flops[op.kind] = flops.get(op.kind, 0) + OPS[op.kind].flops(op)
        assert sum(n for kind, n in flops.items() if kind in PRODUCTS) == 6 * n_matmul * tokens
        assert sum(n for kind, n in flops.items() if kind.startswith("attention")) == attention
        total = program_cost(assembly.programs[name], OpCosts(OPS, H200, assembly.kernels.kernel)).flops
        assert 1 <= total / (6 * n_matmul * tokens + attention) < 1.01
    evaluate = [op for op in assembly.programs["evaluate"].ops if op.kind in PRODUCTS]
    assert sum(OPS[op.kind].flops(op) for op in evaluate) == 2 * n_matmul * tokens


def test_recomputing_blocks_adds_a_forward_pass() -> None:
    """For all products in blocks except the last one of each block, whose output the backward pass does not read."""
    costs = []
    for parts in (frozenset(), frozenset({"block"})):
        assembly, _ = assembled(QWEN3_0_6B, recompute=parts)
        ops = [op for op in assembly.programs["micro_first"].ops if op.kind in PRODUCTS]
        costs.append(sum(OPS[op.kind].flops(op) for op in ops))
    block = 1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 2 * 1024 * 3072
    assert costs[1] - costs[0] == 28 * 2 * block * 2 * 64


def test_the_cost_of_a_step_is_that_of_its_micro_steps_and_an_update() -> None:
    assembly, given = assembled(TINY)
    first, following, update = (
        program_cost(assembly.programs[name], OpCosts(OPS, H200, assembly.kernels.kernel))
        for name in ("micro_first", "micro_next", "update")
    )
    for steps in (1, 2, 5):
        report = summarise(assembly, replace(given, grad_accum_steps=steps))
        expected = first + following.times(steps - 1) + update
        assert (report.step.flops, report.step.bytes) == (expected.flops, expected.bytes)
        assert report.step.seconds == pytest.approx(expected.seconds)
        assert report.tokens == 2 * 64 * steps
        assert report.tokens_per_second == pytest.approx(report.tokens / report.step.seconds)
    assert following.bytes > first.bytes  # gradients are read too
    assert following.flops == first.flops


# ------------------------------------------------------------------------------------------------------ several devices


def summed(*values: Value, world_size: int = 2) -> Op:
    return Op("all_reduce", values, values, {"world_size": world_size}, lane="comm")


def test_a_ring_all_reduce_sends_two_times_n_minus_one_nths_of_the_bytes() -> None:
    value = Value("grad", (1 << 30,), "bf16", "grad")
    for n in (1, 2, 4, 8):
        assert OPS["all_reduce"].link(summed(value, world_size=n)) == 2 * (n - 1) * value.nbytes // n
    seconds = op_cost(summed(value), OPS["all_reduce"], H200).seconds
    assert seconds == H200.launch_seconds + value.nbytes / H200.link.bandwidth


def test_a_collective_overlaps_with_later_ops_except_those_that_use_its_values() -> None:
    """The ops take one second each, the collectives 1.5 and 0.5 seconds, and nothing from the ops."""
    device, second = replace(H200, link=replace(H200.link, taken=0.0)), int(H200.bandwidth)
    ops = {"all_reduce": OPS["all_reduce"], "work": replace(toy_definition(0, second), kind="work")}
    long, short = (Value(f"g{s}", (int(s * H200.link.bandwidth),), "uint8", "grad") for s in (1.5, 0.5))

    def work(*values: Value) -> Op:
        return Op("work", values, ())

    def seconds(*program: Op) -> tuple[float, float, float]:
        cost = program_cost(Program("p", program), OpCosts(ops, device, lambda op: WHOLE))
        return cost.seconds, cost.comm_seconds, cost.waiting_seconds

    for program, expected in (
        ((work(), summed(short), work()), (2, 0.5, 0)),
        ((work(), summed(long), work()), (2.5, 1.5, 0.5)),
        ((work(), summed(long)), (2.5, 1.5, 1.5)),
        ((work(), summed(short), summed(long), work(), work()), (3, 2, 0)),
        ((work(), summed(short), work(short), work()), (3.5, 0.5, 0.5)),
        ((summed(long), work(), summed(short), work(short)), (3, 2, 1)),
    ):
        assert seconds(*program) == pytest.approx(expected, abs=1e-4)  # launches take 2 us


def test_kernels_concurrent_with_a_sum_or_a_gather_take_longer_by_its_share() -> None:
    second, nbytes = int(H200.bandwidth), int(0.5 * H200.link.bandwidth)
    ops = {kind: OPS[kind] for kind in ("all_reduce", "all_gather")}
    ops["work"] = replace(toy_definition(0, second), kind="work")
    value, whole = Value("g", (nbytes,), "uint8", "grad"), Value("w", (2 * nbytes,), "uint8", "act")
    gathered = Op("all_gather", (value,), (whole,), {"world_size": 2, "shapes": ((2 * nbytes,),)}, lane="comm")
    device = replace(H200, link=replace(H200.link, taken=0.2, gathered=0.04))
    for exchanged, waiting in ((summed(value), 0.1), (gathered, 0.02)):
        program = Program("p", (exchanged, Op("work", (), ())))
        cost = program_cost(program, OpCosts(ops, device, lambda op: WHOLE))
        assert (cost.seconds, cost.waiting_seconds) == pytest.approx((1 + waiting, waiting), abs=1e-4)


def test_each_of_several_devices_holds_the_same_as_one_and_runs_its_part_of_a_larger_step() -> None:
    one, _ = reported(TINY, 2)
    assembly, given = assembled(TINY, world_size=4)
    four = summarise(assembly, replace(given, grad_accum_steps=2))
    assert four.tokens == 4 * one.tokens
    differing = {part for part in one.device_bytes if one.device_bytes[part] != four.device_bytes[part]}
    assert differing == {"runtime", "total"}
    assert four.host_bytes["batches"] == 4 * one.host_bytes["batches"]
    assert four.step.flops == one.step.flops and four.step.seconds > one.step.seconds
    assert one.step.comm_seconds == one.step.waiting_seconds == 0


# -------------------------------------------------------------------------------------------------------- time of an op


def toy(nbytes: int, dtype: str = "bf16") -> Op:
    x = Value("x", (nbytes,), "uint8", "act")
    w = Value("w", (), dtype, "act")
    return Op("toy", (x, w), (Value("y", (), "uint8", "act"),))


def toy_definition(flops: int, traffic: int | None) -> OpDef:
    return OpDef(
        kind="toy",
        infer=lambda ins, attrs: (),
        reference="",
        flops=lambda op: flops,
        traffic=None if traffic is None else lambda op: traffic,
    )


def toy_kernel(memory_efficiency: float | None) -> KernelDef:
    return KernelDef(
        op="toy",
        dtypes=("*", "*", "*"),
        supports=lambda op, target: Support(True),
        bind=lambda op, context: (print, ()),
        memory_efficiency=memory_efficiency,
    )


WHOLE = toy_kernel(1.0)
"""A kernel that moves bytes at the bandwidth of its device."""


@pytest.mark.parametrize("name", list(DEVICES))
def test_the_time_of_an_op_is_a_launch_and_the_longer_of_arithmetic_and_traffic(name: str) -> None:
    d = DEVICES[name]
    much = 10**15
    arithmetic = much / d.flops["bf16"]
    for flops, traffic, seconds in (
        (much, 1, arithmetic),
        (1, 10**12, 10**12 / d.bandwidth),
        (1, 1, 1 / d.bandwidth),
        (much, 10**12, max(arithmetic, 10**12 / d.bandwidth)),
    ):
        total = d.launch_seconds + seconds
        expected = Cost(flops, traffic, total, product_seconds=total if seconds == arithmetic else 0.0)
        assert op_cost(toy(4), toy_definition(flops, traffic), d, WHOLE) == expected


def test_an_op_is_priced_by_the_share_of_a_rate_that_its_kernel_names() -> None:
    kernel = replace(WHOLE, arithmetic=("fp32", 0.25))
    seconds = op_cost(toy(4), toy_definition(10**15, 1), DEVICES["h100"], kernel).seconds
    assert seconds == pytest.approx(4 * 10**15 / DEVICES["h100"].flops["fp32"], rel=1e-4)


@pytest.mark.parametrize(("rate", "oldest"), [("fp8", 89), ("fp4", 100)])
def test_an_op_is_priced_by_the_rate_that_it_names_and_in_fp32_where_no_kernel_can_have_it(
    rate: str, oldest: int
) -> None:
    """A GPU that has the instructions has the rate, so a plan for it never falls back."""
    definition = replace(toy_definition(10**15, 1), math=lambda op: rate)
    for d in DEVICES.values():
        assert (rate in d.flops) == (d.sm is not None and d.sm >= oldest), d.name
        seconds = op_cost(toy(4), definition, d, WHOLE).seconds - d.launch_seconds
        assert seconds == pytest.approx(10**15 / d.flops[rate if rate in d.flops else "fp32"])


def test_fp4_is_at_least_twice_as_fast_as_fp8_on_every_device_that_has_it() -> None:
    """Data sheets say twice, three times on the B300, four times on GeForce, whose FP8 is halved as its bf16 is."""
    ratios = {d.name: d.flops["fp4"] / d.flops["fp8"] for d in DEVICES.values() if "fp4" in d.flops}
    assert {name: round(ratio, 1) for name, ratio in ratios.items()} == {
        **{"b200": 2.0, "b300": 3.0, "rtxpro6000": 2.0, "spark": 2.0},
        **dict.fromkeys(("rtx5060ti", "rtx5070", "rtx5070ti", "rtx5080", "rtx5090"), 4.0),
    }


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_attention_of_a_plugin_has_the_price_of_attention(way: Any) -> None:
    """An op says what its work is; the price does not depend on its name."""
    sizes = {"head_dim": 128, "seq_len": 2048}
    definition = replace(toy_definition(10**15, 1), attention=way)
    cost = op_cost(replace(toy(4), attrs=sizes), definition, H200)
    share = PRICES_OF_GPUS.attention[way].share(replace(toy(4), attrs=sizes), 10**15, H200.flops["bf16"])
    assert cost.seconds == cost.attention_seconds == H200.launch_seconds + 10**15 / (share * H200.flops["bf16"])


def test_the_parts_of_the_time_of_a_program_add_up() -> None:
    given = plan_inputs(QWEN3_0_6B, target=Target(H200), batch_size=4, seq_len=512)
    step = summarise(assemble(given), given).step
    parts = (step.product_seconds, step.attention_seconds, step.memory_seconds, step.waiting_seconds)
    assert all(part > 0 for part in parts[:3]) and sum(parts) == pytest.approx(step.seconds)


def test_passes_come_on_top_of_arithmetic() -> None:
    definition = replace(toy_definition(10**15, 10**9), passes=lambda op: 10**12)
    cost = op_cost(toy(4), definition, H200, WHOLE)
    assert cost.bytes == 10**9 + 10**12
    expected = H200.launch_seconds + 10**15 / H200.flops["bf16"] + 10**12 / H200.bandwidth
    assert cost.seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("d", "kernel", "share"),
    [(H200, toy_kernel(0.5), 0.5), (H200, toy_kernel(None), 0.8), (H200, None, 0.8), (cpu(), None, 0.8)],
)
def test_bytes_take_the_share_of_the_kernel_or_of_the_class_of_devices(
    d: DeviceInfo, kernel: KernelDef | None, share: float
) -> None:
    definition = replace(toy_definition(0, 10**12), passes=lambda op: 10**12)
    assert op_cost(toy(4), definition, d, kernel).seconds == d.launch_seconds + 2 * (10**12 / (share * d.bandwidth))


def attention(rows: int, seq_len: int, heads: int, head_dim: int, kind: str = "attention", **more: int) -> Op:
    attrs = {"n_heads": heads, "n_kv_heads": heads, "head_dim": head_dim, "seq_len": seq_len, **more}
    out = Value("attention", (rows * seq_len, heads * head_dim), "bf16", "act")
    return Op(kind, (), (out,), attrs)


def attention_share(op: Op, d: DeviceInfo) -> float:
    return arithmetic_share(op, OPS[op.kind], OPS[op.kind].flops(op), d.flops.get("bf16", d.flops["fp32"]), d)


def test_little_attention_takes_no_longer_on_a_slower_gpu_than_its_share_of_the_rate() -> None:
    """Filling the device takes 18 us at most, on a CPU nothing: it was 12 GFLOP on every device."""
    op = attention(1, 128, 4, 64)
    shares = {name: attention_share(op, DEVICES[name]) for name in ("h200", "h100", "a100", "rtx4090", "l4")}
    assert shares["h200"] == shares["h100"] < shares["a100"] < shares["rtx4090"] < shares["l4"]
    small, large = (attention_share(attention(rows, 128, 4, 64), cpu()) for rows in (1, 1000))
    assert small == large


def test_a_window_shortens_attention_forward_and_not_backward() -> None:
    """cuDNN 9.19 on an H100: 269 and 894 us forward, 3,862 and 3,883 us backward."""
    for kind, shorter in (("attention", 0.3), ("attention_bwd", 1.0)):
        windowed, whole = (attention(1, 8192, 32, 128, kind, **more) for more in ({"window": 1024}, {}))
        first, second = (op_cost(op, OPS[kind], DEVICES["h100"]).seconds for op in (windowed, whole))
        assert first / second == pytest.approx(shorter, abs=0.03), kind


def test_attention_is_a_small_part_of_a_short_step_on_a_cpu() -> None:
    """It was planned at many times the products: the FLOPs of an H200 in its time to fill were added on any device."""
    given = plan_inputs(QWEN3_0_6B, target=Target(cpu()), batch_size=1, seq_len=64)
    step = summarise(assemble(given), given).step
    assert step.attention_seconds < step.product_seconds / 4


def test_a_window_has_the_flops_of_the_pairs_that_see_each_other() -> None:
    flops = OPS["attention"].flops
    whole, length = flops(attention(1, 4096, 2, 64)), 4096
    for window in (1, 512, 4095, 4096, 9999):
        pairs = sum(min(i + 1, window) for i in range(length))
        assert flops(attention(1, 4096, 2, 64, window=window)) == pytest.approx(whole * 2 * pairs / length**2, rel=1e-3)
    assert attention_share(attention(1, 4096, 2, 64, window=512), H200) < attention_share(
        attention(1, 4096, 2, 64), H200
    )


def test_attention_is_less_efficient_with_small_heads_short_documents_and_little_work() -> None:
    def efficiency(*sizes: int, kind: str = "attention") -> float:
        return attention_share(attention(*sizes, kind=kind), H200)

    assert 0.2 < efficiency(8, 1024, 32, 64) < efficiency(8, 1024, 16, 128) < efficiency(8, 8192, 16, 128) < 1
    assert efficiency(1, 1024, 16, 128) < efficiency(8, 1024, 16, 128)
    assert efficiency(1, 1 << 20, 16, 256) < efficiency(1, 1 << 20, 16, 128) < 1, "a share"
    assert efficiency(8, 1024, 16, 128, kind="attention_bwd") < efficiency(8, 1024, 16, 128)


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [((2, 2048, 32, 128), 139, 466), ((32, 1024, 14, 64), 178, 644), ((16, 2048, 16, 128), 488, 1692)],
)
def test_attention_takes_as_long_as_was_measured(sizes: tuple[int, ...], forward: int, backward: int) -> None:
    """Microseconds of benchmarks/h200.md, "Documents that fill their rows"; inside of steps they take longer."""
    for kind, measured in (("attention", 1.14 * forward), ("attention_bwd", 1.1 * backward)):
        op = attention(*sizes, kind=kind)
        seconds = OPS[kind].flops(op) / (H200.flops["bf16"] * attention_share(op, H200))
        assert seconds == pytest.approx(measured * 1e-6, rel=0.06)


def test_the_rate_is_that_of_the_operand_dtype() -> None:
    for dtype in ("bf16", "fp32", "fp64"):
        cost = op_cost(toy(4, dtype), toy_definition(10**15, 0), H200)
        assert cost.seconds == H200.launch_seconds + 10**15 / H200.flops[dtype]


def test_traffic_counts_each_value_once_and_accumulated_outputs_twice() -> None:
    x, total = Value("x", (1000,), "bf16", "act"), Value("g", (500,), "fp32", "grad")
    definition = toy_definition(0, None)
    assert op_cost(Op("toy", (x,), (total,)), definition, H200).bytes == 2000 + 2000
    assert op_cost(Op("toy", (x,), (total,), accumulate=frozenset({0})), definition, H200).bytes == 2000 + 4000


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("d", [*DEVICES.values(), cpu()], ids=lambda d: d.name)
def test_every_device_of_the_table_is_plausible(d: DeviceInfo) -> None:
    """Orders of magnitude reveal wrong units: memory is 7 to 300 GiB, the bf16 rate 15 to 2500 TFLOP/s."""
    assert device(d.name).name == d.name and d.title and d.source
    assert d.flops.keys() >= {"fp32", "fp64"}
    if d.name == "cpu":
        assert d.sm is None and d.memory_bytes > GIB
        assert 1e9 < d.bandwidth < 1e12 and all(1e9 < rate < 1e14 for rate in d.flops.values())
        return
    assert d.sm is not None and 80 <= d.sm <= 121
    assert 7 * GIB <= d.memory_bytes <= 300 * GIB and 0 < d.runtime_bytes < d.memory_bytes / 10
    assert 15e12 < d.flops["bf16"] < 2.5e15
    assert d.flops["fp64"] <= d.flops["fp32"] <= d.flops["bf16"]
    assert 0.1e12 < d.bandwidth < 10e12
    assert 1e-6 < d.launch_seconds < 1e-5
    assert 20 < d.flops["bf16"] / d.bandwidth < 700  # FLOPs per byte above which products are limited by arithmetic


def test_device_names_ignore_case_spaces_and_underscores() -> None:
    for name in ("h200", "H200", "rtx_4090", "RTX 4090", "a100-40", "RTX PRO 6000", "CPU"):
        assert device(name).name == name.lower().replace("_", "").replace(" ", "")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100", "h100"),
        ("rtx-4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("4070 Ti Super", "rtx4070tisuper"),
        ("RTX 4060 Ti 16GB", "rtx4060ti"),
        ("A100 80GB", "a100"),
        ("a100 40 GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("RTX 6000 Ada", "rtx6000ada"),
    ],
)
def test_devices_are_found_by_the_names_that_people_write(written: str, name: str) -> None:
    assert device(written).name == name


def test_every_title_names_its_device() -> None:
    assert [device(d.title).name for d in DEVICES.values()] == list(DEVICES)


@pytest.mark.parametrize("name", ["T4", "V100 32GB", "RTX 2080 Ti", "Tesla P100-PCIE-16GB", "GTX 1080"])
def test_a_device_before_ampere_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device: '{name}' has compute capability .* need 8.0 .Ampere. or newer"):
        device(name)


def test_an_ambiguous_name_lists_its_candidates() -> None:
    with pytest.raises(ConfigError, match=r"'RTX 6000' is ambiguous. Candidates: rtx6000ada .*, rtxpro6000 "):
        device("RTX 6000")


@pytest.mark.parametrize("name", ["4060 Ti 8GB", "RTX 4090 Laptop", "80GB", ""])
def test_another_card_than_those_of_the_table_is_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match="is not in the device table"):
        device(name)


def test_the_error_for_an_unknown_device_lists_the_names() -> None:
    with pytest.raises(ConfigError) as refused:
        device("h2000")
    assert "h2000" in str(refused.value)
    assert all(name in str(refused.value) for name in ("cpu", *DEVICES))


# --------------------------------------------------------------------------------------------------------------- speed


def test_planning_a_large_model_checks_each_op_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 layers of a 32B model. Ops that a pass does not change are not checked again: less than 1.5 checks per op."""
    inferred = []
    check = verify_module._check_op
    monkeypatch.setattr(verify_module, "_check_op", lambda *a: inferred.append(a) or check(*a))
    config = QWEN3_0_6B | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    }
    report, assembly = reported(config, seq_len=4096)
    assert len(inferred) < 1.5 * sum(len(program.ops) for program in assembly.programs.values())
    assert sum(p.ops_after for p in assembly.passed.passes) > 3 * len(inferred)
    assert sum(v.size for v in assembly.params.values()) == 32_762_123_264
    assert not report.fits
