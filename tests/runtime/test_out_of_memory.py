"""The error of a GPU that runs out of memory shows plan and reality by segment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.harness import plan_inputs, tiny_config

from surogate_core.assembly.assemble import assemble
from surogate_core.errors import RunStopped
from surogate_core.machine.devices import GIB
from surogate_core.memory.lifetimes import Lifetime
from surogate_core.memory.plan import ArenaPlan, MemoryPlan, Segment
from surogate_core.program.value import Value
from surogate_core.runtime.comms.single import SingleComm
from surogate_core.runtime.out_of_memory import explaining_out_of_memory, out_of_memory_text


def planned() -> MemoryPlan:
    """Return a plan of 4 GiB of weights, 2 of gradients, 8 of states and 10 of activations."""
    memory = assemble(plan_inputs(tiny_config(num_hidden_layers=1))).memory
    life = Lifetime(Value("x", (10 * GIB,), "uint8", "act", "x"), 10 * GIB, 0, 0)
    arenas = {"micro_first": ArenaPlan((life,), life.nbytes, 0)}
    sizes = {"param": 4, "grad": 2, "state": 8, "input": 0}
    return replace(memory, arenas=arenas, segments={role: Segment({}, n * GIB) for role, n in sizes.items()})


def test_it_names_what_is_planned_what_is_held_and_who_else_holds_memory() -> None:
    text = out_of_memory_text(planned(), allocated=6 * GIB, free=2 * GIB, total=40 * GIB, runtime_bytes=GIB)
    assert text == (
        "Planned: weights 4.00 GiB, gradients 2.00 GiB, states 8.00 GiB (not allocated), inputs 0.00 GiB (not "
        "allocated), activations 10.00 GiB (not allocated), CUDA and libraries 1.00 GiB; in all 25.00 GiB of 40.00 "
        "GiB. Held: 6.00 GiB by buffers of this run, 32.00 GiB by CUDA, libraries and other processes; 2.00 GiB are "
        "free. Other processes hold about 31.00 GiB: end them (nvidia-smi lists them), or set device_memory_limit."
    )


def test_without_other_processes_the_plan_is_wrong_and_it_says_so() -> None:
    text = out_of_memory_text(planned(), allocated=24 * GIB, free=0, total=26 * GIB, runtime_bytes=GIB)
    assert "(not allocated)" not in text
    assert text.endswith(
        "That is more than the plan expects of CUDA and its libraries. Please report it with this text, and set "
        "device_memory_limit: 24.00GiB."
    )


def test_an_error_of_the_allocator_becomes_one_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    comm = SingleComm(device=1, allocated=5 * GIB)
    planned_and_held = r"^GPU 1 \(a GPU\) is out of memory\. Planned: .* gradients 2\.00 GiB \(not.* Held: 5\.00 GiB"
    with pytest.raises(RunStopped, match=planned_and_held), explaining_out_of_memory(planned(), comm, GIB):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
    with pytest.raises(RuntimeError, match="another error"), explaining_out_of_memory(planned(), comm, GIB):
        raise RuntimeError("another error")
