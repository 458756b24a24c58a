from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamado.gguf.metadata import Metadata, StringArray
from llamado.text.template.chat import ChatTemplate, EndTokens, TemplateError
from llamado.text.template.templates import TEMPLATES
from llamado.text.tokenizer.tokenizer import load_tokenizer

USER = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]


def render(source: str, messages: list[dict[str, Any]] = USER, **values: Any) -> str:
    return ChatTemplate(source, EndTokens("<s>", "</s>")).render(messages, **values)


def test_jinja_is_set_up_as_hugging_face_does() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # trim_blocks, lstrip_blocks
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{{ bos_token }}|{{ eos_token }}|{{ missing }}") == "<s>|</s>|"


def test_tojson_is_hugging_faces() -> None:
    assert render("{{ x | tojson }}", x={"a": "é<&'", "b": [1, None]}) == '{"a": "é<&\'", "b": [1, null]}'
    assert render("{{ x | tojson(indent=2) }}", x={"a": 1}) == '{\n  "a": 1\n}'
    assert render("{{ x | tojson(ensure_ascii=true) }}", x="é") == '"\\u00e9"'
    assert render("{{ x | tojson(sort_keys=true) }}", x={"b": 1, "a": 2}) == '{"a": 2, "b": 1}'
    assert render("{{ x | tojson(separators=(',', ':')) }}", x={"b": 1, "a": 2}) == '{"b":1,"a":2}'


def test_values() -> None:
    source = "{{ messages[0].role }} {{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}"
    assert render(source, add_generation_prompt=False) == "user True True False"
    assert render("{{ tools[0].name }}{{ documents[0].t }}", tools=[{"name": "f"}], documents=[{"t": 1}]) == "f1"
    assert render("{{ enable_thinking }}") == "True"
    assert render("{{ enable_thinking }} {{ level }}", enable_thinking=False, level="low") == "False low"


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
STRINGS_ONLY = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)


def test_content_takes_the_form_that_the_template_knows() -> None:
    assert render(STRINGS_ONLY, PARTS) == "[a\nb]"
    assert render(PARTS_ONLY, USER) == "[hi]"
    assert render(PARTS_ONLY, PARTS) == "[a][b]"
    assert render(BOTH, PARTS) == "<a><b>"
    assert render(BOTH, USER) == "[hi]"
    assert render(STRINGS_ONLY, [{"role": "assistant", "content": None}, {"role": "assistant"}]) == "[][]"


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}]


@pytest.mark.parametrize(
    ("show", "expected"),
    [
        ("c.function.arguments", '{"a": "b"}'),
        ("c.function.arguments | tojson", '{"a": "b"}'),
        ("c.function.arguments | items | list", "[('a', 'b')]"),
        ("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson", '{"a": "b"}'),
    ],
)
def test_arguments_of_calls_take_the_form_that_the_template_knows(show: str, expected: str) -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ " + show + " }}{% endfor %}{% endfor %}"
    assert render(source, call(json.dumps({"a": "b"}))) == expected


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    show = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    source = "{% for m in messages %}" + show + "{% endfor %}"
    assert render(source, call("not json")) == '"not json"'


def test_a_template_may_append_to_its_own_copy_only() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    source = (
        "{% set l = [1] %}{{ l.append(2) }}{{ messages.append(3) }}{{ tools.append(4) }}{{ l }}{{ messages | length }}"
    )
    tools: list[dict[str, Any]] = [{"name": "f"}]
    assert render(source, messages, tools=tools).endswith("[1, 2]2")
    assert (len(messages), len(tools)) == (1, 1)


def test_without_a_system_role_the_message_goes_into_the_next() -> None:
    source = (
        "{% if messages and messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    assert render(source, TALK) == "[user:S\nU][assistant:A][user:V]"
    assert render(source, TALK[:1]) == ""
    assert render(STRINGS_ONLY, TALK) == "[S][U][A][V]"


def test_a_loop_over_none_does_nothing() -> None:
    assert render("{% for t in tools %}{{ t }}{% else %}-{% endfor %}") == "-"


def test_parts_are_not_given_to_a_template_that_fails_without_any() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]"
        "{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"
    )
    assert render(source, PARTS) == "[a\nb]"


def test_a_developer_is_a_system_where_the_template_knows_no_channels() -> None:
    messages = [{"role": "developer", "content": "x"}, *USER]
    roles = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert render(roles + "{{ messages[0].content }}", messages) == "system user x"
    assert render(roles + "<|channel|>", messages) == "developer user <|channel|>"


def test_template_options_have_the_names_that_templates_use() -> None:
    keeps = "{{ preserve_thinking }} {{ clear_thinking }} {{ truncate_history_thinking }} {{ drop_thinking }}"
    assert render(keeps) == "True False False False"
    assert render(keeps, preserve_reasoning=False) == "False True True True"
    effort = "{{ reasoning_effort }} {{ reasoning_strength }}"
    assert render(effort, reasoning_effort="low") == "low low"
    assert render(effort) == " "


def test_today() -> None:
    assert render("{{ date_string | length }} {{ datetime | length }}") == "11 11"
    assert render("{{ date_string }}", date_string="26 Jul 2024") == "26 Jul 2024"


def test_filters_on_lists_are_lists_to_tojson() -> None:
    assert render("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


def test_errors_name_the_line() -> None:
    with pytest.raises(TemplateError, match=r"line 2: is not valid Jinja.*--chat-template") as caught:
        ChatTemplate("a\n{% for %}", EndTokens("", ""))
    assert caught.value.line == 2
    with pytest.raises(TemplateError, match="line 3: roles must alternate"):
        render("a\n\n{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="line 2: TypeError"):
        render("x\n{{ 1 + 'a' }}")
    with pytest.raises(TemplateError):
        render("{% include 'x' %}")


@pytest.mark.parametrize("inside", ["raise_exception.__globals__", "strftime_now.__code__", "range.__self__", "step_"])
def test_insides_do_not_show(inside: str) -> None:
    assert render("{{ " + inside + " }}") == ""


@pytest.mark.slow
def test_long_conversations_are_within_the_limits() -> None:
    messages = [{"role": "user", "content": "x" * 1000}, {"role": "assistant", "content": "y"}] * 4000
    assert len(render(TEMPLATES["chatml"], messages)) > 4_000_000


# From llama.cpp b11434: `llama_chat_apply_template` with each name, and with and without a generation prompt.
BUILT_IN = json.loads((Path(__file__).parent / "built_in_templates.json").read_text())
CASES = [(messages, wanted) for messages in BUILT_IN["conversations"] for wanted in (True, False)]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_built_in_templates(name: str) -> None:
    template = from_model(name)
    texts = []
    for conversation, wanted in CASES:
        messages = [{"role": role, "content": content} for role, content in conversation]
        texts.append(template.render(messages, add_generation_prompt=wanted))
    assert texts == BUILT_IN["texts"][name]


def model(**extra: Any) -> Metadata:
    tokens = ["<s>", "</s>", "a", "b"]
    return Metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": StringArray.of(tokens),
            "tokenizer.ggml.token_type": np.array([3, 3, 1, 1], np.int32),
            "tokenizer.ggml.merges": StringArray.of(["a b"]),
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            **extra,
        }
    )


def from_model(name: str | None = None, **extra: Any) -> ChatTemplate:
    data = model(**extra)
    return ChatTemplate.from_metadata(data, load_tokenizer(data), name)


def test_the_models_template() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert from_model(**{"tokenizer.chat_template": source}).render(USER) == "<s>hi</s>"
    added = {"tokenizer.chat_template": source, "tokenizer.ggml.add_bos_token": True}
    assert from_model(**added).render(USER) == "hi</s>"  # the tokenizer will add it
    added = {"tokenizer.chat_template": source, "tokenizer.ggml.add_eos_token": True}
    assert from_model(**added).render(USER) == "<s>hi"
    assert from_model().render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_named_templates() -> None:
    both = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    assert from_model(**both).render(USER) == "plain"
    assert from_model(**both).render(USER, tools=[{"name": "f"}]) == "with tools"
    assert from_model("tool_use", **both).render(USER) == "with tools"
    assert from_model("gemma", **both).render(USER).startswith("<start_of_turn>")
    assert from_model("{{ 1 }}", **both).render(USER) == "1"
    with pytest.raises(TemplateError, match=r"'nonsense'.*chatml"):
        from_model("nonsense")
