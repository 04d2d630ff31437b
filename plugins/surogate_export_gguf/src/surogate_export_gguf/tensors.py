"""The tensors of a GGUF file and what each is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gguf import TensorNameMap, get_tensor_name_map

from surogate_core.api import ConfigError, ExportContext

from . import delta
from .families import TOWERS, Family, experts_of, refused
from .rope import Floats, Rotation

if TYPE_CHECKING:
    from torch import Tensor

EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?")
SINKS = ".sinks"
RENAMED = {".dt_bias": ".dt_proj.bias", ".e_score_correction_bias": ".e_score_correction.bias"}
"""Ends of names, as the map of the package `gguf` has them."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
FURTHER = "mtp"
"""Part of a model that predicts further tokens."""
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A tensor of the file.

    name     in the file
    shape    in the order of torch
    sources  stored tensors, of several the first is expert 0
    heads    heads whose rows are paired; 0: rows stay where they are
    offset   what is added to the values
    values   instead of sources: the values
    taken    what of its source the tensor is; None: all of it
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    heads: int = 0
    offset: float = 0.0
    values: Floats | None = None
    taken: Callable[[Tensor], Tensor] | None = None


def targets_of(context: ExportContext, config: Any, family: Family, rope: Rotation) -> list[Target]:
    """Return the tensors of the file in the order of the layers. Raises ConfigError for one that llama.cpp has not."""
    text = config.get_text_config()
    names = get_tensor_name_map(family.arch, text.num_hidden_layers)
    stored = stored_names(context, text)
    shapes = {name: tuple(context.tensors[of].shape) for name, of in stored.items()}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if family.head == "tied" and (HEAD in stored or not tied):
        reason = (
            f"llama.cpp has no head of its own in its {family.arch.name.lower()}, and the model may not hold {HEAD}"
        )
        raise refused("tie_word_embeddings", reason, tied)
    if HEAD not in stored and not tied:
        raise ConfigError(
            f"the model has no tensor {HEAD}, and tie_word_embeddings is false. Set it to true if they are tied."
        )
    if (
        HEAD not in stored and family.head == "own"
    ):  # a stored head counts, as in transformers, whatever the config says
        stored[HEAD], shapes[HEAD] = stored[EMBEDDING], shapes[EMBEDDING]
    targets = list[Target]()
    for name, parts in joined(stored).items():
        sources = [stored[part] for part in parts]
        if stack := STACK.fullmatch(name):
            targets += of_stack(stack, sources[0], shapes[parts[0]], names, text)
        elif delta.parts_of(name, shapes[parts[0]], text):
            targets += of_parts(name, sources[0], shapes[parts[0]], names, text)
        else:
            targets.append(target(name, sources, shapes[parts[0]], names, text, family))
    check_complete(targets, text)
    made = [Target(name=name, shape=x.shape, values=x) for name, x in rope.divisors.items()]
    return [*targets, *made]


def stored_names(context: ExportContext, text: Any) -> dict[str, str]:
    """Return {name in the class of the text: stored name} in the order of the layers, and tell what is left out."""
    architecture = (context.config.get("architectures") or [""])[0]
    found, left, further = {}, set(), set()
    for name in context.tensors:
        part, layer = name.removeprefix("model.").split(".")[0], LAYER.match(text_name(name))
        if part in TOWERS.get(architecture, ()):
            left.add(part)
        elif part == FURTHER:
            further.add(part)
        elif layer and int(layer[1]) >= text.num_hidden_layers:
            further.add(layer[0].removesuffix("."))
        else:
            found[text_name(name)] = name
    if further:
        context.notice(f"{' and '.join(sorted(further))} is left out: it predicts further tokens, for speculation")
    if left:
        line = f"the file holds the text of {architecture}, without {' and '.join(sorted(left))}:"
        context.notice(f"{line} for images, give llama.cpp the mmproj file of the base (--mmproj)")
    embedding = context.tensors[found[EMBEDDING]].shape if EMBEDDING in found else (0,)
    if embedding[0] != text.vocab_size:
        raise ConfigError(
            f"vocab_size: the embedding has {embedding[0]} rows (got {text.vocab_size}). Is config.json the model's?"
        )
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


def text_name(name: str) -> str:
    """Return the name in the class of the text for one in a class around it."""
    inner = name.removeprefix("model.")
    for place in ("language_model.", "text_model.", "model."):
        inner = inner.removeprefix(place)
    return inner if inner.startswith("lm_head.") else f"model.{inner}"


def order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return what sorts names: the embedding, the layers by number, the rest."""
    rank = 0 if name == EMBEDDING else 1 if name.startswith("model.layers.") else 2
    return rank, [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def joined(names: Iterable[str]) -> dict[str, list[str]]:
    """Return {name: names that it is stacked from}: those of experts are one, all others themselves."""
    found: dict[str, list[str]] = {}
    for name in names:
        expert = EXPERT.fullmatch(name)
        found.setdefault(expert[1] + expert[3] if expert else name, []).append(name)
    return found


def of_parts(name: str, source: str, shape: tuple[int, ...], names: TensorNameMap, text: Any) -> Iterator[Target]:
    """Yield the tensors that llama.cpp has of a matrix that holds them together."""
    for part, (rows, taken) in delta.parts_of(name, shape, text).items():
        known = names.get_name(name.replace(delta.TOGETHER, part), try_suffixes=(".weight",))
        assert known is not None
        yield Target(name=known, shape=(rows, shape[1]), sources=(source,), taken=taken)


def of_stack(
    found: re.Match[str], source: str, shape: tuple[int, ...], names: TensorNameMap, text: Any
) -> list[Target]:
    """Return the tensors that are made of a stack of experts, [experts, rows, columns], or of their biases.

    Gate stands before up. In gpt-oss rows of gate and up alternate, and columns stand before rows. Raises ConfigError
    if it is of another number of experts than the config says.
    """
    experts, which, bias = found[1], found[2], bool(found[3])
    if shape[0] != experts_of(text):
        raise ConfigError(
            f"{source}: there are {shape[0]} experts, config.json says {experts_of(text)}. Is it the model's?"
        )
    alternate = text.model_type == "gpt_oss"
    across = alternate and not bias
    rows = shape[2] if across else shape[1]
    cuts = {which: slice(None)}
    if which == "gate_up":
        half = rows // 2
        cuts = {"gate": slice(0, half), "up": slice(half, None)}
        if alternate:
            cuts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    targets = []
    for part, cut in cuts.items():
        named, count = names.get_name(f"{experts}.{part}_proj"), len(range(*cut.indices(rows)))
        kind, rest = ("bias", ()) if bias else ("weight", (shape[1] if across else shape[2],))
        taken = partial(rows_of, cut=cut, across=across)
        targets.append(Target(name=f"{named}.{kind}", shape=(shape[0], count, *rest), sources=(source,), taken=taken))
    return targets


def rows_of(stack: Tensor, cut: slice, across: bool) -> Tensor:
    """Return rows of each matrix of a stack, or numbers of each bias. across: it holds columns before rows."""
    return (stack.transpose(1, 2) if across else stack)[:, cut]


def target(
    name: str, sources: list[str], shape: tuple[int, ...], names: TensorNameMap, text: Any, family: Family
) -> Target:
    """Return the tensor of the file for a name of transformers."""
    end = next((end for end in RENAMED if name.endswith(end)), "")
    known = name.removesuffix(end) + RENAMED.get(end, "")
    found = names.get_name(known, try_suffixes=(".weight", ".bias"))
    if found is not None and name.endswith(SINKS):
        found = f"{found}.weight"
    part = name.removesuffix(".weight").removesuffix(".bias")
    biased = name.endswith(".bias") and not part.endswith(family.biases or ("none",))
    if found is None or biased:
        arch = family.arch.name.lower()
        raise ConfigError(
            f"{sources[0]}: llama.cpp has no such tensor in its {arch}. Export this model with --format hf."
        )
    several = ".experts." in name
    if several and len(sources) != experts_of(text):
        raise ConfigError(
            f"{name}: there are {len(sources)} experts, config.json says {experts_of(text)}. Is it the model's?"
        )
    heads = {"q_proj": text.num_attention_heads, "k_proj": text.num_key_value_heads or text.num_attention_heads}
    plain = part.endswith("norm") and delta.LAYER not in part
    if len(shape) == 3:  # a convolution of each channel by itself
        shape = shape[0], shape[2]
    return Target(
        name=found,
        shape=(len(sources), *shape) if several else shape,
        sources=tuple(sources),
        heads=heads.get(part.rsplit(".", 1)[-1], 0) if family.paired else 0,
        offset=family.norm_offset if plain else 0.0,
        taken=delta.taken(name, text),
    )


def check_complete(targets: Iterable[Target], text: Any) -> None:
    """Raise ConfigError if a layer lacks what others of its kind have: llama.cpp would not load the file."""
    layers: list[set[str]] = [set() for _ in range(text.num_hidden_layers)]
    for found in targets:
        if found.name.startswith("blk."):
            _, layer, part = found.name.split(".", 2)
            layers[int(layer)].add(part)
    every: dict[tuple[str, bool], set[str]] = {}
    for number, parts in enumerate(layers):
        every.setdefault(layer_kind(text, number), set()).update(parts)
    for number, parts in enumerate(layers):
        if lacks := every[layer_kind(text, number)] - parts:
            raise ConfigError(
                f"layer {number} of the model has no tensor for {', '.join(sorted(lacks))}. Are all of its files there?"
            )


def layer_kind(text: Any, number: int) -> tuple[str, bool]:
    """Return what layers that have the same tensors have in common: their attention, and whether they are dense."""
    linear = (getattr(text, "layer_types", None) or {number: ""})[number] == "linear_attention"
    return "linear" if linear else "", number < (getattr(text, "first_k_dense_replace", 0) or 0)
