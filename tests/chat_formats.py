"""Chat templates, our own and published ones, and small tokenizers with their special tokens.

The templates in this file are written anew after four public formats: headers, ends of turn, think blocks, tool calls
and responses are those of the models' own; the fixed sentences around tools are shortened.
"""

# ruff: noqa: RUF001  (the tokens of DeepSeek models are written with other characters)
from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from surogate.data.tokenizer import Tokenizer

_CHATML_TOOLS = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
"""

_CHATML_CALLS = """
{%- for call in message.tool_calls %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\n</tool_call>' }}
{%- if not loop.last %}{{- '\n' }}{%- endif %}
{%- endfor %}
"""

_CHATML_RESPONSES = """
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
"""

QWEN25 = (
    _CHATML_TOOLS
    + "{%- else %}{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n' }}{%- endif %}"
    + """
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
       or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{{- '\n' }}"""
    + _CHATML_CALLS
    + "{{- '<|im_end|>\n' }}"
    + _CHATML_RESPONSES
    + """{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

QWEN3 = (
    _CHATML_TOOLS
    + "{%- endif %}"
    + """
{%- set last = namespace(query=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- if not last.found and message.role == 'user' and not (message.content.startswith('<tool_response>')
       and message.content.endswith('</tool_response>')) %}
{%- set last.found = true %}{%- set last.query = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}
{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.query and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}
{{- content }}
{%- endif %}
{%- if message.tool_calls and content %}{{- '\n' }}{%- endif %}"""
    + _CHATML_CALLS
    + "{{- '<|im_end|>\n' }}"
    + _CHATML_RESPONSES
    + """{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)

LLAMA3 = """
{%- set header = '<|start_header_id|>' %}
{%- set after = '<|end_header_id|>\n\n' %}
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- header + 'system' + after }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Today Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
{{- header + 'user' + after + 'Answer with a call of one of these functions.\n\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
{{- messages[0].content | trim + '<|eot_id|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.role in ('tool', 'ipython') %}
{{- header + 'ipython' + after + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- header + 'assistant' + after + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{{- '<|eot_id|>' }}
{%- else %}
{{- header + message.role + after + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- header + 'assistant' + after }}{%- endif %}"""

# Written as the training templates that mark what is generated.
GENERATION = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{% generation %}{{- message.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEXT = Path(__file__).parents[1] / "examples/data/tinyshakespeare.txt"


def chat_tokenizer(directory: Path, template: str | None, special: tuple[str, ...] = CHATML_TOKENS) -> Tokenizer:
    """Byte-level BPE of 500 tokens of Shakespeare, `special` and, as Qwen3 has them, tags that are not special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT.read_text()[:50_000]], trainer)
    backend.add_special_tokens(list(special))
    if special is CHATML_TOKENS:
        backend.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    ends = {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"}
    settings = ends if special is LLAMA_TOKENS else {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return Tokenizer(directory)


# --------------------------------------------------------------------------------------------------- published models

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set content = messages[0]['content'] -%}
    {%- set first_user_prefix = (content if content is string else content[0]['text']) + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""

TEMPLATES = Path(__file__).parent / "data/templates"


@dataclass(frozen=True)
class Published:
    """A published template, the kinds of tokenizer of the models that use it, and their added tokens.

    kinds: "bytes" (byte-level), "prepend" (as Llama 2's tokenizer.json was converted at first), "metaspace" (as it is
    converted today), "gemma". plain: added tokens that are not special. rstrip: added tokens swallow white space after
    them.
    """

    kinds: tuple[str, ...]
    bos: str | None
    eos: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    rstrip: bool = False


_SP = ("prepend", "metaspace")
_TEKKEN = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]"),
)
_PHI = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_DEEPSEEK_TOOLS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"),
)
_CHATML = Published(("bytes",), None, "<|im_end|>", ("<|endoftext|>", "<|im_start|>"), TAGS)

PUBLISHED = {
    "llama-2": Published(("bytes", *_SP), "<s>", "</s>"),
    "zephyr": Published(("bytes", *_SP), "<s>", "</s>"),
    "vicuna": Published(("bytes", *_SP), "<s>", "</s>"),
    "mistral-v0.2": Published(("bytes", *_SP), "<s>", "</s>"),
    "mistral-v1": Published(("bytes", *_SP), "<s>", "</s>"),
    "mistral-v3": Published(("bytes", *_SP), "<s>", "</s>", _TEKKEN),
    "mistral-v3-tekken": Published(("bytes",), "<s>", "</s>", _TEKKEN),
    "mistral-v7": Published(("bytes", *_SP), "<s>", "</s>", _TEKKEN),
    "mistral-small-3.2": Published(("bytes",), "<s>", "</s>", _TEKKEN),
    "phi-3": Published(("bytes", *_SP), "<s>", "<|endoftext|>", _PHI, rstrip=True),
    "phi-3.5": Published(("bytes", *_SP), "<s>", "<|endoftext|>", _PHI, rstrip=True),
    "gemma-2": Published(("bytes", "gemma"), "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "openhermes": Published(("bytes", *_SP), "<s>", "<|im_end|>", ("<|im_start|>",)),
    "deepseek-r1-distill": Published(
        ("bytes",), *_DEEPSEEK, plain=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *_DEEPSEEK_TOOLS)
    ),
    "deepseek-coder": Published(("bytes",), _DEEPSEEK[0], "<|EOT|>"),
    "qwen2.5": _CHATML,
    "qwen3": _CHATML,
    "qwq": _CHATML,
    "smollm3": _CHATML,
    "granite-3.3": Published(
        ("bytes",), None, "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
    ),
    "gpt-oss": Published(
        ("bytes",),
        "<|startoftext|>",
        "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>", "<|endoftext|>"),
    ),
    "phi-4": Published(("bytes",), None, "<|im_end|>", ("<|im_start|>", "<|im_sep|>", "<|endoftext|>")),
    "llama-3": Published(("bytes",), LLAMA_TOKENS[0], "<|eot_id|>", LLAMA_TOKENS[1:4]),
    "llama-3.1": Published(("bytes",), LLAMA_TOKENS[0], "<|eot_id|>", LLAMA_TOKENS[1:4]),
}


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def published_tokenizer(
    directory: Path, name: str | Published, kind: str = "bytes", template: str | None = None
) -> Tokenizer:
    """Make a small tokenizer of this kind with the tokens that the template needs, and with its template."""
    of = name if isinstance(name, Published) else PUBLISHED[name]
    backend = tokenizers.Tokenizer.from_str(_base(kind))
    if of.bos:
        backend.add_special_tokens([tokenizers.AddedToken(of.bos, normalized=False)])
    backend.add_special_tokens([tokenizers.AddedToken(of.eos, normalized=False)])
    for texts, special in ((of.special, True), (of.plain, False)):
        backend.add_tokens(
            [tokenizers.AddedToken(text, special=special, normalized=False, rstrip=of.rstrip) for text in texts]
        )
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": of.eos} | ({"bos_token": of.bos} if of.bos else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template or template_text(str(name)), encoding="utf-8")
    return Tokenizer(directory)


@cache
def _base(kind: str) -> str:
    """Make a tokenizer.json of a kind: a few hundred tokens of Shakespeare, and a token for every byte."""
    text = TEXT.read_text()[:50_000]
    backend = tokenizers.Tokenizer(models.BPE())
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator([text], trainer)
        return str(backend.to_str())
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", *bytes_of], show_progress=False)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(text.split("\n"), trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = []
    model = spec["model"] | {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    _add_merges(model, ["▁", "\n"] if kind == "gemma" else ["▁"])
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spec |= {"model": model, "normalizer": None, "pre_tokenizer": None}
    if kind == "prepend":
        spec["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
    elif kind == "metaspace":
        spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    else:
        spec["normalizer"] = spaces
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = [] if kind == "gemma" else [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    spec["decoder"] = {"type": "Sequence", "decoders": back + strip}
    return json.dumps(spec)


def _add_merges(model: dict[str, Any], chars: list[str]) -> None:
    """Tokens of two and four equal characters; published vocabularies have them for spaces and line breaks."""
    for char in chars:
        for part in (char, char * 2):
            for text in (part, part * 2):
                model["vocab"].setdefault(text, max(model["vocab"].values()) + 1)
            model["merges"].append([part, part])
