"""The dataset type `instruction`: an instruction, an optional input, and the output to train."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from surogate_core.api import DatasetFormatDef, Encoded
from surogate_core.errors import ConfigError

from ..readers import kind_of_value
from .conversation import LOSS_SCALE, TEMPLATE_KWARGS
from .mask import LossScale, encode_chat
from .media import refuse_media_columns
from .token_spans import encode_spans

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

_PLACEHOLDER = re.compile(r"\{(instruction|input|system|output)\}")
_QUERIES = ("instruction", "query", "question", "problem", "prompt", "input")
_RESPONSES = ("output", "response", "answer", "targets", "target", "answer_key", "answers", "solution", "completion")


class InstructionOptions(BaseModel):
    """Keys of a `datasets:` entry of type `instruction`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction_field: str = Field("instruction", description="Column with the instruction.")
    output_field: str = Field("output", description="Column with the output, which is trained.")
    input_field: str | None = Field(None, description="Column with the input; a row may leave it empty.")
    system_prompt_type: Literal["field", "fixed"] | None = Field(
        None, description="Source of the system prompt: a column, or `system_prompt`; null: the one that is set."
    )
    system_prompt_field: str | None = Field(None, description="Column with the system prompt.")
    system_prompt: str | None = Field(None, description="System prompt of every row.")
    prompt_format: str = Field(
        "{instruction}\n{input}",
        description="The prompt. `{instruction}`, `{input}`, `{system}` are replaced; it may end with `{output}`.",
    )
    prompt_format_no_input: str = Field("{instruction}", description="Prompt of rows without an input.")
    use_chat_template: bool = Field(
        True, description="Render prompt and output as chat messages; false: prompt, output and eos as plain text."
    )
    loss_scale: LossScale = Field("default", description=LOSS_SCALE)
    chat_template_kwargs: dict[str, Any] = Field({}, description=TEMPLATE_KWARGS)

    @model_validator(mode="after")
    def _check(self) -> InstructionOptions:
        given = {"field": self.system_prompt_field, "fixed": self.system_prompt}
        if self.system_prompt_type is not None and given[self.system_prompt_type] is None:
            key = "system_prompt_field" if self.system_prompt_type == "field" else "system_prompt"
            raise ValueError(f"system_prompt_type: {self.system_prompt_type} needs {key}")
        if self.system_prompt_type is None and None not in given.values():
            raise ValueError("system_prompt_field and system_prompt are both given; set system_prompt_type")
        if self.chat_template_kwargs and not self.use_chat_template:
            raise ValueError("chat_template_kwargs has no effect with use_chat_template: false; remove one of them")
        for text in (self.prompt_format, self.prompt_format_no_input):
            if text.partition("{output}")[2].strip():
                raise ValueError("prompt_format has text after {output}; remove it")
            if not _PLACEHOLDER.search(text):
                raise ValueError("prompt_format has no placeholder such as {instruction}")
        return self


def encode_instruction(row: Mapping[str, object], tokenizer: Tokenizer, options: InstructionOptions) -> Encoded:
    """Tokenize prompt and output, as chat messages or as plain text; the output is trained."""
    for column in (options.instruction_field, options.output_field):
        if row[column] is None:
            raise ConfigError(f"column {column!r} holds null. Remove such rows, or name another column.")
    values = {
        "instruction": _text(row, options.instruction_field),
        "input": _text(row, options.input_field) if options.input_field else "",
        "system": _system(row, options),
    }
    output = _text(row, options.output_field)
    refuse_media_columns(row, (*values.values(), output))
    if not output:
        raise ConfigError(f"column {options.output_field!r} is empty, so nothing is trained. Remove such rows.")
    written = options.prompt_format if values["input"] else options.prompt_format_no_input
    prompt_part, marks_output, _ = written.partition("{output}")
    prompt = _PLACEHOLDER.sub(lambda found: values[found[1]], prompt_part)
    system = "" if "{system}" in written else values["system"]
    if options.use_chat_template:
        messages = [{"role": "system", "content": system}] * bool(system)
        messages.append({"role": "user", "content": prompt.rstrip() if marks_output else prompt})
        messages.append({"role": "assistant", "content": output})
        return encode_chat(messages, None, tokenizer, options.loss_scale, template_kwargs=options.chat_template_kwargs)
    return _plain(f"{system}\n" * bool(system) + prompt + "\n" * (not marks_output), output, tokenizer, options)


def _plain(prompt: str, output: str, tokenizer: Tokenizer, options: InstructionOptions) -> Encoded:
    """Return the tokens of [bos] + prompt + output + eos."""
    if tokenizer.eos_id is None:
        raise ConfigError(
            "the tokenizer defines no eos token, so the model would not learn to end its output. Set eos_token "
            "in tokenizer_config.json."
        )
    text = prompt + output
    whole = options.loss_scale == "all"
    encoded = encode_spans(text, None if whole else [(len(prompt), len(text))], tokenizer)
    bos = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    return Encoded([*bos, *encoded.tokens, tokenizer.eos_id], [*[whole] * len(bos), *encoded.trained, True])


def _text(row: Mapping[str, object], column: str) -> str:
    value = row[column]
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ConfigError(f"column {column!r} holds {kind_of_value(value)}, not text. Name a column of strings.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"column {column!r} contains half a surrogate pair, which is not valid text. Correct it."
        ) from error
    return value


def _system(row: Mapping[str, object], options: InstructionOptions) -> str:
    if options.system_prompt_field is not None and options.system_prompt_type != "fixed":
        return _text(row, options.system_prompt_field)
    return options.system_prompt or ""


def _pair(columns: Sequence[str]) -> tuple[str, str] | None:
    """Return the first known names of a query and of a response column; None unless both exist."""
    query = next((name for name in _QUERIES if name in columns), None)
    response = next((name for name in _RESPONSES if name in columns), None)
    return (query, response) if query and response else None


def _guess(columns: Sequence[str]) -> Mapping[str, Any]:
    pair = _pair(columns)
    if pair is None:
        return {}
    found = {"instruction_field": pair[0], "output_field": pair[1]}
    return found | ({"input_field": "input"} if "input" in columns and pair[0] != "input" else {})


def _fields(options: InstructionOptions) -> Sequence[str]:
    return [options.instruction_field, options.output_field, *_optional(options)]


def _optional(options: InstructionOptions) -> Sequence[str]:
    system = options.system_prompt_field if options.system_prompt_type != "fixed" else None
    return [name for name in (options.input_field, system) if name is not None]


INSTRUCTION = DatasetFormatDef(
    name="instruction",
    summary="instruction, input and output; the output is trained",
    options=InstructionOptions,
    matches=lambda columns: _pair(columns) is not None,
    fields=_fields,
    optional=_optional,
    encode=encode_instruction,  # type: ignore[arg-type]  # of core's tokenizer it needs the chat template
    guess=_guess,
    truncation="delete",
    version=2,
    mended={2: "rows with images were trained as text"},
)
