"""Chat templates of three public formats, and a small tokenizer with their special tokens.

The templates are written anew after the public formats: headers, ends of turn, think blocks, tool calls and responses
are those of the models' own; the fixed sentences around tools are shortened.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from surogate_core.data.tokenizer import Tokenizer

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
