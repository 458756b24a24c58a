"""Chat templates: a conversation → the text that a model was trained to continue.

Templates are Jinja2 as Hugging Face renders it (`transformers`, `apply_chat_template`), with what llama-server passes
in. They come with the model, so they are foreign code: they run in Jinja's sandbox, with steps, time and text limited.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llamado.gguf.metadata import Metadata
from llamado.text.errors import TemplateError
from llamado.text.templates import TEMPLATES
from llamado.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateError"]

KEY = "tokenizer.chat_template"

# Far beyond what a conversation needs, far below what hurts.
MAX_STEPS = 2_000_000  # turns of loops and calls of macros
MAX_SECONDS = 3.0
MAX_CHARACTERS = 16 << 20  # of the whole text and of any string on the way
MAX_ITEMS = 1_000_000  # of a list on the way
MAX_NUMBER = 100_000  # given to a call or filter: widths and counts
PROBE_STEPS = 20_000
PROBE_SECONDS = 0.3
MAX_SOURCE = 4 << 20

Message = Mapping[str, Any]

_WIDE_FIELD = re.compile(r"\d{6}|%[-+ #0.\d]*\*")  # a format specification that asks for a huge field


class ChatTemplate:
    """A compiled template. `bos` and `eos` are the texts behind `bos_token` and `eos_token`.

    Where the tokenizer adds those tokens itself (`add_bos`, `add_eos`), `render` takes them off the ends of the text,
    so that encoding with `add_special=True` gives them once. Raises `TemplateError` for a source that does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        add_bos: bool = False,
        add_eos: bool = False,
        tool_use: str | None = None,
        name: str = "chat template",
        as_given: bool = False,
    ) -> None:
        """`as_given`: messages go in as they are, without looking at what the template can be given."""
        self.source = source
        self.bos = bos
        self.eos = eos
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.name = name
        self._as_given = as_given
        self._template = _compile(source, name)
        self._tool_use = _compile(tool_use, f"{name} tool_use") if tool_use else None

    @classmethod
    def from_metadata(cls, metadata: Metadata, tokenizer: Tokenizer, name: str | None = None) -> ChatTemplate:
        """The template of a model file, ChatML where it has none.

        `name` chooses one of its named templates (`tokenizer.chat_template.NAME`), a template built in here, or is
        itself a template's source; a name that is none of these raises `TemplateError`.
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
            bos=bos,
            eos=eos,
            add_bos=tokenizer.add_bos,
            add_eos=tokenizer.add_eos,
            tool_use=tool_use,
            as_given=built_in,
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The text of a conversation; `extra` are the template's own variables (`chat_template_kwargs`).

        Messages are those of the OpenAI API. Content given as parts is joined by line feeds for a template that knows
        only strings, and the other way round; missing content is ""; a system message goes in front of the next message
        where the template has no system role. Raises `TemplateError` when the template fails or refuses the
        conversation.
        """
        template = self._tool_use if tools and self._tool_use else self._template
        today = datetime.now()
        values: dict[str, Any] = {
            "date_string": today.strftime("%d %b %Y"),
            "datetime": today.strftime("%b %d %Y"),
            "messages": self._messages(messages),
            "tools": [_tool(tool) for tool in tools] if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
            "enable_thinking": True,
            **extra,
        }
        values |= _preferences({"preserve_reasoning": True, **extra})
        text = _render(template, values, self.name)
        if self.add_bos and self.bos:
            text = text.removeprefix(self.bos)
        if self.add_eos and self.eos:
            text = text.removesuffix(self.eos)
        return text

    @cached_property
    def takes(self) -> Taken:
        """What the template can be given, found by trying."""
        if self._as_given:
            return Taken(strings=True, parts=False, argument_objects=False, system=True)
        return _try_out(self._template, {"bos_token": self.bos, "eos_token": self.eos})

    @cached_property
    def caps(self) -> dict[str, bool]:
        """What llama-server's `/props` shows as `chat_template_caps`; of the template for tools, where there is one."""
        template = self._tool_use or self._template
        values = {"bos_token": self.bos, "eos_token": self.eos}
        return _capabilities(template, values, self.takes if template is self._template else _try_out(template, values))

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        out = [self._message(message) for message in messages]
        if out and out[0].get("role") == "system" and not self.takes.system:
            first = out.pop(0)
            if out:
                contents = [message["content"] for message in (first, out[0])]
                out[0]["content"] = "\n".join(c if isinstance(c, str) else _join(c) for c in contents)
        return out

    def _message(self, message: Message) -> dict[str, Any]:
        out = copy.deepcopy(dict(message))
        if out.get("role") == "developer" and "<|channel|>" not in self.source:
            out["role"] = "system"
        content = out.get("content")
        if content is None:
            # Left out on purpose where a family's template wants it so.
            if "content" in out or not out.get("tool_calls") or not out.get("thinking"):
                out["content"] = ""
        elif isinstance(content, str):
            if not self.takes.strings:
                out["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, Sequence) and not self.takes.parts and not _has_thoughts(content):
            out["content"] = _join(content)
        for key in ("reasoning_content", "name", "tool_call_id", "tool_calls"):
            if not out.get(key):
                out.pop(key, None)
        if "tool_calls" in out:
            calls = [_call(call) for call in out["tool_calls"]]
            out["tool_calls"] = [_with_argument_object(c) for c in calls] if self.takes.argument_objects else calls
        return out


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as templates may expect it: with a description and parameters. A copy, for templates that change it."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return copy.deepcopy(dict(tool))
    parameters = function.get("parameters")
    return {
        "type": "function",
        "function": {
            "name": function.get("name", ""),
            "description": function.get("description") or "",
            "parameters": copy.deepcopy(dict(parameters)) if isinstance(parameters, Mapping) else {},
        },
    }


def _call(call: Any) -> Any:
    """A tool call of the past with its members in the order in which templates that write all of them show them."""
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
    """The variables by which templates know what llama-server calls `preserve_reasoning` and `reasoning_effort`."""
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
    """Whether content has parts that only some families' templates know, and that were made for them."""
    return any(isinstance(part, Mapping) and part.get("type") == "thinking" for part in parts)


def _join(parts: Sequence[Any]) -> str:
    """Text of content in parts; parts that are not text are left out."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") == "text":
            texts.append(str(part.get("text", "")))
    return "\n".join(texts)


def _with_argument_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool call with its arguments, which the API carries as JSON text, as the object they mean."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True)
class Taken:
    """What a template can be given."""

    strings: bool  # content as a string
    parts: bool  # content in parts
    argument_objects: bool  # a call's arguments as an object, not as JSON text
    system: bool  # a system message


def _try_out(template: jinja2.Template, values: dict[str, Any]) -> Taken:
    def answer(*messages: Message) -> str:
        try:
            return _render(
                template,
                {**values, "messages": messages, "add_generation_prompt": True},
                "probe",
                PROBE_STEPS,
                PROBE_SECONDS,
            )
        except TemplateError:
            return ""

    needle = "llamadoneedle"
    as_string = answer({"role": "user", "content": needle})
    as_parts = answer({"role": "user", "content": [{"type": "text", "text": needle}]})
    parts = needle in as_parts and not re.search(r"""['"]text['"]""", as_parts)
    strings = needle in as_string or not parts
    if parts and strings:
        probe = [{"role": "user", "content": []}]  # llama-server looks for parts with none, too
        try:
            _render(template, {**values, "messages": probe, "add_generation_prompt": True}, "probe", PROBE_STEPS)
        except TemplateError:
            parts = False

    def call(arguments: Any) -> str:
        function = {"name": "f", "arguments": arguments}
        calls = [{"id": "call00000", "type": "function", "function": function}]
        return answer(
            {"role": "user", "content": "x" if strings else [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "", "tool_calls": calls},
        )

    with_object = call({needle: "x"})
    objects = needle in with_object and f"{{'{needle}'" not in with_object  # Python's way of writing it: not meant so
    system = answer({"role": "system", "content": needle}, {"role": "user", "content": "x"}) if strings else needle
    return Taken(strings, parts, objects, needle in system)


def _capabilities(template: jinja2.Template, values: dict[str, Any], takes: Taken) -> dict[str, bool]:
    """What the template does with tools, calls, thoughts and effort: what it is given has to show in its text."""

    def answer(messages: Sequence[Message], **more: Any) -> str | None:
        try:
            return _render(
                template,
                {**values, "tools": [], "messages": messages, "add_generation_prompt": True, **more},
                "probe",
                PROBE_STEPS,
                PROBE_SECONDS,
            )
        except TemplateError:
            return None

    def text(content: str) -> Any:
        return content if takes.strings or not content else [{"type": "text", "text": content}]

    arguments: Any = {"arg": "value"} if takes.argument_objects else '{"arg": "value"}'
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
        "supports_string_content": takes.strings,
        "supports_typed_content": takes.parts,
        "supports_tools": one is not None and "llamadotool" in one,
        "supports_tool_calls": one is not None and one != none,
        "supports_parallel_tool_calls": two is not None and two != one,
        "supports_system_role": takes.system,
        "supports_preserve_reasoning": thoughts is not None and "llamadothought" in thoughts,
        "supports_reasoning_effort": efforts[0] != efforts[1],
        "supports_object_arguments": takes.argument_objects,
    }


class _Budget(threading.local):
    """What the template that runs on this thread may still use."""

    steps = 0
    deadline = 0.0


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Meter(NodeTransformer):
    """Has every loop and macro count its steps, and every `~` look at the length it makes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _count(node))
        node.iter = nodes.Call(nodes.EnvironmentAttribute("items_"), [node.iter], [], None, None)
        node.iter.set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _count(node))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _count(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concat_"), node.nodes, [], None, None).set_lineno(node.lineno)


def _count(node: nodes.Node) -> nodes.Node:
    # An attribute of the environment, and not a name, so that no template can put its own in place; a property, because
    # the sandbox makes every call expensive.
    return nodes.ExprStmt(nodes.EnvironmentAttribute("step_")).set_lineno(node.lineno)


class _Missing(jinja2.Undefined):
    """A variable or member that is not there: nothing, also when it is joined to a text or gone through."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other if isinstance(other, str) else super().__radd__(other)

    def items(self) -> Sequence[Any]:
        return ()

    keys = values = items


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on work and size, and the functions that chat templates expect."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_shown,
            undefined=_Missing,
        )
        self.budget = _Budget()
        self.filters = {name: _measured(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.filters["format"] = _format
        self.filters["safe"] = str  # nothing here is HTML
        self.globals = {
            name: value
            for name, value in self.globals.items()
            if name in ("range", "dict", "namespace", "cycler", "joiner")
        }
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return tree

    @property
    def step_(self) -> None:
        """Count one step of the running template."""
        budget = self.budget
        budget.steps -= 1
        if budget.steps < 0 or (budget.steps & 0xFF == 0 and time.monotonic() > budget.deadline):
            raise _Exceeded("takes too many steps; it may never end")

    def items_(self, value: Any) -> Any:
        """What a loop goes over: nothing where it is None, say tools in a template made for them."""
        return () if value is None else value

    def concat_(self, *parts: Any) -> str:
        """The operator `~`."""
        texts = [str(_shown(part)) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step_  # noqa: B018
        _check_call(getattr(obj, "__name__", ""), (getattr(obj, "__self__", None), *args), kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                _check_length(len(left) + len(right))
            elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                _check_items(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str) and isinstance(other, int):
                    _check_length(len(one) * other)
                elif isinstance(one, (list, tuple)) and isinstance(other, int):
                    _check_items(len(one) * other)
        elif operator == "%" and isinstance(left, str):
            return _format(left, *(right if isinstance(right, tuple) else (right,)))
        if operator in ("*", "**"):
            if any(isinstance(number, int) and abs(number) > 1 << 64 for number in (left, right)):
                raise _Exceeded("computes with numbers that are too large")
            if operator == "**" and isinstance(right, (int, float)) and abs(right) > 64:
                raise _Exceeded("computes with numbers that are too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # The changes that templates do make to lists; messages and tools are copies.
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _check_fields(owner)
        return super().wrap_str_format(value)


class _Exceeded(jinja2.TemplateRuntimeError):
    """The template went over a limit."""


def _check_length(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise _Exceeded(f"makes a text of more than {MAX_CHARACTERS:,} characters")


def _check_items(items: int) -> None:
    if items > MAX_ITEMS:
        raise _Exceeded(f"makes a list of more than {MAX_ITEMS:,} items")


def _check_fields(format: str) -> None:
    if _WIDE_FIELD.search(format):
        raise _Exceeded("formats a field that is too wide")


def _check_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what makes much out of little: huge numbers, and the few functions that multiply lengths.

    `args` start with what the method or filter is applied to.
    """
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, int) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise _Exceeded(f"calls a function with {value:,}, more than the limit of {MAX_NUMBER:,}")
    subject = args[0] if args else None
    strings = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
    if name in ("replace", "do_replace") and isinstance(subject, str) and len(strings) > 1:
        _check_length(len(subject) + subject.count(strings[0]) * len(strings[1]))
    elif name == "do_indent" and isinstance(subject, str):
        widths = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, int)]
        _check_length(len(subject) + (subject.count("\n") + 1) * max([4, *widths, *map(len, strings)]))
    elif name in ("join", "sync_do_join", "do_join"):
        for value in args:
            if isinstance(value, (list, tuple)):
                longest = max(map(len, strings), default=0)
                longest = max(longest, len(subject) if isinstance(subject, str) else 0)
                _check_length(sum(len(x) if isinstance(x, str) else 1 for x in value) + longest * len(value))


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its arguments checked."""
    hidden = int(hasattr(function, "jinja_pass_arg"))  # whether jinja2 passes its environment or context first

    @wraps(function)  # keeps the marks by which jinja2 does so
    def measured(*args: Any, **kwargs: Any) -> Any:
        _check_call(function.__name__, args[hidden:], kwargs)
        return function(*args, **kwargs)

    return measured


def _shown(value: Any) -> Any:
    """`value`, provided that writing it out is no explosion: a list of lists of lists can be small and its text not."""
    if isinstance(value, (str, int, float)) or value is None:
        return value
    pending, items, characters = [value], 0, 0
    while pending:
        one = pending.pop()
        items += 1
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, Mapping):
            pending += one.keys()
            pending += one.values()
        elif isinstance(one, (list, tuple)):
            pending += one
        _check_items(items)
        _check_length(characters)
    return value


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_fields(str(text))
    formatted = str(text) % (kwargs or args)
    _check_length(len(formatted))
    return formatted


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's filter writes it: nothing escaped for HTML, which the filter of Jinja does."""
    if isinstance(value, Iterator):
        value = list(value)  # of a filter such as map
    if indent is not None and indent > 16:
        raise _Exceeded("indents JSON by more than 16")
    return json.dumps(
        _shown(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


_environment = _Environment()


def _compile(source: str, name: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"is {len(source):,} characters long; the limit is {MAX_SOURCE:,}", name=name)
    try:
        return _environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"is not valid Jinja: {error.message}; give another with --chat-template", name=name, line=error.lineno
        ) from error
    except RecursionError as error:
        raise TemplateError("is nested too deeply; give another with --chat-template", name=name) from error


def _render(
    template: jinja2.Template,
    values: dict[str, Any],
    name: str,
    steps: int = MAX_STEPS,
    seconds: float = MAX_SECONDS,
) -> str:
    budget = _environment.budget
    budget.steps = steps
    budget.deadline = time.monotonic() + seconds
    try:
        return "".join(_within(template.generate(values)))
    except Exception as error:  # a template is foreign code: whatever it raises is its fault
        line = _line(error, template)
        if isinstance(error, RecursionError):
            reason = "nests too deeply"
        elif isinstance(error, jinja2.TemplateError):
            reason = error.message or type(error).__name__
        else:
            reason = f"{type(error).__name__}: {error}"
        raise TemplateError(reason, name=name, line=line) from error


def _within(chunks: Iterator[str]) -> Iterator[str]:
    characters = 0
    for chunk in chunks:
        characters += len(chunk)
        _check_length(characters)
        yield chunk


def _line(error: Exception, template: jinja2.Template) -> int | None:
    """The template's line that failed; jinja2 rewrites tracebacks so that its frames show lines of the template."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == (template.filename or "<template>"):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
