"""From plan inputs to planned programs: plugins record programs, passes transform them. No torch.

`PASSES` is what happens, in order. Those up to `FORK` record the programs of a run, once for all plans of it; the
others finish them for one plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Final

from ..memory.plan import plan_programs
from .assembly import ADAPTER_START, Assembly
from .draft import Draft, Pass
from .inputs import PlanInputs
from .passes.accumulate import accumulate_gradients
from .passes.adapter import apply_adapters, fuse_by_adapters, start_adapters
from .passes.build import build_model
from .passes.chunks import run_in_chunks
from .passes.dead_code import drop_dead_code
from .passes.decode_some import decode_some_experts
from .passes.derive import begin_derive
from .passes.differentiate import append_backward
from .passes.divide import divide_weights
from .passes.documents import vary_documents
from .passes.encode_some import encode_some_experts, stages
from .passes.evaluation import make_evaluation
from .passes.fuse_adds import fuse_additions
from .passes.gather_late import gather_late
from .passes.in_place import overwrite_inputs
from .passes.loss import append_loss
from .passes.lower import check_lowered, lower_programs
from .passes.metrics import declare_metrics
from .passes.offload import apply_offloads
from .passes.optimizer import record_update
from .passes.outputs import write_states
from .passes.params import describe_params
from .passes.pending import keep_pending_states
from .passes.quantize_parts import quantize_parts
from .passes.read_stored import read_stored, read_stored_at_start
from .passes.recompute import recompute_values
from .passes.reduce import reduce_gradients
from .passes.reference import run_reference
from .passes.scatter import scatter_gradients
from .passes.staged import stage_params
from .passes.start import record_start
from .passes.store import store_weights
from .passes.stream import stream_values
from .passes.tile import sum_rows_in_blocks, tile_rows
from .resolve import resolve
from .verifier import Verifier


def _compares(draft: Draft) -> bool:
    return draft.stand_in is not None


def _chunks(draft: Draft) -> bool:
    return draft.inputs.attn_bwd_chunks > 1


def _decodes_some(draft: Draft) -> bool:
    return bool(draft.inputs.decoded_experts)


def _stores(draft: Draft) -> bool:
    return draft.inputs.weight_format is not None


def _starts_from_stored(draft: Draft) -> bool:
    return _stores(draft) and ADAPTER_START in draft.programs


def _divides_gradients(draft: Draft) -> bool:
    return draft.inputs.sharding.gradients


def _divides_weights(draft: Draft) -> bool:
    return draft.inputs.sharding.weights


FORK: Final = Pass("fork", "", "from here on for each plan", lambda draft: draft)
"""Plans of what is recorded may differ in `recompute`, `recompute_chosen`, `row_tiles`, `tiles_stand_in`,
`decoded_experts`, `offload`, `zero_copy`, `beside` and `host_memory`, as long as their `grouping` is the same."""

PASSES: Final = (
    Pass("build", "forward", "the model records its ops", build_model),
    Pass("loss", "forward", "the run's loss follows", append_loss),
    Pass("adapter", "forward", "adapters rewrite the model", apply_adapters),
    Pass("reference", "forward", "the model without adapters runs before", run_reference, if_=_compares),
    Pass("fuse_adds", "forward", "products add", fuse_additions),
    Pass("metrics", "", "states of what is reported", declare_metrics),
    Pass("differentiate", "micro", "appends the backward rule of every op", append_backward),
    Pass("evaluation", "evaluate", "the forward program without ops for training alone", make_evaluation),
    Pass("outputs", "micro, evaluate", "what is reported becomes a state", write_states),
    Pass("dead_code", "micro, evaluate", "drops ops that no op reads", drop_dead_code),
    Pass("fuse_adds", "micro", "products add", fuse_additions),
    Pass("chunks", "micro", "the attention backward pass in chunks", run_in_chunks, if_=_chunks),
    Pass("params", "", "kinds, parts and masters of params", describe_params),
    Pass("derive", "derive", "what is made of params at every start", begin_derive),
    Pass("optimizer", "update", "the global norm, then the optimizer", record_update),
    Pass("start", "start", "masters from params", record_start),
    Pass("store", "derive", "writes frozen weights in a weight format", store_weights, if_=_stores),
    Pass("lower", "all", "the recipe chooses dtypes; may add `calibrate` and `report`, micro-steps", lower_programs),
    Pass("dead_code", "all", "drops ops that no op reads", drop_dead_code),
    Pass("quantize parts", "update", "ranks quantize the parts of weights that they have updated", quantize_parts),
    Pass("check lowered", "", "refuses programs that read a state which nothing has set", check_lowered),
    Pass("read stored", "all", "reads frozen weights from the weight format", read_stored, if_=_stores),
    Pass("fuse", "micro-steps", "adapters fuse ops", fuse_by_adapters),
    Pass("adapter start", ADAPTER_START, "adapters compute their params from the loaded weights", start_adapters),
    Pass("read stored", ADAPTER_START, "from the weight format too", read_stored_at_start, if_=_starts_from_stored),
    FORK,
    Pass("recompute", "micro-steps", "computes values again instead of keeping them", recompute_values),
    Pass("dead_code", "micro-steps", "drops ops that no op reads", drop_dead_code),
    Pass("offload", "all", "strategies move values, one strategy after another", apply_offloads),
    Pass("tile", "micro-steps, evaluate", "ops on rows run some rows at a time", tile_rows),
    Pass("sums", "micro-steps", "small sums over many rows in blocks", sum_rows_in_blocks),
    Pass("accumulate", "micro-steps", "the first writes gradients, the next add to them", accumulate_gradients),
    Pass("scatter", "micro-steps", "ranks divide gradients", scatter_gradients, if_=_divides_gradients),
    Pass("reduce", "micro-steps", "the last sums gradients over ranks; those that no step runs go", reduce_gradients),
    Pass("pending", "all", "states of a step that may be skipped change in a copy", keep_pending_states),
    Pass("gather late", "all", "the first micro-step gathers what the update left in parts", gather_late),
    Pass("staged", "derive", "a program for the params of a block that nothing else reads", stage_params),
    Pass("divide", "all", "ranks divide weights", divide_weights, if_=_divides_weights),
    Pass("stream", "all", "copies what the host holds", stream_values),
    Pass("encode some", "derive", "experts' weights in parts", encode_some_experts, if_=stages),
    Pass("decode some", "micro-steps, evaluate", "experts' weights in parts", decode_some_experts, if_=_decodes_some),
    Pass("in_place", "all", "outputs take the place of inputs", overwrite_inputs),
    Pass("documents", "micro-steps, evaluate", "variants for batches of few documents", vary_documents),
)


def assemble(inputs: PlanInputs, recorded: Draft | None = None) -> Assembly:
    """Record, transform, verify and plan every program of a run; or only finish what is recorded.

    Raises ConfigError for sizes that do not fit together, and ProgramError if a plugin emits a program that breaks the
    rules. Needs neither torch nor a device. Takes about a second for the largest dense models.
    """
    assembly = sketch(inputs, recorded or record(inputs))
    assembly.passed.verify()
    return assembly


def trace(inputs: PlanInputs) -> Assembly:
    """Return what `assemble` returns, with the programs of every pass (`PassRun.programs`)."""
    return assemble(inputs, record(inputs, keeps=True))


def record(inputs: PlanInputs, *, keeps: bool = False) -> Draft:
    """Run the passes up to `FORK`, without the last checks. Raises like `assemble`.

    Any number of plans are finished from the result, also for other `inputs` that differ as `FORK` says.
    """
    verifier = Verifier(inputs.ops, keeps=keeps)
    with verifier.finding_causes():
        return _passed(Draft.of(inputs, verifier), PASSES[: PASSES.index(FORK)])


def sketch(inputs: PlanInputs, recorded: Draft) -> Assembly:
    """Return the assembly of a run that `recorded` is of, without the last checks. Raises like `assemble`."""
    draft = recorded.forked(inputs)
    with draft.verifier.finding_causes():
        return _finished(_passed(draft, PASSES[PASSES.index(FORK) :]), recorded)


def offloaded(inputs: PlanInputs, recorded: Draft) -> Draft:
    """Return what the offload strategies of a run alone make of `recorded`."""
    return _passed(recorded.forked(inputs), [one for one in PASSES if one.name == "offload"])


def _passed(draft: Draft, passes: Iterable[Pass]) -> Draft:
    for one in passes:
        draft = one(draft)
    return draft


def _finished(draft: Draft, recorded: Draft) -> Assembly:
    """Choose what runs each op, and plan the memory of all programs."""
    inputs, b, places, programs = draft.inputs, draft.builder, draft.places, draft.programs
    assert draft.grad_norm is not None
    elsewhere = {param for staged in draft.staging for param in staged.places if param.shard is None}
    allocated = [v for v in b.declared if v not in elsewhere]
    every = (*programs.values(), *chain.from_iterable(draft.variants.values()))
    ops = dict.fromkeys(chain.from_iterable(p.ops for p in every))  # programs share most of them
    kernels = resolve(ops, inputs.kernel_for, inputs.target, inputs.ops)
    return Assembly(
        programs=programs,
        variants=draft.variants,
        cu_seqlens=draft.cu_seqlens,
        declared=b.declared,
        staging=tuple(replace(staged, program=programs[staged.program.name]) for staged in draft.staging),
        trainable=tuple(places.get(param, param) for param in draft.gradients),
        stored={
            param.name: tuple(places.get(state, state) for state in states) for param, states in draft.stored.items()
        },
        memory=plan_programs(programs.values(), allocated, kernels.workspace, draft.variants),
        kernels=kernels,
        micro=recorded.programs["micro"],
        batch=draft.batch,
        scalars=draft.scalars,
        reported=draft.reported,
        grad_norm=draft.grad_norm,
        weights=draft.weights,
        pending=draft.pending,
        passed=draft.verifier,
        world_size=inputs.world_size,
        numerics=draft.numerics,
        refusals=tuple(replace(found, count=places.get(found.count, found.count)) for found in draft.refusals),
        cached=draft.cached,
    )
