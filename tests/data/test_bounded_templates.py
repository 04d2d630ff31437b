"""What a chat template may cost, and that templates in use never notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_formats import PUBLISHED, template_text

from surogate.config.dataset_entry import DatasetEntry
from surogate.data.chat import render_budget
from surogate.data.chat.conversation import CONVERSATION, ConversationOptions, encode_conversation
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.chat.template import ChatTemplate, RenderEnded
from surogate.data.encode_rows import encode_rows
from surogate.data.sources import open_source
from surogate_core.errors import ConfigError

ASKED = [{"role": "user", "content": "Who goes there?"}, {"role": "assistant", "content": "A friend."}]
_NESTED = (
    "{%% set ns = namespace(x=(1,), y=(1,)) %%}"
    "{%% for i in range(60) %%}{%% set ns.x = (ns.x, ns.x) %%}{%% set ns.y = (ns.y, ns.y) %%}{%% endfor %%}%s"
)
_DOUBLED = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x|length }}"
)

LARGE = {
    "~": _DOUBLED % ("'ab'", "ns.x ~ ns.x"),
    "+": _DOUBLED % ("'ab'", "ns.x + ns.x"),
    "+ of lists": _DOUBLED % ("[1]", "ns.x + ns.x"),
    "set block": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "*": "{{ 'a' * 10**10 }}",
    "* of a literal": "{{ 'a' * 10000000000 }}",
    "%": "{{ '%*d' % (99999999, 1) }}",
    "% with a width": "{{ '%999999999999999d' % 1 }}",
    "format": "{{ '%*d'|format(99999999, 1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "str.format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "tojson": "{{ messages|tojson(indent=10**9) }}",
    "indent": "{{ 'a\nb'|indent(10**10, true) }}",
    "indent by key": "{{ 'a\nb'|indent(width=10**10, first=true) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "str.center": "{{ 'a'.center(10**10) }}",
    "Markup.ljust": "{{ ('a'|safe).ljust(10**10) }}",
    "filter block": "{% filter center(10**10) %}a{% endfilter %}",
    "join": "{{ range(100000)|join('a' * 1000000) }}",
    "str.join": "{{ ('a' * 1000000).join(range(100000)|map('string')) }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x|replace('a', x) }}",
    "str.replace": "{{ ('a' * 1000000).replace('', 'a' * 1000000) }}",
    "str.translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "str.expandtabs": "{{ '\t\t'.expandtabs(10**10) }}",
    "batch": "{{ [1]|batch(linecount=10**10, fill_with='x')|list }}",
    "slice": "{{ [1]|slice(10**10)|list|length }}",
    "nested lists, printed": _NESTED % "{{ ns.x }}",
    "nested lists in a namespace": _NESTED % "{{ ns }}",
    "nested lists as JSON": _NESTED % "{{ ns.x|tojson }}",
    "nested lists, compared": _NESTED % "{{ ns.x == ns.y }}",
    "nested lists, tested": _NESTED % "{{ ns.x is eq ns.y }}",
    "nested lists as a key": _NESTED % "{{ {ns.x: 1}|length }}",
    "nested lists, looked up": _NESTED % "{{ {}[ns.x] }}{{ {}.get(ns.x) }}",
    "the same text in a list": "{% set x = 'a' * 1000000 %}{{ (x ~ 'b') in ([x ~ 'c'] * 1000000) }}",
}
OTHERS = {
    "loops": ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "without end"),
    "pieces": ("{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}", "without end"),
    "many large values": (
        "{% set ns = namespace(l=[]) %}{% set x = 'a' * 9999999 %}{% for i in range(9999) %}"
        "{% set ns.l = [ns.l, x ~ i] %}{% endfor %}",
        "without end",
    ),
    "slices": (
        "{% set ns = namespace(l=[]) %}{% set x = 'a' * 9999999 %}{% for i in range(9999) %}"
        "{% set ns.l = [ns.l, x[1:]] %}{% endfor %}",
        "without end",
    ),
    "strftime_now": ("{{ strftime_now('%Y' * 100000) }}", "format of a date of 200,000 characters; 256 are allowed"),
    "**": ("{{ 10**(10**10) }}", "integer of more than 16,384 bits"),
    "round": ("{{ 5|round(precision=-1000000000) }}", "rounds to -1,000,000,000 digits; 400 are allowed"),
    "int": ("{{ ('f' * 10000000)|int(0, 16) }}", "reads 10,000,000 characters as a number"),
    "to_bytes": ("{{ (5).to_bytes(length=10**10, byteorder='big') }}", "10,000,000,000 bytes of a number"),
    "sum of lists": ("{{ [[1], [2]]|sum(start=[]) }}", "sums what are not numbers"),
    "a computed width": ("{{ '{:{}}'.format(1, 1000000000) }}", "computes the width"),
    "lipsum": ("{{ lipsum(100000000) }}", "words of filler"),
    "wordwrap": ("{{ ('a ' * 99999)|wordwrap(1, wrapstring='b' * 99999) }}", "a filter for web pages"),
    "rfind": ("{{ ('a' * 1000000).rfind('b' + 'a' * 50000) }}", "searches 50,001 characters in 1,000,000"),
    "the template itself": ("{# " + "a" * (1 << 18) + " #}", "it has 262,150 characters; 262,144 are allowed"),
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {}, "chat template (model/chat_template.jinja)")


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_makes_a_large_value_is_ended_before_it_makes_it(name: str) -> None:
    with pytest.raises(RenderEnded, match="makes a text or list of more than 16,") as refused:
        template(LARGE[name]).render(ASKED)
    assert str(refused.value).startswith("chat template (model/chat_template.jinja): rendering was ended: it makes")
    assert "Put another chat_template.jinja into the model's folder, or remove the row" in str(refused.value)


@pytest.mark.parametrize("name", OTHERS)
def test_a_template_that_costs_too_much_is_ended_and_says_what(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_budget, "MOST_WORK", 1 << 25)
    source, said = OTHERS[name]
    with pytest.raises(RenderEnded, match=said):
        template(source).render(ASKED)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m(n) %}{% if n < 60 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}{{ m(0) }}",
        "{% for x in range(9) recursive %}{% if loop.depth < 60 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% generation %}x{% endgeneration %}{% endfor %}"
        "{% endfor %}",
        "{% for a in range(90000) if a in range(90000)|map('string')|list %}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_budget, "SECONDS", 0.1)
    with pytest.raises(RenderEnded, match=r"takes more than 0\.1 seconds"):
        template(source).render_spans(ASKED, None)


def test_endless_recursion_and_a_long_message_of_the_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="RecursionError"):
        template("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}").render(ASKED)
    with pytest.raises(ConfigError) as refused:
        template("{{ raise_exception('a' * 1000000) }}").render(ASKED)
    assert len(str(refused.value)) < 2000


def test_a_row_whose_rendering_was_ended_ends_tokenizing_with_its_name(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tokenizer_dir / "chat_template.jinja").write_text(LARGE["*"])
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"messages": ASKED}) + "\n")
    source = open_source(DatasetEntry(path=str(rows)))
    for skip_bad in (False, True):  # no row of such a template can be rendered
        with pytest.raises(RenderEnded, match=r"chats\.jsonl:1: chat template .* makes a text or list"):
            encode_rows(
                list(source.rows(["messages"])),
                ["messages"],
                CONVERSATION,
                ConversationOptions(),
                RowTokenizer(tokenizer_dir),
                skip_bad,
            )


@pytest.mark.parametrize("name", ["qwen3", "llama-3.1", "mistral-v3", "gemma-2", "smollm3"])
def test_a_conversation_of_a_million_tokens_renders_as_in_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 50
    messages = [{"role": ("user", "assistant")[index % 2], "content": f"{index} {text}"} for index in range(1000)]
    of = PUBLISHED[name]
    special = {"bos_token": of.bos or "", "eos_token": of.eos}
    source = template_text(name)
    rendered, _ = render_jinja_template([messages], chat_template=source, **special)
    assert len(rendered[0]) > 4_000_000
    assert ChatTemplate({"default": source}, special, name).render(messages) == rendered[0]


@pytest.mark.parametrize(
    "expression",
    [
        "'a' + 'b' ~ 3 ~ none ~ [1, 'x']",
        "[1] + [2, 3] * 2",
        "(1, 2) + (3,)",
        "7 % 3 + 2 ** 10 * 3 - 5 // 2",
        "'%s is %5.2f and %(%)' % ('x', 3.14159) if false else '%s is %5.2f' % ('x', 3.14159)",
        "'{} {:>6} {a!r}'.format('x', 'y', a=[1, 'z'])",
        "messages|tojson(indent=2)",
        "messages|map(attribute='content')|join(', ')",
        "messages|join('; ', attribute='role')",
        "messages|selectattr('role', 'equalto', 'user')|list|length",
        "messages[0].content.split(' ')[-1].strip('?').center(20, '*')",
        "messages[1:][0]['content'][2:]|upper",
        "'a,b,,c'.rsplit(',', 1) ~ 'a\tb'.expandtabs(4) ~ 'aXbX'.replace('X', 'YY')",
        "{'a': 1, messages[0].role: 2}.items()|list",
        "range(300)|list|batch(100)|map('sum')|list",
        "range(300)|sum + [1.5, 2]|sum + (5.55|round(1)) + ('12'|int)",
        "'x y z'|wordcount ~ '<a>'|e ~ 'title case'|title ~ ('a\nb'|indent(2))",
        "[3, 1, 2]|sort|reverse|list ~ ('b', 'a')|min ~ ['a', 'a']|unique|list",
        "messages[0].missing is defined or messages[0].missing",
        "dict(a=1).get('a') ~ namespace(x=2).x ~ cycler('o', 'e').next()",
    ],
)
def test_operators_filters_and_methods_give_what_they_give_in_transformers(expression: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{%- for m in messages -%}{{ " + expression + " }}|{{ loop.index }}{{ loop.last }}{%- endfor -%}"
    expected, _ = render_jinja_template([ASKED], chat_template=source)
    assert template(source).render(ASKED) == expected[0]


def test_every_filter_of_the_engine_is_counted_or_known_to_be_free() -> None:
    """A filter that a newer engine adds is counted by its arguments; look whether it can make more of them."""
    from jinja2.filters import FILTERS

    from surogate.data.chat import priced_calls

    by_arguments = {
        "capitalize",
        "dictsort",
        "e",
        "escape",
        "filesizeformat",
        "forceescape",
        "groupby",
        "lower",
        "max",
        "min",
    } | {"reverse", "sort", "string", "title", "truncate", "unique", "upper", "urlencode", "wordcount"}
    assert set(FILTERS) == priced_calls.FREE | set(priced_calls.FILTERS) | by_arguments


def test_the_first_error_of_a_conversation_is_still_its_own(tokenizer_dir: Path) -> None:
    (tokenizer_dir / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(ConfigError, match="refuses these messages: TemplateError: no such role"):
        row: dict[str, Any] = {"messages": ASKED}
        encode_conversation(row, RowTokenizer(tokenizer_dir), ConversationOptions())
