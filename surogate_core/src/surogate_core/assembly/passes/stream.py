"""Values that the host holds are copied to the device ahead of their use, and back."""

from __future__ import annotations

from dataclasses import replace

from ...errors import ConfigError
from ...front_end import called
from ..draft import Draft
from ..streaming import Streaming
from ..transfers import HostCopies


def stream_values(draft: Draft) -> Draft:
    """Place values on the host, and let programs use copies of them (`Streaming`)."""
    b, inputs = draft.builder, draft.inputs
    moved = [draft.parts.get(value, value) for value in draft.on_host]
    host = {value: b.on_host(value) for value in moved}
    programs = draft.programs.values()
    used = dict.fromkeys(v for p in programs for op in p.ops for v in op.ins if v.inside) if moved else ()
    host |= {v: replace(v, place="host", inside=host[v.inside]) for v in used if v.inside in host}
    draft.verifier.replace_values(host.values())
    streaming = Streaming(HostCopies(host), b, zero_copy=inputs.zero_copy)
    after = draft.having(*[draft.verified(p, streaming(p)) for p in programs]) if moved else draft
    if inputs.zero_copy is True and not streaming.uncopied:
        raise ConfigError(
            f"{called('zero_copy')}: true: optimizer {inputs.optimizer.name} uses nothing that the host holds. "
            f"Set {called('offload')}, or leave it out."
        )
    return replace(after, places={whole: host.get(part, part) for whole, part in draft.parts.items()} | host)
