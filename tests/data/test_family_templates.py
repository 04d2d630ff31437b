"""Chat templates of each family of models: answers with their end of turn are trained, and nothing else.

The templates are written anew after published ones of which no copy is among the test data: headers, ends of turn,
order and white space are those of the models' own; sentences around tools and default system prompts are shortened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from chat_formats import GEMMA3, PUBLISHED, Published, published_tokenizer
from models import supported
from qwen_templates import TEMPLATES

from surogate.data.chat.conversation import ConversationOptions, encode_conversation
from surogate.data.chat.token_spans import runs
from surogate.data.tokenizer import Tokenizer
from surogate_core.api import Encoded
from surogate_core.errors import ConfigError

Messages = list[dict[str, Any]]

# Renders what that of OLMo 2 renders. The roles are no tokens of their own, and bos is eos.
OLMO2 = """{{ bos_token }}
{%- for message in messages -%}
    {{ '<|' + message['role'] + '|>\n' + message['content'] }}
    {%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif -%}
    {%- if message['role'] != 'assistant' or not loop.last %}{{ '\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '<|assistant|>\n' }}{% endif -%}
"""

# A conversation that ends with an answer ends with eos, earlier answers with <|im_end|>. The prompt is written in the
# loop, so there is none without a message. Think models add <think> to it.
OLMO3 = """
{%- if messages | selectattr('role', 'equalto', 'system') | list | length == 0 %}
{{- '<|im_start|>system\n<functions>' + ('' if tools is none else tools | tojson) + '</functions><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '<|im_start|>system\n' + message.content }}
{%- if tools is not none %}{{- '<functions>' + (tools | tojson) + '</functions>' }}{%- endif %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>environment\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + (message.content or '') }}
{%- if message.get('tool_calls', none) is not none %}
{{- '<function_calls>' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}
{{- key ~ '=' ~ (value | tojson) }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ')' }}{%- if not loop.last %}{{- '\n' }}{%- endif %}
{%- endfor %}
{{- '</function_calls>' }}
{%- endif %}
{%- if loop.last %}{{- eos_token }}{%- else %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- if loop.last and add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
{%- endfor %}"""
OLMO3_THINK = OLMO3.replace("assistant\n' }}{%- endif", "assistant\n<think>' }}{%- endif")

# The blocks that SmolLM3's own template marks begin with the header, and contain the empty think block that is a part
# of the prompt without reasoning. Tools come as `xml_tools`, so those of a row are not written, nor are calls.
SMOLLM3 = """
{%- set mode = '/no_think' if '/no_think' in messages[0].content and messages[0].role == 'system' else '/think' %}
{{- '<|im_start|>system\nReasoning Mode: ' + mode + '\n\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content.replace('/no_think', '').rstrip() + '\n\n' }}{%- endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role in ('user', 'tool') %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- generation %}
{%- if mode == '/think' %}{{- '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}{%- endif %}
{%- endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}{%- if mode == '/no_think' %}{{- '<think>\n\n</think>\n' }}{%- endif %}
{%- endif %}"""

# Tools are a key of the system message; the tools of a row are not written.
PHI4_MINI = """
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- if message.role == 'system' and message.tools %}{{- '<|tool|>' + message.tools + '<|/tool|>' }}{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"""

# Ministral 3: text may stand before calls, and calls have no ids.
MINISTRAL3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- set turn = namespace(n=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (turn.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set turn.n = turn.n + 1 %}
{%- endif %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{%- if message.content is string %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}"""

# Qwen3-Coder: each argument of a call is an element, and text is not JSON.
QWEN3_CODER = """
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}
{%- for tool in tools or [] %}{{- '\n<tool>' + (tool | tojson) + '</tool>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if message.content is string and message.content | trim %}{{- '\n' + message.content | trim + '\n' }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>\n<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL_JSON = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
PLAIN: Messages = [
    {"role": "system", "content": "Guard."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "A friend."},
    {"role": "user", "content": "Stand!"},
    {"role": "assistant", "content": "I stand."},
]
CALLED: Messages = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]

_OLMO = Published(("bytes",), "<|endoftext|>", "<|endoftext|>")
_OLMO3 = replace(_OLMO, special=("<|im_start|>", "<|im_end|>"), plain=("<functions>", "</functions>", "<think>"))
_TEKKEN = PUBLISHED["mistral-v3-tekken"]


@dataclass(frozen=True)
class Family:
    """A template; what is trained, in [[ ]], of `PLAIN`, and of `CALLED` with a tool, or why that is not trained."""

    template: str
    tokens: Published
    plain: str
    called: str


ALTERNATE = "roles must alternate user/assistant/user/assistant/.... Remove such rows, or use another template."
NO_CALLS = "the chat template does not write the tool calls of an answer"
FAMILIES = {
    "OLMo 2, OLMoE": Family(
        OLMO2,
        _OLMO,
        "<|endoftext|><|system|>\nGuard.\n<|user|>\nWho?\n<|assistant|>\n[[A friend.<|endoftext|>]]\n"
        "<|user|>\nStand!\n<|assistant|>\n[[I stand.<|endoftext|>]]",
        NO_CALLS,
    ),
    "OLMo 3": Family(
        OLMO3,
        _OLMO3,
        "<|im_start|>system\nGuard.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
        "[[A friend.<|im_end|>]]\n<|im_start|>user\nStand!<|im_end|>\n<|im_start|>assistant\n"
        "[[I stand.<|endoftext|>]]",
        f"<|im_start|>system\nCount.<functions>[{TOOL_JSON}]</functions><|im_end|>\n"
        "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
        "[[<function_calls>add(a=1, b=2)</function_calls><|im_end|>]]\n"
        "<|im_start|>environment\n3<|im_end|>\n<|im_start|>assistant\n[[It is 3.<|im_end|>]]\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[[Yes.<|endoftext|>]]",
    ),
    "SmolLM3": Family(
        SMOLLM3,
        PUBLISHED["smollm3"],
        "<|im_start|>system\nReasoning Mode: /think\n\nGuard.\n\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n[[A friend.<|im_end|>]]\n<|im_start|>user\nStand!<|im_end|>\n"
        "<|im_start|>assistant\n[[I stand.<|im_end|>]]\n",
        "the chat template leaves an answer empty",
    ),
    "Phi-4-mini": Family(
        PHI4_MINI,
        replace(_OLMO, special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>")),
        "<|system|>Guard.<|end|><|user|>Who?<|end|><|assistant|>[[A friend.<|end|>]]"
        "<|user|>Stand!<|end|><|assistant|>[[I stand.<|end|>]]<|endoftext|>",
        NO_CALLS,
    ),
    "Ministral 3": Family(
        MINISTRAL3,
        _TEKKEN,
        "<s>[SYSTEM_PROMPT]Guard.[/SYSTEM_PROMPT][INST]Who?[/INST][[A friend.</s>]][INST]Stand![/INST][[I stand.</s>]]",
        f"<s>[SYSTEM_PROMPT]Count.[/SYSTEM_PROMPT][AVAILABLE_TOOLS][{TOOL_JSON}][/AVAILABLE_TOOLS]"
        '[INST]1 + 2?[/INST][[[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>]][TOOL_RESULTS]3[/TOOL_RESULTS]'
        "[[It is 3.</s>]][INST]Sure?[/INST][[Yes.</s>]]",
    ),
    "Gemma 3": Family(
        GEMMA3,
        PUBLISHED["gemma-2"],
        "<bos><start_of_turn>user\nGuard.\n\nWho?<end_of_turn>\n<start_of_turn>model\n[[A friend.<end_of_turn>]]\n"
        "<start_of_turn>user\nStand!<end_of_turn>\n<start_of_turn>model\n[[I stand.<end_of_turn>]]\n",
        ALTERNATE,
    ),
    "Qwen3-Coder": Family(
        QWEN3_CODER,
        PUBLISHED["qwen3"],
        "<|im_start|>system\nGuard.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
        "[[A friend.<|im_end|>]]\n<|im_start|>user\nStand!<|im_end|>\n<|im_start|>assistant\n[[I stand.<|im_end|>]]\n",
        f"<|im_start|>system\nCount.\n<tool>{TOOL_JSON}</tool><|im_end|>\n"
        "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
        "[[<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>]]\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n[[It is 3.<|im_end|>]]\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n[[Yes.<|im_end|>]]\n",
    ),
}


def test_templates_of_the_table_of_families_are_tested() -> None:
    tested = PUBLISHED.keys() | FAMILIES.keys() | TEMPLATES.keys()
    assert {name for family in supported.FAMILIES for name in family.templates} <= tested


def made(folder: Path, name: str, template: str | None = None) -> Tokenizer:
    family = FAMILIES[name]
    return published_tokenizer(folder / "model", family.tokens, template=template or family.template)


def encode(tokenizer: Tokenizer, messages: Messages, tools: list[Any] | None = None) -> Encoded:
    return encode_conversation({"messages": messages, "tools": tools}, tokenizer, ConversationOptions())


def brackets(encoded: Encoded, tokenizer: Tokenizer) -> str:
    return "".join(f"[[{text}]]" if trained else text for text, trained in runs(encoded, tokenizer))


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_trained_with_their_end_of_turn_after_the_prompt_of_inference(name: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, name)
    encoded = encode(tokenizer, PLAIN)
    assert brackets(encoded, tokenizer) == FAMILIES[name].plain
    template = tokenizer.chat_template
    assert template is not None
    for answer in (2, 4):
        prompt = tokenizer.encode_ids(template.render(PLAIN[:answer], prompt=True))
        size = len(prompt)
        assert list(encoded.tokens[:size]) == list(prompt)
        assert encoded.trained[size] and not encoded.trained[size - 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_tools_are_trained_or_the_row_is_left_out_with_a_remedy(name: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, name)
    if FAMILIES[name].called == ALTERNATE:
        with pytest.raises(ConfigError, match="refuses these messages: TemplateError: Conversation " + ALTERNATE):
            encode(tokenizer, CALLED, [TOOL])
        return
    encoded = encode(tokenizer, CALLED, [TOOL])
    if "[[" in FAMILIES[name].called:
        assert brackets(encoded, tokenizer) == FAMILIES[name].called
        assert not any(omission.count for omission in encoded.omissions)
    else:
        remedy = "To train such rows, put another chat_template.jinja into the model's folder"
        assert encoded.left_out == f"{FAMILIES[name].called}. {remedy}"


@pytest.mark.parametrize("name", ["OLMo 2, OLMoE", "OLMo 3", "SmolLM3", "Phi-4-mini", "Qwen3-Coder"])
def test_the_header_of_a_first_answer_is_not_trained(name: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, name)
    shown = brackets(encode(tokenizer, [{"role": "assistant", "content": "Welcome."}, *PLAIN[1:3]]), tokenizer)
    assert "[[Welcome.<|" in shown and "[[A friend.<|" in shown and shown.count("[[") == 2


def test_think_models_of_olmo_3_train_what_follows_the_open_block(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, "OLMo 3", OLMO3_THINK)
    thought = {"role": "assistant", "content": "<think>Hm.</think>A friend."}
    shown = brackets(encode(tokenizer, [PLAIN[1], thought]), tokenizer)
    assert shown.endswith("<|im_start|>assistant\n<think>[[Hm.</think>A friend.<|endoftext|>]]")


def test_the_empty_think_block_of_smollm3_belongs_to_the_prompt(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, "SmolLM3")
    encoded = encode(tokenizer, [{"role": "system", "content": "Guard. /no_think"}, *PLAIN[1:]])
    shown = brackets(encoded, tokenizer)
    assert "<|im_start|>assistant\n<think>\n\n</think>\n[[A friend.<|im_end|>]]" in shown
    (missing,) = [omission for omission in encoded.omissions if omission.count]
    assert (missing.unit, missing.why) == (
        "messages with role system",
        "the chat template does not write it, or only a part",
    )


def test_text_before_a_call_of_ministral_3_is_trained_with_it(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, "Ministral 3")
    said = [CALLED[1], {**CALLED[2], "content": "Let me add."}, *CALLED[3:5]]
    shown = brackets(encode(tokenizer, said, [TOOL]), tokenizer)
    assert '[[Let me add.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>]]' in shown


def test_the_system_prompt_that_mistral_v3_writes_into_a_last_question_alone_is_reported(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "mistral-v3-tekken")
    encoded = encode(tokenizer, PLAIN)
    units = [omission.unit for omission in encoded.omissions if omission.count]
    assert units == ["answers", "messages with role system"]  # the prompt of a server has it
    assert brackets(encoded, tokenizer).startswith("<s>[INST]Who?[/INST][[A friend.</s>]]")
