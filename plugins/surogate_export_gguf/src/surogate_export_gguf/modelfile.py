"""The Modelfile beside a GGUF file: the turns that were trained, in the language of Ollama's templates.

Ollama does not render the chat template of the file. It chooses one of its own unless the Modelfile has one.
"""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import ExportContext

from .turns import Message, Turns, turns_of


def write_modelfile(context: ExportContext, file: str) -> str:
    """Return the Modelfile for a GGUF file. A template that is not made of plain turns is left out, with a notice."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(context.folder))
    lines = [f"FROM ./{file}"]
    if tokenizer.chat_template:

        def render(messages: Sequence[Message]) -> str:
            text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            assert isinstance(text, str)
            return text

        turns = turns_of(render)
        if turns and (template := go_template(without_bos(turns, tokenizer))):
            lines.append(f'TEMPLATE """{template}"""')
            if turns.system is None:
                context.notice("Modelfile: the chat template has no system message at its start, so it has none either")
            if "strftime_now" in tokenizer.chat_template:
                context.notice("Modelfile: the chat template writes the date, which stays that of the export in Ollama")
        else:
            reason = "the chat template is not made of plain turns"
            context.notice(f"Modelfile: {reason}, so Ollama chooses one; compare: ollama show NAME --template")
    ends = [tokenizer.convert_ids_to_tokens(i) for i in dict.fromkeys((*context.turn_ends, *context.stops))]
    lines += [f'PARAMETER stop "{end}"' for end in ends if isinstance(end, str)]
    return "\n".join(lines) + "\n"


def without_bos(turns: Turns, tokenizer: object) -> Turns:
    """Return the turns without the first token, which llama.cpp puts before every text if the tokenizer does."""
    bos = getattr(tokenizer, "bos_token", None) or ""
    ids = tokenizer("a")["input_ids"]  # type: ignore[operator]
    if not bos or ids[0] != tokenizer.bos_token_id:  # type: ignore[attr-defined]
        return turns
    system = (turns.system[0].removeprefix(bos), turns.system[1]) if turns.system else None
    return Turns(turns.start.removeprefix(bos), system, turns.answer, turns.question, turns.last)


def go_template(turns: Turns) -> str:
    """Return the turns in the language of Ollama's templates; "" if a Modelfile cannot hold them."""
    texts = (turns.start, *(turns.system or ()), turns.answer, turns.question, turns.last)
    if any("{{" in text or '"""' in text for text in texts):
        return ""
    start = turns.start
    if turns.system:
        start = "{{ if .System }}" + "{{ .System }}".join(turns.system) + "{{ else }}" + start + "{{ end }}"
    after = turns.answer
    if turns.last != turns.answer:
        after = "{{ if eq (len (slice $.Messages $i)) 1 }}" + turns.last + "{{ else }}" + after + "{{ end }}"
    user = '{{ if eq .Role "user" }}{{ .Content }}' + after
    answer = '{{ else if eq .Role "assistant" }}{{ .Content }}' + turns.question + "{{ end }}"
    return start + "{{ range $i, $_ := .Messages }}" + user + answer + "{{ end }}"
