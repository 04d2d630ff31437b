"""Published chat templates, each with the kinds of tokenizer that its models have.

What is trained must be what the model has to produce after the prompt that a server gives it: the messages before the
answer, rendered by transformers with add_generation_prompt and tokenized alone.
"""

# ruff: noqa: RUF001  (the tokens of DeepSeek models are written with other characters)
from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_formats import GEMMA3, PUBLISHED, published_tokenizer, template_text

from surogate.data.chat.conversation import ConversationOptions, encode_conversation
from surogate.data.chat.mask import encode_chat
from surogate.data.chat.token_spans import encode_spans, marked, runs
from surogate.data.tokenizer import Tokenizer
from surogate_core.api import Encoded
from surogate_core.errors import ConfigError

Messages = list[dict[str, Any]]

CASES = [(name, kind) for name, of in PUBLISHED.items() for kind in of.kinds]
THINKING_PROMPTS = {"deepseek-r1-distill": "<think>\n", "qwq": "<think>\n"}
"""Templates whose prompt opens a think block which they remove from answers."""

TWO_ROUNDS: Messages = [
    {"role": "user", "content": "Who goes there?"},
    {"role": "assistant", "content": "A friend."},
    {"role": "user", "content": "Stand!"},
    {"role": "assistant", "content": "I stand."},
]
CHATML = (
    "<|im_start|>user\nWho goes there?<|im_end|>\n<|im_start|>assistant\n[[A friend.<|im_end|>]]\n"
    "<|im_start|>user\nStand!<|im_end|>\n<|im_start|>assistant\n[[I stand.<|im_end|>]]\n"
)
BY_HAND = {
    "llama-2": "<s>[INST] Who goes there? [/INST][[ A friend. </s>]]<s>[INST] Stand! [/INST][[ I stand. </s>]]",
    "zephyr": "<|user|>\nWho goes there?</s>\n<|assistant|>\n[[A friend.</s>]]\n"
    "<|user|>\nStand!</s>\n<|assistant|>\n[[I stand.</s>]]\n",
    "vicuna": "USER: Who goes there? ASSISTANT:[[ A friend.</s>]]USER: Stand! ASSISTANT:[[ I stand.</s>]]",
    "mistral-v0.2": "<s>[INST] Who goes there? [/INST][[A friend.</s>]][INST] Stand! [/INST][[I stand.</s>]]",
    "mistral-v1": "<s> [INST] Who goes there? [/INST][[ A friend.</s>]] [INST] Stand! [/INST][[ I stand.</s>]]",
    "mistral-v3": "<s>[INST] Who goes there?[/INST][[ A friend.</s>]][INST] Stand![/INST][[ I stand.</s>]]",
    "mistral-v3-tekken": "<s>[INST]Who goes there?[/INST][[A friend.</s>]][INST]Stand![/INST][[I stand.</s>]]",
    "mistral-v7": "<s>[INST] Who goes there?[/INST][[ A friend.</s>]][INST] Stand![/INST][[ I stand.</s>]]",
    "mistral-small-3.2": "[INST]Who goes there?[/INST][[A friend.</s>]][INST]Stand![/INST][[I stand.</s>]]",
    # Phi-3's tokens swallow the line breaks after them.
    "phi-3": "<s><|user|>Who goes there?<|end|><|assistant|>[[A friend.<|end|>]]"
    "<|user|>Stand!<|end|><|assistant|>[[I stand.<|end|>]]",
    "phi-3.5": "<|user|>Who goes there?<|end|><|assistant|>[[A friend.<|end|>]]"
    "<|user|>Stand!<|end|><|assistant|>[[I stand.<|end|>]]<|endoftext|>",
    "gemma-2": "<bos><start_of_turn>user\nWho goes there?<end_of_turn>\n<start_of_turn>model\n"
    "[[A friend.<end_of_turn>]]\n<start_of_turn>user\nStand!<end_of_turn>\n<start_of_turn>model\n"
    "[[I stand.<end_of_turn>]]\n",
    "openhermes": CHATML,
    "deepseek-r1-distill": "<｜begin▁of▁sentence｜><｜User｜>Who goes there?<｜Assistant｜>"
    "[[A friend.<｜end▁of▁sentence｜>]]<｜User｜>Stand!<｜Assistant｜>[[I stand.<｜end▁of▁sentence｜>]]",
    "deepseek-coder": "### Instruction:\nWho goes there?\n### Response:\n[[A friend.\n<|EOT|>]]\n"
    "### Instruction:\nStand!\n### Response:\n[[I stand.\n<|EOT|>]]\n",
    "qwen2.5": CHATML,
    "qwen3": CHATML.replace("[[I", "[[<think>\n\n</think>\n\nI"),
    "qwq": CHATML,
    "smollm3": CHATML,
    "granite-3.3": "<|start_of_role|>user<|end_of_role|>Who goes there?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>[[A friend.<|end_of_text|>]]\n"
    "<|start_of_role|>user<|end_of_role|>Stand!<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>[[I stand.<|end_of_text|>]]\n",
    "gpt-oss": "<|start|>user<|message|>Who goes there?<|end|>"
    "<|start|>assistant[[<|channel|>final<|message|>A friend.<|end|>]]<|start|>user<|message|>Stand!<|end|>"
    "<|start|>assistant[[<|channel|>final<|message|>I stand.<|return|>]]",
    "phi-4": "<|im_start|>user<|im_sep|>Who goes there?<|im_end|><|im_start|>assistant<|im_sep|>[[A friend.<|im_end|>]]"
    "<|im_start|>user<|im_sep|>Stand!<|im_end|><|im_start|>assistant<|im_sep|>[[I stand.<|im_end|>]]",
    # The first published Llama 3 template always ends with a prompt.
    "llama-3": "<|start_header_id|>user<|end_header_id|>\n\nWho goes there?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[A friend.<|eot_id|>]]"
    "<|start_header_id|>user<|end_header_id|>\n\nStand!<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[I stand.<|eot_id|>]]"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama-3.1": "<|start_header_id|>user<|end_header_id|>\n\nWho goes there?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[A friend.<|eot_id|>]]"
    "<|start_header_id|>user<|end_header_id|>\n\nStand!<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[I stand.<|eot_id|>]]",
}  # fmt: skip


def brackets(encoded: Encoded, tokenizer: Tokenizer) -> str:
    return "".join(f"[[{text}]]" if trained else text for text, trained in runs(encoded, tokenizer))


def trained_runs(encoded: Encoded) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each run of trained tokens."""
    edges = [n for n, (a, b) in enumerate(itertools.pairwise([False, *encoded.trained, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


class Server:
    """Return the tokens of a server: the prompt rendered by transformers, tokenized by the tokenizers library."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self.backend = tokenizers.Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
        self.transformers = PreTrainedTokenizerFast(
            tokenizer_object=self.backend, bos_token=PUBLISHED[name].bos, eos_token=PUBLISHED[name].eos
        )
        self.template = template_text(name)

    def prompt(self, messages: Messages, tools: list[Any] | None = None) -> str:
        return str(
            self.transformers.apply_chat_template(
                messages, tools=tools, chat_template=self.template, add_generation_prompt=True, tokenize=False
            )
        )

    def tokens(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)


def test_every_template_file_is_tested_and_its_source_named() -> None:
    folder = Path(__file__).parent / "templates"
    names = {path.stem for path in folder.glob("*.jinja")}
    readme = (folder / "README.md").read_text()
    assert names == set(PUBLISHED) == set(BY_HAND)
    assert all(f"| {name}.jinja |" in readme for name in names)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_trained_tokens_are_those_the_model_produces_after_the_prompt_of_a_server(
    name: str, kind: str, tmp_path: Path
) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", name, kind)
    server = Server(tokenizer, name)
    encoded = encode_chat(TWO_ROUNDS, None, tokenizer, "default")
    if kind != "prepend":  # its decoder cannot know which spaces the tokenizer has put after added tokens
        shown = brackets(encoded, tokenizer)
        assert shown.endswith(BY_HAND[name]) and shown.count("[[") == 2
    found = trained_runs(encoded)
    assert len(found) == 2
    for (start, stop), upto in zip(found, (1, 3), strict=True):
        prompt = server.prompt(TWO_ROUNDS[:upto]).removesuffix(THINKING_PROMPTS.get(name, ""))
        assert list(encoded.tokens[:start]) == server.tokens(prompt)
        end = encoded.tokens[stop - 1]
        assert end in server.backend.get_added_tokens_decoder() and end not in encoded.tokens[start : stop - 1]


@pytest.mark.parametrize("kind", ["bytes", "gemma"])
def test_a_template_of_gemma_3_trains_answers_alone_and_puts_the_system_prompt_into_the_first_turn(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "gemma-2", kind, GEMMA3)
    assert brackets(encode_chat(TWO_ROUNDS, None, tokenizer, "default"), tokenizer) == BY_HAND["gemma-2"]
    told = encode_chat([{"role": "system", "content": "Guard."}, *TWO_ROUNDS], None, tokenizer, "default")
    assert brackets(told, tokenizer) == BY_HAND["gemma-2"].replace("user\nWho", "user\nGuard.\n\nWho")


ODD_ANSWERS = (
    "\nA friend.",
    "  A friend.",
    "\n\n\nA friend.",
    " \n A friend.",
    "🙂 A friend.",
    "é",
    "́e",
    "日本 is",
    "\tx",
)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_prompt_has_the_tokens_of_inference_before_any_answer(name: str, kind: str, tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", name, kind)
    server = Server(tokenizer, name)
    prompt = server.prompt(TWO_ROUNDS[:3]).removesuffix(THINKING_PROMPTS.get(name, ""))
    for said in ODD_ANSWERS:
        encoded = encode_chat([*TWO_ROUNDS[:3], {"role": "assistant", "content": said}], None, tokenizer, "last_round")
        ((start, stop),) = trained_runs(encoded)
        assert list(encoded.tokens[:start]) == server.tokens(prompt), said
        assert said.strip() in tokenizer.decode(encoded.tokens[start:stop])


@pytest.mark.parametrize("kind", ["bytes", "prepend", "metaspace", "gemma"])
def test_a_token_across_the_boundary_is_split_as_at_inference(kind: str, tmp_path: Path) -> None:
    """Random text cut at random places: the left part has the tokens it has alone, and both give the text back."""
    tokenizer = published_tokenizer(tmp_path / "model", "gemma-2", kind)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
    chance = random.Random(9)
    split = 0
    for _ in range(300):
        text = "x" + "".join(
            chance.choice([" ", "  ", "\n", "\n\n", "the", "friend", "🙂", "é", "́"]) for _ in range(12)
        )
        cut = chance.randrange(1, len(text))
        encoded = encode_spans(text, [(cut, len(text))], tokenizer)
        start = list(encoded.trained).index(True)
        assert list(encoded.tokens[:start]) == backend.encode(text[:cut], add_special_tokens=False).ids
        assert tokenizer.decode(encoded.tokens) == text
        split += list(encoded.tokens) != backend.encode(text, add_special_tokens=False).ids
    assert split > 10


# --------------------------------------------------------------------------------------------------------- tool calls

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"id": "abc123xyz", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLS: Messages = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abc123xyz"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
CALL_TEXTS = {
    "mistral-v3": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abc123xyz"}]</s>',
    "mistral-v3-tekken": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abc123xyz"}]</s>',
    "mistral-small-3.2": '[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1, "b": 2}</s>',
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
    # QwQ's prompt ends with a line break and a think block, of which the template writes nothing before calls.
    "qwq": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
    "llama-3.1": '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
    "gpt-oss": 'to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
}


def encode(tokenizer: Tokenizer, messages: Messages, tools: list[Any] | None = None, **options: Any) -> Encoded:
    row = {"messages": messages, "tools": tools}
    return encode_conversation(row, tokenizer, ConversationOptions(tools_field="tools", **options))


def trained_texts(encoded: Encoded, tokenizer: Tokenizer) -> list[str]:
    return [text for text, trained in runs(encoded, tokenizer) if trained]


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] in CALL_TEXTS])
def test_tool_calls_are_trained_as_the_template_writes_them(name: str, kind: str, tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", name, kind)
    encoded = encode(tokenizer, CALLS, [TOOL])
    texts = [text.replace("  ", " ") if kind == "prepend" else text for text in trained_texts(encoded, tokenizer)]
    assert len(texts) == 3 and texts[0].strip() == CALL_TEXTS[name]
    assert "It is 3." in texts[1] and "Yes." in texts[2] and "Sure?" not in "".join(texts)
    server = Server(tokenizer, name)
    start, _ = trained_runs(encode(tokenizer, CALLS[:4], [TOOL]))[0]
    prompt = server.prompt(CALLS[:1], [TOOL])
    if name != "qwq":
        assert list(encode(tokenizer, CALLS[:4], [TOOL]).tokens[:start]) == server.tokens(prompt)


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - set(CALL_TEXTS) - {"deepseek-r1-distill"}))
def test_rows_whose_calls_the_template_drops_are_left_out(name: str, tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", name)
    try:
        encoded = encode(tokenizer, CALLS, [TOOL])
    except ConfigError as error:  # Gemma, Llama 2, Mistral v0.2, v1, v7, Vicuna: roles must alternate, or are unknown
        assert "refuses these messages" in str(error)
        return
    assert not encoded.tokens
    why, _, remedy = encoded.left_out.partition(". ")
    assert remedy == "To train such rows, put another chat_template.jinja into the model's folder"
    assert why in (
        "the chat template does not write the tool calls of an answer",
        "the chat template does not end the turn after tool calls",
    )


def test_tool_calls_of_r1_distill_are_trained_if_their_turn_ends(tmp_path: Path) -> None:
    """Its template takes arguments as text and content that is None, and ends the turn only after a second call."""
    tokenizer = published_tokenizer(tmp_path / "model", "deepseek-r1-distill")
    one = encode(tokenizer, CALLS)
    assert one.left_out.startswith("the chat template does not end the turn after tool calls") and not one.tokens
    both = [CALLS[0], {**CALLS[1], "tool_calls": [CALL, CALL]}, *CALLS[2:]]
    text = 'function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜>'
    assert trained_texts(encode(tokenizer, both), tokenizer) == [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{text}\n<｜tool▁call▁begin｜>{text}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "It is 3.<｜end▁of▁sentence｜>",
        "Yes.<｜end▁of▁sentence｜>",
    ]


def test_a_row_is_left_out_if_the_template_drops_text_next_to_tool_calls(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "llama-3.1")
    said = [CALLS[0], {**CALLS[1], "content": "Let me add."}, *CALLS[2:]]
    why = "the chat template does not write the text of an answer unchanged"
    assert encode(tokenizer, said, [TOOL]).left_out.startswith(why)
    assert not encode(tokenizer, said, [TOOL], loss_scale="last_round").left_out  # context only


# ----------------------------------------------------------------------------------------------- reasoning and marks


@pytest.mark.parametrize("name", sorted(THINKING_PROMPTS))
def test_reasoning_that_a_template_removes_from_every_answer_is_counted(name: str, tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", name)
    thought = {"role": "assistant", "content": "<think>\nA test.\n</think>\n\nA friend."}
    more = [*TWO_ROUNDS[2:], {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    encoded = encode(tokenizer, [TWO_ROUNDS[0], thought, *more])
    (printed,) = [omission for omission in encoded.omissions if omission.what == "the reasoning"]
    assert (printed.unit, printed.count, printed.of) == ("answers with reasoning", 1, 1)
    assert "A test" not in tokenizer.decode(encoded.tokens) and len(trained_runs(encoded)) == 3


def test_earlier_answers_without_their_reasoning_are_context(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "qwen3")
    first = {**TWO_ROUNDS[1], "reasoning_content": "Perhaps a test."}
    last = {**TWO_ROUNDS[3], "reasoning_content": "I should."}
    encoded = encode(tokenizer, [TWO_ROUNDS[0], first, TWO_ROUNDS[2], last])
    assert trained_texts(encoded, tokenizer) == ["<think>\nI should.\n</think>\n\nI stand.<|im_end|>"]
    counts = {omission.what: (omission.count, omission.of) for omission in encoded.omissions if omission.count}
    assert counts == {"the reasoning": (1, 2), "the training": (1, 2)}


def test_a_marked_template_needs_no_prompt(tmp_path: Path) -> None:
    """The template of Phi-3.5 writes eos if it writes no prompt."""
    marks = template_text("phi-3.5").replace(
        "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}",
        "{{'<|assistant|>\n'}}{% generation %}{{message['content'] + '<|end|>\n'}}{% endgeneration %}",
    )
    assert "generation %}" in marks
    for kind in PUBLISHED["phi-3.5"].kinds:
        tokenizer = published_tokenizer(tmp_path / kind, "phi-3.5", kind, marks)
        plain = published_tokenizer(tmp_path / f"{kind}-plain", "phi-3.5", kind)
        both = [encode_chat(TWO_ROUNDS, None, one, "default") for one in (tokenizer, plain)]
        assert (both[0].tokens, both[0].trained) == (both[1].tokens, both[1].trained)


def test_debug_shows_the_first_space_of_an_answer(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "llama-2", "metaspace")
    encoded = encode_chat(TWO_ROUNDS[:2], None, tokenizer, "default")
    assert marked(encoded, tokenizer) == "<s>[INST] Who goes there? [/INST][[ A friend. </s>]]"


# --------------------------------------------------------------------------------------------------- named templates


def test_additional_chat_templates_are_used_and_exported(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from surogate.checkpoints.hf import copy_tokenizer
    from surogate.hub.files import TOKENIZER_FILES

    assert "additional_chat_templates/*.jinja" in TOKENIZER_FILES  # what is fetched from the hub, and pushed to it
    made = published_tokenizer(tmp_path / "made", "openhermes")
    backend = str(made.directory / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=backend, eos_token="<|im_end|>", bos_token="<s>")
    theirs.chat_template = {"default": template_text("openhermes"), "tool_use": template_text("qwen2.5")}
    theirs.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model/additional_chat_templates/tool_use.jinja").is_file()
    (tmp_path / "out").mkdir()
    copy_tokenizer(tmp_path / "model", tmp_path / "out")
    for folder in ("model", "out"):
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / folder)
        for tools in (None, [TOOL]):
            messages = CALLS if tools else TWO_ROUNDS
            encoded = encode(Tokenizer(tmp_path / folder), messages, tools)
            expected = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
            assert list(encoded.tokens) == expected


def test_a_folder_of_templates_without_a_default_is_refused_and_changes_the_cache(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "openhermes")
    named = tokenizer.directory / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text(template_text("qwen2.5"))
    assert Tokenizer(tokenizer.directory).fingerprint != tokenizer.fingerprint
    (tokenizer.directory / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"named tool_use, none of them default. Add chat_template.jinja"):
        assert Tokenizer(tokenizer.directory).chat_template
    settings = json.loads((tokenizer.directory / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings
