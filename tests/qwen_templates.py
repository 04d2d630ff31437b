"""Chat templates of Qwen3.5, 3.6 and 3.8, written anew after descriptions of the published ones.

Headers, ends of turn, think blocks, calls, responses and switches are those of the models' own; sentences around tools
and of the reasoning effort are shortened.

    Qwen3.5  the think block of answers after the last question alone, also an empty one. The prompt opens a block, or
             has an empty one with enable_thinking: false; of the small models, unless that is true
    Qwen3.6  the same; preserve_thinking: true writes the block of every answer
    Qwen3.8  the block of every answer unless preserve_thinking is false; reasoning in a key of its own alone;
             reasoning_effort as a sentence in the system prompt
"""

from __future__ import annotations

_EFFORT = """
{%- set effort = reasoning_effort | default('xhigh') %}
{%- if effort not in ('xhigh', 'medium', 'low') %}
{{- raise_exception('Unexpected reasoning effort ' ~ effort ~ '.') }}
{%- endif %}
{%- if effort != 'medium' and not (enable_thinking is defined and enable_thinking is false) %}
{%- set start.text = 'Reasoning effort is set to ' + effort + '.' %}
{%- endif %}"""

_START = """
{%- if tools %}
{%- set start.text = start.text + ('\n\n' if start.text else '') + '# Tools\n<tools>' %}
{%- for tool in tools %}{%- set start.text = start.text + '\n' + (tool | tojson) %}{%- endfor %}
{%- set start.text = start.text + '\n</tools>' %}
{%- endif %}
{%- if messages[0].role == 'system' %}
{%- set start.text = start.text + ('\n\n' if start.text else '') + (messages[0].content | trim) %}
{%- endif %}
{%- if start.text %}{{- '<|im_start|>system\n' + start.text + '<|im_end|>\n' }}{%- endif %}
{%- set last = namespace(query=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- if not last.found and message.role == 'user' and not (message.content.startswith('<tool_response>')
       and message.content.endswith('</tool_response>')) %}
{%- set last.found = true %}{%- set last.query = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- if not last.found %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
{%- set content = (message.content or '') | trim %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{%- elif message.role == 'user' %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}"""

_IN_CONTENT = """
{%- if message.reasoning_content is not string and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}"""

_ANSWER = """
{%- if KEPT or loop.index0 > last.query %}
{{- '<|im_start|>assistant\n<think>\n' + (thought | trim) + '\n</think>\n\n' + content }}
{%- else %}
{{- '<|im_start|>assistant\n' + content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- ('\n\n' if content else '') if loop.first else '\n' }}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}{{- '<think>\n\n</think>\n\n' if OFF else '<think>\n' }}
{%- endif %}"""

_NEW = "{%- set start = namespace(text='') %}"
_OFF, _ON = ("enable_thinking is defined and enable_thinking is " + value for value in ("false", "true"))
_KEPT_36 = "(preserve_thinking is defined and preserve_thinking is true)"
_KEPT_38 = "preserve_thinking is undefined or preserve_thinking is true"


def _template(effort: str, in_content: str, kept: str, off: str) -> str:
    return _NEW + effort + _START + in_content + _ANSWER.replace("KEPT", kept).replace("OFF", off)


QWEN3_5 = _template("", _IN_CONTENT, "false", _OFF)
QWEN3_5_SMALL = _template("", _IN_CONTENT, "false", f"not ({_ON})")
QWEN3_6 = _template("", _IN_CONTENT, _KEPT_36, _OFF)
QWEN3_8 = _template(_EFFORT, "", _KEPT_38, _OFF)
TEMPLATES = {"Qwen3.5": QWEN3_5, "Qwen3.5, small": QWEN3_5_SMALL, "Qwen3.6": QWEN3_6, "Qwen3.8": QWEN3_8}
