"""The file of a model, plainly: names by hand, rows moved one by one, blocks of 32 numbers by the formulas of ggml."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert{s}.{x}_proj": f"ffn_{x}_shexp" for s in ("", "s") for x in ("gate", "up", "down")},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""In families with a norm after attention and MLP."""
LINEAR = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
KEYS, VALUES, WIDTH = 2, 4, 64
"""Heads of the linear layers, and their width."""
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


def file_of(
    tensors: Mapping[str, Tensor],
    *,
    heads: Mapping[str, int],
    offset: float,
    after: bool,
    tied: bool,
    own_head: bool,
    tiled: bool,
) -> dict[str, Tensor]:
    """Return the tensors of the file in fp32.

    heads: of queries and keys, if their rows are paired. tiled: heads of values have the order of `linear`.
    """
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, x in tensors.items():
        x = x.float()
        short = name.replace("language_model.", "").removeprefix("model.").removeprefix("text_model.")
        if short.startswith(("vision_", "multi_modal_projector", "visual", "connector")) or (
            short == "lm_head.weight" and tied
        ):
            continue
        part, kind = short.rsplit(".", 1)
        if not short.startswith("layers."):
            found[f"{OUTSIDE[part]}.{kind}"] = x + offset if part == "norm" else x
            continue
        _, layer, part = part.split(".", 2)
        if part == "self_attn" and kind == "sinks":
            found[f"blk.{layer}.attn_sinks.weight"] = x
            continue
        if part.startswith("linear_attn"):
            whole = f"{part}.{kind}".removeprefix("linear_attn.")
            if whole == "in_proj_qkvz.weight":
                found |= {f"blk.{layer}.attn_{name}.weight": rows for name, rows in apart(x).items()}
                continue
            found[f"blk.{layer}.{LINEAR[whole]}"] = linear(whole, x) if tiled else unmoved(whole, x)
            continue
        if kind == "e_score_correction_bias":
            found[f"blk.{layer}.exp_probs_b.bias"] = x
            continue
        if part == "mlp.experts":
            which, bias = kind.removesuffix("_bias"), kind.endswith("_bias")
            of = {"gate": (0, 2), "up": (1, 2)} if which == "gate_up_proj" else {"down": (0, 1)}
            for ours, (first, step) in of.items():
                rows = range(first, x.shape[-1], step)
                each = torch.stack([torch.stack([one[..., row] for row in rows]) for one in x])
                found[f"blk.{layer}.ffn_{ours}_exps.{'bias' if bias else 'weight'}"] = each
            continue
        if expert := EXPERT.fullmatch(part):
            experts.setdefault(f"blk.{layer}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = x
            continue
        ours = AFTER.get(part, PARTS.get(part, "")) if after else PARTS[part]
        if part[-6:] in heads:
            x = moved(x, heads[part[-6:]])
        found[f"blk.{layer}.{ours}.{kind}"] = x + offset if part.endswith("norm") else x
    found |= {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    return found | ({"output.weight": found["token_embd.weight"]} if own_head and tied else {})


def linear(name: str, x: Tensor) -> Tensor:
    """Put heads of values in the order of llama.cpp: head i of the file reads head i % KEYS of the keys."""
    order = [i % KEYS * (VALUES // KEYS) + i // KEYS for i in range(VALUES)]
    of_heads = [head * WIDTH + row for head in order for row in range(WIDTH)]
    of_all = [*range(2 * KEYS * WIDTH), *(2 * KEYS * WIDTH + row for row in of_heads)]
    match name:
        case "in_proj_qkv.weight":
            return torch.stack([x[row] for row in of_all])
        case "conv1d.weight":
            return torch.stack([x[row][0] for row in of_all])
        case "in_proj_z.weight":
            return torch.stack([x[row] for row in of_heads])
        case "out_proj.weight":
            return torch.stack([x[:, column] for column in of_heads], dim=1)
        case "norm.weight":
            return x
    return torch.stack([-x[head].exp() if name == "A_log" else x[head] for head in order])


def unmoved(name: str, x: Tensor) -> Tensor:
    return -x.exp() if name == "A_log" else torch.stack([row[0] for row in x]) if name == "conv1d.weight" else x


def apart(x: Tensor) -> dict[str, Tensor]:
    """Take the rows of each head of keys apart: a query, a key, two values, two gates."""
    rows: dict[str, list[Tensor]] = {"q": [], "k": [], "v": [], "z": []}
    for i, row in enumerate(x):
        rows["qkvvzz"[i // WIDTH % 6]].append(row)
    return {"qkv": torch.stack([*rows["q"], *rows["k"], *rows["v"]]), "gate": torch.stack(rows["z"])}


def moved(x: Tensor, heads: int) -> Tensor:
    """Put row i of each head at 2 i, and row i + half at 2 i + 1."""
    width = len(x) // heads
    rows = [head * width + i // 2 + i % 2 * width // 2 for head in range(heads) for i in range(width)]
    return torch.stack([x[row] for row in rows])


def away_from_zero(x: Tensor) -> Tensor:
    """Round halves away from zero, as C does."""
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def inverse(d: Tensor) -> Tensor:
    """Return 1 / d, and 0 for 0."""
    return torch.where(d == 0, torch.zeros_like(d), 1 / torch.where(d == 0, torch.ones_like(d), d))


def served(x: Tensor, kind: str) -> Tensor:
    """Return the numbers that llama.cpp reads of a matrix in a type."""
    if kind in ("f32", "f16", "bf16"):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        return x.to(dtype).float()
    blocks = x.reshape(-1, 32)
    if kind == "mxfp4":
        d = 2.0 ** (blocks.abs().amax(1, keepdim=True).log2().floor() - 2)
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = ((blocks / d).abs()[..., None] - levels).abs().argmin(-1)
        return (levels[codes] * d * blocks.sign()).reshape(x.shape)
    bits = int(kind[1])
    if kind.endswith("_1"):  # from the smallest number in steps
        least, steps = blocks.amin(1, keepdim=True), 2**bits - 1
        d = (blocks.amax(1, keepdim=True) - least) / steps
        codes = torch.trunc((blocks - least) * inverse(d) + 0.5).clamp(0, steps)
        return (codes * d.half().float() + least.half().float()).reshape(x.shape)
    if bits == 8:
        d = blocks.abs().amax(1, keepdim=True) / 127
        return (away_from_zero(blocks * inverse(d)) * d.half().float()).reshape(x.shape)
    half = 2 ** (bits - 1)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    d = largest / -half
    codes = torch.trunc(blocks * inverse(d) + half + 0.5).clamp(0, 2 * half - 1) - half
    return (codes * d.half().float()).reshape(x.shape)
