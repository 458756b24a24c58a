"""Chat bodies in OpenAI's form, read into a GenerationRequest (`oaicompat_chat_params_parse`, b11434)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llamado.media.markers import MarkerPart, joined
from llamado.server.errors import ApiError, invalid
from llamado.server.generate.constraints import OutputConstraints, ReasoningBudget, preserved_tokens
from llamado.server.generate.fields import read_fields
from llamado.server.generate.json_values import (
    MOST_ITEMS,
    check_length,
    flag,
    integer,
    json_text,
    mapping,
    text,
    type_name,
)
from llamado.server.generate.prompts import chat_in_context
from llamado.server.generate.request import GenerationRequest, make_request
from llamado.server.media.parts import ChatMedia
from llamado.server.model import ServedModel
from llamado.server.switches import Switches
from llamado.text.dialects import prepare
from llamado.text.dialects.dialect import Content, ContinuedMessage, Conversation, Piece, PreparedChat, StrictTools
from llamado.text.grammar.source import GrammarSource
from llamado.text.template.chat import ChatTemplate

ReasoningFormat = Literal["none", "auto", "deepseek", "deepseek-legacy"]

# Fields of a chat body that are read here; `read_fields` reads the others, as for `/completion`.
_CHAT_FIELDS = frozenset(
    {
        "messages", "prompt", "stop", "tools", "tool_choice", "parallel_tool_calls",
        "response_format", "json_schema", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens",
        "reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget_message", "reasoning_control",
        "reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags",
    }
)  # fmt: skip
# Template variables that `chat_template_kwargs` cannot set, because the body has fields for them.
_RESERVED = frozenset({"self", "messages", "add_generation_prompt", "tools"})
_PARTS = ("content", "reasoning_content")  # parts of a message that an answer can continue


class PlainParser:
    """An answer parser that returns all text as content (`--skip-chat-parsing`)."""

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self, cut: bool = False) -> list[Piece]:
        return []


def _check_parts(content: list[Any]) -> None:
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise invalid("unsupported content[].type")
        if not isinstance(part.get("text"), str):
            raise _unreadable("a text part needs a 'text' of type string")


def _unreadable(why: str) -> ApiError:
    return invalid(f"Failed to parse messages: {why}")


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or "type" not in call:
        raise _unreadable("Missing tool call type")
    if call["type"] != "function":
        raise _unreadable("Unsupported tool call type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise _unreadable("Missing tool call function")
    if not isinstance(function.get("name"), str):
        raise _unreadable("Missing tool call name")
    if "arguments" not in function:
        raise _unreadable("Missing tool call arguments")
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json_text(arguments)
    if call.get("id") is not None and not isinstance(call["id"], str):
        raise _unreadable("a tool call's 'id' must be a string")
    return {**call, "function": {**function, "arguments": arguments}}


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _unreadable(f"Expected 'message' to be an object, got {type_name(given)}")
    role = given.get("role")
    if not isinstance(role, str):
        raise _unreadable("Missing 'role' in message")
    content = given.get("content") or ""
    if isinstance(content, list) and any(isinstance(part, MarkerPart) for part in content):
        content = joined(content)
    message = {**given, "content": content}
    calls = given.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise _unreadable(f"Expected 'tool_calls' to be an array, got {type_name(calls)}")
        message["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        message.pop("tool_calls", None)
    for name in ("reasoning_content", "name", "tool_call_id"):
        if message.get(name) is None:
            message.pop(name, None)
        elif not isinstance(message[name], str):
            raise _unreadable(f"'{name}' must be a string")
    return message


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" not in body:
        raise invalid("'messages' is required")
    given = body["messages"]
    if not isinstance(given, list):
        raise invalid("Expected 'messages' to be an array")
    for message in given:
        fields = message if isinstance(message, dict) else {}
        if fields.get("role") == "assistant":
            if "content" not in fields and "tool_calls" not in fields:
                raise invalid("Assistant message must contain either 'content' or 'tool_calls'!")
        elif "content" not in fields:
            raise invalid("All non-assistant messages must contain 'content'")
        content = fields.get("content")
        if isinstance(content, list):
            _check_parts(content)
        elif content is not None and not isinstance(content, str):
            raise invalid("Expected 'content' to be a string or an array")
    return [_message(message) for message in given]


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools")
    if tools is None:
        return []
    why = "Failed to parse tools: "
    if not isinstance(tools, list):
        raise invalid(f"{why}Expected 'tools' to be an array, got {type_name(tools)}")
    for tool in tools:
        if not isinstance(tool, dict) or "type" not in tool:
            raise invalid(f"{why}Missing tool type")
        if tool["type"] != "function":
            raise invalid(f"{why}Unsupported tool type: {tool['type']}")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{why}Missing tool function")
        if not isinstance(function.get("name"), str):
            raise invalid(f"{why}key 'name' not found")
        if not isinstance(function.get("description", ""), (str, type(None))):
            raise invalid(f"{why}'description' must be a string")
    return tools


def _tool_choice(body: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return OpenAI's `tool_choice`, in any of its forms, as the dialects name it, and the tools that it allows."""
    choice = body.get("tool_choice")
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise invalid(f"Invalid tool_choice: {choice}")
        return choice, tools
    if not isinstance(choice, dict):
        return "auto", tools
    if choice.get("type") == "allowed_tools":
        allowed = mapping(choice, "allowed_tools") or choice
        given = allowed.get("tools")
        names = {_tool_name(tool) for tool in given} if isinstance(given, list) else set()
        mode = allowed.get("mode")
        return "required" if mode == "required" else "auto", [t for t in tools if t["function"]["name"] in names]
    name = _tool_name(choice)
    if not name:
        return "auto", tools
    if all(tool["function"]["name"] != name for tool in tools):
        raise invalid(f"Invalid tool_choice: there is no tool {name!r}")
    return f"function:{name}", tools


def _tool_name(value: Any) -> str:
    fields = value if isinstance(value, dict) else {}
    return text(mapping(fields, "function"), "name") or text(fields, "name")


def _content_constraint(body: Mapping[str, Any]) -> tuple[Mapping[str, Any] | bool | None, GrammarSource | None, str]:
    """Return the schema or the grammar of the content, and the field of the body that gave it."""
    schema, field = body.get("json_schema"), "json_schema"
    grammar = text(body, "grammar")
    if schema is not None and grammar:
        raise invalid("Cannot use both json_schema and grammar")
    form = mapping(body, "response_format")
    kind = text(form, "type")
    if kind == "json_object":
        if "schema" in form or not schema:
            schema, field = form.get("schema"), "response_format"
            schema = {} if schema is None else schema
    elif kind == "json_schema":
        # llama-server's README has the schema one level up from where OpenAI has it; both are accepted.
        schema, field = mapping(form, "json_schema").get("schema"), "response_format"
        if schema is None:
            schema = form.get("schema")
        schema = {} if schema is None else schema
    elif kind not in ("", "text"):
        raise invalid(f'response_format type must be one of "text" or "json_object", but got: {kind}')
    if schema == {}:
        schema = {"type": "object"}
    if schema is not None and not isinstance(schema, (Mapping, bool)):
        raise invalid(f"Field '{field}': a JSON schema must be an object, but is {type_name(schema)}")
    if schema is not None:
        return schema, None, field
    return None, GrammarSource("gbnf", grammar) if grammar else None, "grammar" if grammar else ""


def _template_options(body: Mapping[str, Any], switches: Switches) -> tuple[dict[str, Any], bool | None]:
    """Return the template's variables, and True or False to turn reasoning on or off (None: the template's default)."""
    options = dict(switches.chat_template_kwargs)
    if switches.reasoning_effort not in ("", "default", "none"):
        options["reasoning_effort"] = switches.reasoning_effort
    options |= mapping(body, "chat_template_kwargs")
    thinking: bool | None = {"on": True, "off": False}.get(switches.reasoning)
    if switches.reasoning_effort == "none":
        thinking = False
    enable_thinking = options.pop("enable_thinking", None)
    if isinstance(enable_thinking, bool):
        thinking = enable_thinking
    elif isinstance(enable_thinking, str):
        raise invalid('invalid type for "enable_thinking" (expected boolean, got string)')
    effort = text(body, "reasoning_effort")
    if effort == "none":
        thinking = False
        options.pop("reasoning_effort", None)
    elif effort:
        options["reasoning_effort"] = effort
    return {name: value for name, value in options.items() if name not in _RESERVED}, thinking


def _continued_message(
    body: Mapping[str, Any], messages: list[dict[str, Any]], switches: Switches
) -> tuple[ContinuedMessage | None, bool]:
    """Remove the message that the answer continues from the end of `messages`, and return it.

    The second value is True if the template opens an answer. A client asks for a continuation with
    `continue_final_message`, as in vLLM (true, or the name of the part to continue), or with a last message of the
    assistant.
    """
    generate = flag(body, "add_generation_prompt", True)
    wanted = body.get("continue_final_message")
    continued = wanted is True or wanted in _PARTS
    last = messages[-1] if messages else {}
    if not continued and switches.prefill_assistant and last.get("role") == "assistant":
        if len(messages) > 1 and messages[-2]["role"] == "assistant":
            raise invalid("Cannot have 2 or more assistant messages at the end of the list.")
        continued, generate = True, False
    if continued and generate:
        raise invalid("Cannot set both add_generation_prompt and continue_final_message to true.")
    if continued and last.get("role") == "assistant" and last.get("tool_calls"):
        raise invalid("Cannot continue an assistant message that contains tool calls.")
    if not continued or not messages:
        return None, generate
    messages.pop()
    if not any(last.get(name) for name in ("content", "reasoning_content", "tool_calls", "name", "tool_call_id")):
        return None, False  # as llama-server: the template opens no answer for an empty message
    return ContinuedMessage.of(last, wanted if isinstance(wanted, str) and wanted in _PARTS else None), True


def _conversation(
    body: Mapping[str, Any], switches: Switches, strict_tools: StrictTools | None
) -> tuple[Conversation, str]:
    """Return the conversation for the dialects, and the field of the body that constrains the content."""
    schema, grammar, field = _content_constraint(body)
    messages = _messages(body)
    tools = _tools(body)
    if not switches.jinja:
        if tools:
            raise invalid("tools param requires --jinja flag")
        if text(body, "tool_choice", "auto") != "auto":
            raise invalid("tool_choice param requires --jinja flag")
    choice, tools = _tool_choice(body, tools)
    if tools and choice != "none" and body.get("grammar") is not None:
        raise invalid("Cannot use custom grammar constraints with tools.")
    continued, generate = _continued_message(body, messages, switches)
    wanted = body.get("reasoning_format")
    reasoning: Any = switches.reasoning_format if wanted is None else wanted
    if reasoning not in ("none", "auto", "deepseek", "deepseek-legacy"):
        raise invalid(f"Unknown reasoning format: {reasoning}")
    template_options, thinking = _template_options(body, switches)
    pure = switches.skip_chat_parsing
    conversation = Conversation(
        messages=messages,
        tools=tools,
        strict_tools=strict_tools,
        tool_choice=choice,
        parallel_tool_calls=flag(body, "parallel_tool_calls", True) if "parallel_tool_calls" in body else None,
        json_schema=schema,
        grammar=grammar,
        add_generation_prompt=generate,
        continued=continued,
        reasoning_format="none" if pure else reasoning,
        enable_thinking=thinking,
        parse_tool_calls=not pure and flag(body, "parse_tool_calls", True),
        template_options=template_options,
    )
    return conversation, "" if tools and choice != "none" else field


def _answer_options(body: Mapping[str, Any], switches: Switches) -> tuple[int | None, list[str], int]:
    """Return `n_probs` (None: no log-probabilities), the stop strings and the reasoning budget, in tokens."""
    n_probs = None
    if flag(body, "logprobs"):
        n_probs = integer(body, "top_logprobs", 20)
    elif body.get("top_logprobs") is not None:
        raise invalid("top_logprobs requires logprobs to be set to true")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    check_length(MOST_ITEMS, stops, "stop")
    if any(not isinstance(word, str) for word in stops if word not in (None, [], {})):
        raise invalid("Field 'stop': type must be string")
    budget = integer(body, "reasoning_budget_tokens", integer(body, "thinking_budget_tokens", -1))
    if budget < -1 or budget >= 2**31:
        message = f"Value must be between -1 <= value <= {2**31 - 1}, but got {budget}"
        raise invalid(f"Field 'reasoning_budget_tokens': {message}")
    stops = [word for word in stops if isinstance(word, str) and word]
    return n_probs, stops, switches.reasoning_budget if budget == -1 else budget


def _prepare(conversation: Conversation, switches: Switches, template: ChatTemplate) -> PreparedChat:
    prepared = prepare(template, conversation)
    if switches.skip_chat_parsing:
        return dataclasses.replace(prepared, parser=PlainParser, grammar=None, triggers=(), thinking=None)
    return prepared


def _constraints(
    body: Mapping[str, Any], prepared: PreparedChat, field: str, budget: int, served: ServedModel, switches: Switches
) -> OutputConstraints:
    reasoning = None
    # Reasoning comes before the text that a grammar constrains, unless the prompt has closed it.
    thinks = prepared.thinking is not None and prepared.thinking[1] not in prepared.generation_prompt
    wanted = prepared.grammar is not None or budget >= 0 or flag(body, "reasoning_control")
    if prepared.thinking and thinks and wanted:
        reasoning = ReasoningBudget(
            start=prepared.thinking[0],
            end=prepared.thinking[1],
            open=prepared.thinking_open,
            budget=budget,
            message=text(body, "reasoning_budget_message", switches.reasoning_budget_message),
        )
    return OutputConstraints(
        source=prepared.grammar,
        field=field,
        optional=not prepared.strict,
        lazy=bool(prepared.triggers),
        triggers=prepared.triggers,
        preserved=preserved_tokens(list(prepared.preserved), served.tokenizer),
        reasoning=reasoning,
    )


def read_chat(
    body: Mapping[str, Any],
    served: ServedModel,
    switches: Switches,
    prefix: Sequence[int] = (),
    strict_tools: StrictTools | None = None,
    media: ChatMedia | None = None,
) -> GenerationRequest:
    """Check a chat body, render its prompt, and choose the parser of its answer.

    `prefix`: tokens in front of the prompt; `strict_tools`: see Conversation; `media`: what `take_media` took out of
    the body, loaded. Raises LlamadoError.
    """
    conversation, field = _conversation(body, switches, strict_tools)
    n_probs, stops, budget = _answer_options(body, switches)
    prepared = _prepare(conversation, switches, served.template)
    plain = {name: value for name, value in body.items() if name not in _CHAT_FIELDS}
    if n_probs is not None:
        plain["n_probs"] = n_probs
    given = read_fields(plain, served.tokenizer, served.n_slots)
    if all_stops := [*stops, *(stop for stop in prepared.stops if stop not in stops)]:
        given["stop"] = all_stops if stops else [*served.defaults.stop, *all_stops]
    return make_request(
        given,
        [chat_in_context(prepared.prompt, served, prefix, media)],
        served,
        switches,
        constraints=_constraints(body, prepared, field, budget, served, switches),
        show_prompts=given.get("verbose", switches.verbose),
        prepared=prepared,
        reasoning_format=conversation.reasoning_format,
        client_stops=stops,
        control=flag(body, "reasoning_control"),
    )


def chat_prompt(
    body: Mapping[str, Any], served: ServedModel, switches: Switches, strict_tools: StrictTools | None = None
) -> str:
    """Return the prompt of a chat body as text, with the checks of `read_chat`. Raises LlamadoError."""
    conversation, _ = _conversation(body, switches, strict_tools)
    _answer_options(body, switches)
    return _prepare(conversation, switches, served.template).prompt
