"""Chat templates: convert a conversation to the text that a model was trained to continue.

Templates are Jinja2 as rendered by Hugging Face (`transformers`, `apply_chat_template`), with the variables of
llama-server. They come with the model and are untrusted code: they run in separate processes
(`text.template.rendering`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from llamado.gguf.metadata import Metadata
from llamado.text.errors import TemplateError, TemplateTooCostly
from llamado.text.template import rendering
from llamado.text.template.templates import TEMPLATES
from llamado.text.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateError"]

KEY = "tokenizer.chat_template"

MAX_SOURCE = 4 << 20
SECONDS = 2.0  # of computing, for one conversation
PROBE_SECONDS = 0.3
AT_ONCE = 2  # renderings of one template; other models' renderings do not wait for them

Message = Mapping[str, Any]


class EndTokens(NamedTuple):
    """Texts of a model's begin and end tokens (`bos_token`, `eos_token`).

    If the tokenizer adds them itself (`add_bos`, `add_eos`), `ChatTemplate.render` removes them from the ends of the
    text, so that encoding with `add_special=True` adds them once.
    """

    bos: str
    eos: str
    add_bos: bool = False
    add_eos: bool = False


class ChatTemplate:
    """A template. Raises `TemplateError` for a source that does not compile."""

    def __init__(
        self,
        source: str,
        ends: EndTokens,
        *,
        tool_use: str | None = None,
        name: str = "chat template",
        as_given: bool = False,
    ) -> None:
        """`as_given`: messages are passed unchanged, without testing the template's features."""
        self.source = source
        self.bos, self.eos, self.add_bos, self.add_eos = ends
        self.name = name
        self._as_given = as_given
        self._tool_use = tool_use
        self._at_once = threading.BoundedSemaphore(AT_ONCE)
        _check(source, name)
        if tool_use:
            _check(tool_use, f"{name} tool_use")

    @classmethod
    def from_metadata(cls, metadata: Metadata, tokenizer: Tokenizer, name: str | None = None) -> ChatTemplate:
        """Return the template of a model file, ChatML if it has none.

        `name` selects one of its named templates (`tokenizer.chat_template.NAME`) or a built-in template, or is itself
        the source of a template; any other name raises `TemplateError`.
        """
        tool_use: str | None = None
        built_in = False
        if name is None:
            source = metadata.str_(KEY, None)
            tool_use = metadata.str_(f"{KEY}.tool_use", None)
            source = source or tool_use or TEMPLATES["chatml"]
        elif f"{KEY}.{name}" in metadata:
            source = metadata.str_(f"{KEY}.{name}")
        elif name in TEMPLATES:
            source = TEMPLATES[name]
            built_in = True
        elif "{{" in name or "{%" in name:
            source = name
        else:
            raise TemplateError(
                f"there is no template '{name}'; give one of {', '.join(sorted(TEMPLATES))}, or a Jinja template"
            )
        bos, eos = (
            "" if token is None else tokenizer.piece(token, special=True).decode("utf-8", "replace")
            for token in (tokenizer.bos, tokenizer.eos)
        )
        return cls(
            source,
            EndTokens(bos, eos, tokenizer.add_bos, tokenizer.add_eos),
            tool_use=tool_use,
            as_given=built_in,
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Return the text of a conversation; `extra` are the template's own variables (`chat_template_kwargs`).

        Messages are those of the OpenAI API. Content in parts is joined by line feeds if the template supports only
        strings, and a string becomes one part if it supports only parts; missing content is ""; a system message is
        prepended to the next message if the template has no system role. All values must be serializable as JSON.
        Raises `TemplateError` when the template fails or refuses the conversation.
        """
        return self._render(messages, tools, extra, (add_generation_prompt,))[0]

    def render_both(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **extra: Any
    ) -> tuple[str, str]:
        """Return the text like `render`, without and with the generation prompt."""
        bare, prompt = self._render(messages, tools, extra, (False, True))
        return bare, prompt

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
        generation_prompts: Sequence[bool],
    ) -> list[str]:
        source = self._tool_use if tools and self._tool_use else self.source
        today = datetime.now()
        values: dict[str, Any] = {
            "date_string": today.strftime("%d %b %Y"),
            "datetime": today.strftime("%b %d %Y"),
            "messages": self._messages(messages),
            "tools": [_tool(tool) for tool in tools] if tools else None,
            "documents": None,
            "bos_token": self.bos,
            "eos_token": self.eos,
            "enable_thinking": True,
            **extra,
        }
        values |= _preferences({"preserve_reasoning": True, **extra})
        renders = [{"add_generation_prompt": wanted} for wanted in generation_prompts]
        with self._at_once:
            texts = rendering.render(source, values, renders, self.name, SECONDS)
        if self.add_bos and self.bos:
            texts = [text.removeprefix(self.bos) for text in texts]
        if self.add_eos and self.eos:
            texts = [text.removesuffix(self.eos) for text in texts]
        return texts

    @cached_property
    def features(self) -> TemplateFeatures:
        """The features of the template, found by trying."""
        if self._as_given:
            return STRINGS_ONLY
        return _test_features(self.source, {"bos_token": self.bos, "eos_token": self.eos})

    @cached_property
    def caps(self) -> dict[str, bool]:
        """`chat_template_caps` of llama-server's `/props`; those of the template for tools if there is one."""
        source = self._tool_use or self.source
        values = {"bos_token": self.bos, "eos_token": self.eos}
        return _capabilities(source, values, _test_features(source, values) if self._tool_use else self.features)

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        out = [self._message(message) for message in messages]
        if out and out[0].get("role") == "system" and not self.features.system:
            first = out.pop(0)
            if out:
                contents = [message["content"] for message in (first, out[0])]
                out[0]["content"] = "\n".join(c if isinstance(c, str) else _join(c) for c in contents)
        return out

    def _message(self, message: Message) -> dict[str, Any]:
        out = dict(message)
        if out.get("role") == "developer" and "<|channel|>" not in self.source:
            out["role"] = "system"
        content = out.get("content")
        if content is None:
            # left out on purpose where a family's template needs it so
            if "content" in out or not out.get("tool_calls") or not out.get("thinking"):
                out["content"] = ""
        elif isinstance(content, str):
            if not self.features.strings:
                out["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, Sequence) and not self.features.parts and not _has_thoughts(content):
            out["content"] = _join(content)
        for key in ("reasoning_content", "name", "tool_call_id", "tool_calls"):
            if not out.get(key):
                out.pop(key, None)
        if "tool_calls" in out:
            calls = [_call(call) for call in out["tool_calls"]]
            out["tool_calls"] = [_with_argument_object(c) for c in calls] if self.features.argument_objects else calls
        return out


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form that templates expect: with a description and parameters."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    parameters = function.get("parameters")
    return {
        "type": "function",
        "function": {
            "name": function.get("name", ""),
            "description": function.get("description") or "",
            "parameters": parameters if isinstance(parameters, Mapping) else {},
        },
    }


def _call(call: Any) -> Any:
    """Return an earlier tool call with its members in the order expected by templates that write all of them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": function.get("arguments", "")},
    }
    if call.get("id"):
        out["id"] = call["id"]
    return out


def _preferences(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the templates' own variables for llama-server's `preserve_reasoning` and `reasoning_effort`."""
    out: dict[str, Any] = {}
    keep = extra.get("preserve_reasoning")
    if isinstance(keep, bool):
        out["preserve_thinking"] = keep
        for name in ("clear_thinking", "truncate_history_thinking", "drop_thinking"):
            out[name] = not keep
    effort = extra.get("reasoning_effort")
    if isinstance(effort, str) and effort:
        out["reasoning_strength"] = effort
    return out


def _has_thoughts(parts: Sequence[Any]) -> bool:
    """Return True if content has parts that only some families' templates support, made for them."""
    return any(isinstance(part, Mapping) and part.get("type") == "thinking" for part in parts)


def _join(parts: Sequence[Any]) -> str:
    """Return the text of content in parts; parts that are not text are left out."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") == "text":
            texts.append(str(part.get("text", "")))
    return "\n".join(texts)


def _with_argument_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call with its arguments, which are JSON text in the API, as an object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True)
class TemplateFeatures:
    """The features of a template."""

    strings: bool  # content as a string
    parts: bool  # content in parts
    argument_objects: bool  # a call's arguments as an object, not as JSON text
    system: bool  # a system message


STRINGS_ONLY = TemplateFeatures(strings=True, parts=False, argument_objects=False, system=True)


def _check(source: str, name: str) -> None:
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"is {len(source):,} characters long; the limit is {MAX_SOURCE:,}", name=name)
    try:
        rendering.render(source, {}, (), name, SECONDS)
    except TemplateTooCostly as error:
        raise TemplateError(f"{error.reason}; give another with --chat-template", name=name) from None


def _probe(source: str, values: Mapping[str, Any]) -> str | None:
    """Return a template's text for `values`; None if it fails. Raises TemplateTooCostly."""
    try:
        return rendering.render(source, {"add_generation_prompt": True}, [values], "probe", PROBE_SECONDS)[0]
    except TemplateTooCostly:
        raise
    except TemplateError:
        return None


def _test_features(source: str, values: Mapping[str, Any]) -> TemplateFeatures:
    try:
        return _features(source, values)
    except TemplateTooCostly:  # nothing is rendered anyway; further trials would only lose time
        return STRINGS_ONLY


def _features(source: str, values: Mapping[str, Any]) -> TemplateFeatures:
    def answer(*messages: Message) -> str:
        return _probe(source, {**values, "messages": messages}) or ""

    needle = "llamadoneedle"
    as_string = answer({"role": "user", "content": needle})
    as_parts = answer({"role": "user", "content": [{"type": "text", "text": needle}]})
    parts = needle in as_parts and not re.search(r"""['"]text['"]""", as_parts)
    strings = needle in as_string or not parts
    if parts and strings:
        empty = [{"role": "user", "content": []}]  # llama-server also tests an empty list of parts
        parts = _probe(source, {**values, "messages": empty}) is not None

    def call(arguments: Any) -> str:
        function = {"name": "f", "arguments": arguments}
        calls = [{"id": "call00000", "type": "function", "function": function}]
        return answer(
            {"role": "user", "content": "x" if strings else [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "", "tool_calls": calls},
        )

    with_object = call({needle: "x"})
    objects = needle in with_object and f"{{'{needle}'" not in with_object  # Python's notation: not intended
    system = answer({"role": "system", "content": needle}, {"role": "user", "content": "x"}) if strings else needle
    return TemplateFeatures(strings, parts, objects, needle in system)


def _capabilities(source: str, values: Mapping[str, Any], features: TemplateFeatures) -> dict[str, bool]:
    """Test a template with tools, calls, thoughts and effort: a feature is supported if its input shows in the text."""
    costly = False

    def answer(messages: Sequence[Message], **more: Any) -> str | None:
        nonlocal costly
        if costly:
            return None
        try:
            return _probe(source, {**values, "tools": [], "messages": messages, **more})
        except TemplateTooCostly:
            costly = True
            return None

    def text(content: str) -> Any:
        return content if features.strings or not content else [{"type": "text", "text": content}]

    arguments: Any = {"arg": "value"} if features.argument_objects else '{"arg": "value"}'
    user = {"role": "user", "content": text("x")}
    schema = {"type": "object", "properties": {"arg": {"type": "string", "description": "d"}}, "required": ["arg"]}
    tool = {"type": "function", "function": {"name": "llamadotool", "description": "d", "parameters": schema}}

    def conversation(*names: str) -> list[Message]:
        calls = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name in enumerate(names, 1)
        ]
        return [
            user,
            {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})},
            {"role": "tool", "content": text("r"), "tool_call_id": "call00001"},
            {"role": "assistant", "content": text("y")},
            user,
        ]

    none = answer(conversation(), tools=[tool])
    one = answer(conversation("llamadocall"), tools=[tool])
    two = answer(conversation("llamadocall", "llamadosecond"), tools=[tool])
    thoughts = answer(
        [
            user,
            {"role": "assistant", "content": text("y"), "reasoning_content": "llamadothought"},
            user,
            {"role": "assistant", "content": text("y"), "reasoning_content": "z"},
            user,
        ],
        enable_thinking=True,
        **_preferences({"preserve_reasoning": True}),
    )
    efforts = [
        answer([user], enable_thinking=True, reasoning_effort=effort, **_preferences({"reasoning_effort": effort}))
        for effort in ("low", "high")
    ]
    return {
        "supports_string_content": features.strings,
        "supports_typed_content": features.parts,
        "supports_tools": one is not None and "llamadotool" in one,
        "supports_tool_calls": one is not None and one != none,
        "supports_parallel_tool_calls": two is not None and two != one,
        "supports_system_role": features.system,
        "supports_preserve_reasoning": thoughts is not None and "llamadothought" in thoughts,
        "supports_reasoning_effort": efforts[0] != efforts[1],
        "supports_object_arguments": features.argument_objects,
    }
