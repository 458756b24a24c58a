"""Chat messages in OpenAI's form → a prompt and `/completion` options (`oaicompat_chat_params_parse`, b11434)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamado.server.errors import invalid, not_supported
from llamado.server.served import Template


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation and the request's options under `/completion`'s names."""

    prompt: str
    options: dict[str, Any]
    prefill: str
    """The beginning of the answer that the client gave; it is the end of the prompt too."""


def _text_content(content: Any) -> str | None:
    """A message's content as one text: parts of type text are joined by new lines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("Expected 'content' to be a string or an array")
    parts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "input_video", "video_url"):
            name = {"image_url": "image", "input_audio": "audio"}.get(kind, "video")
            raise invalid(f"{name} input is not supported by this model")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise invalid("unsupported content[].type")
        parts.append(part["text"])
    return "\n".join(parts)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" not in body:
        raise invalid("'messages' is required")
    given = body["messages"]
    if not isinstance(given, list):
        raise invalid("Expected 'messages' to be an array")
    messages: list[dict[str, Any]] = []
    for message in given:
        if not isinstance(message, dict):
            raise invalid("All non-assistant messages must contain 'content'")
        role = message.get("role")
        if role == "assistant":
            if "content" not in message and "tool_calls" not in message:
                raise invalid("Assistant message must contain either 'content' or 'tool_calls'!")
        elif "content" not in message:
            raise invalid("All non-assistant messages must contain 'content'")
        if not isinstance(role, str):
            raise invalid("Failed to parse messages: Missing 'role' in message")
        messages.append({**message, "content": _text_content(message.get("content")) or ""})
    return messages


def _refuse_missing_features(body: Mapping[str, Any]) -> None:
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise invalid(f"Invalid tool_choice: {choice}")
    if body.get("tools") and choice != "none":
        raise not_supported("Field 'tools': tool calls are not supported yet")
    form = body.get("response_format")
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in ("json_object", "json_schema"):
        raise not_supported(f"Field 'response_format': {kind} is not supported yet")
    if isinstance(kind, str) and kind not in ("", "text"):
        raise invalid(f'response_format type must be one of "text" or "json_object", but got: {kind}')


def render_chat(
    body: Mapping[str, Any],
    template: Template,
    *,
    prefill_assistant: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Check a chat body and render its prompt; a last message of the assistant is continued.

    Raises ApiError, TemplateError.
    """
    _refuse_missing_features(body)
    messages = _messages(body)
    options = {k: v for k, v in body.items() if k not in ("messages", "prompt")}
    if body.get("logprobs") is True:
        top = body.get("top_logprobs")
        options["n_probs"] = top if isinstance(top, int) and not isinstance(top, bool) else 20
    elif body.get("top_logprobs") is not None:
        raise invalid("top_logprobs requires logprobs to be set to true")

    extra: dict[str, Any] = dict(kwargs or {})
    if isinstance(body.get("chat_template_kwargs"), dict):
        extra |= body["chat_template_kwargs"]
    if isinstance(body.get("reasoning_effort"), str):
        extra["reasoning_effort"] = body["reasoning_effort"]
    for reserved in ("self", "messages", "add_generation_prompt"):
        extra.pop(reserved, None)

    generate = body.get("add_generation_prompt")
    generate = generate if isinstance(generate, bool) else True
    prefill = ""
    if prefill_assistant and messages and messages[-1]["role"] == "assistant":
        if len(messages) > 1 and messages[-2]["role"] == "assistant":
            raise invalid("Cannot have 2 or more assistant messages at the end of the list.")
        if messages[-1].get("tool_calls"):
            raise invalid("Cannot continue an assistant message that contains tool calls.")
        prefill = messages.pop()["content"]
        generate = True
    prompt = template.render(messages, add_generation_prompt=generate, **extra)
    return ChatPrompt(prompt + prefill, options, prefill)
