"""A conversation: its messages and settings, and the file format of /save and /load."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamado.commands.chat.attachments import Part
from llamado.commands.chat.backend import AnswerStats, Message
from llamado.engine.parameters import PARAMETERS, Parameter
from llamado.engine.request import Defaults
from llamado.engine.sampling.params import sampler_names
from llamado.errors import LlamadoError

_MEDIA_PARTS = ("image_url", "input_audio")
_ROLES = ("system", "user", "assistant")
_TYPES = ("boolean", "integer", "number", "seed", "texts", "samplers")
_SWITCHES = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}

SETTABLE: Mapping[str, Parameter] = {
    row.name: row for row in PARAMETERS if row.flags and not row.served and row.type in _TYPES
}
"""Parameters for `/set`: those with a flag and a value that fits in a line."""


class ChatError(LlamadoError):
    """A chat command failed: bad value, or a file without a conversation."""


@dataclass
class Chat:
    """Messages of a conversation without the system message, and its settings."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Changed request parameters by name."""
    answers: list[AnswerStats] = field(default_factory=list)

    def with_question(self, content: str | list[Part]) -> list[Message]:
        """Return all messages and a new question: a text, or content parts."""
        return [*self.all_messages(), {"role": "user", "content": content}]

    def all_messages(self) -> list[Message]:
        """Return all messages, starting with the system message."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def add_turn(self, question: str | list[Part], answer: str, reasoning: str) -> None:
        """Append a question and its answer, which may be incomplete."""
        message = {"role": "assistant", "content": answer}
        if reasoning:
            message["reasoning_content"] = reasoning
        self.messages = [*self.messages, {"role": "user", "content": question}, message]

    def last_question(self) -> tuple[list[Message], str | list[Part]]:
        """Return the messages before the last question, and the question. Raises ChatError."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                return self.messages[:at], self.messages[at]["content"]
        raise ChatError("there is no answer yet to generate again")

    def set(self, name: str, text: str) -> None:
        """Set a parameter from a text; "default" resets it. Raises ChatError."""
        row = settable(name)
        if text == "default" or (row.type == "seed" and text == "-1"):
            self.settings.pop(row.name, None)
            return
        try:
            value = _value(row, text)
            Defaults().params(**{row.name: value})
        except ValueError:
            raise ChatError(f"{row.name}: expected {_FORMS.get(row.type, row.type)}, got {text!r}") from None
        except LlamadoError as error:
            raise ChatError(str(error)) from None
        self.settings[row.name] = value

    def save(self, path: Path, model: str) -> None:
        """Write the conversation. Raises ChatError."""
        kept = {"model": model, "system": self.system, "settings": self.settings, "messages": self.messages}
        try:
            path.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ChatError(f"{path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replace this conversation by a saved one. On ChatError nothing changes."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            system, messages = str(kept.get("system") or ""), [_checked(one) for one in kept["messages"]]
            settings = {name: value for name, value in kept.get("settings", {}).items() if name in SETTABLE}
            Defaults().params(**settings)
        except OSError as error:
            raise ChatError(f"{path}: {error.strerror}") from None
        except LlamadoError as error:
            raise ChatError(f"{path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ChatError(f"{path} is not a conversation written by /save") from None
        self.system, self.messages, self.settings = system, messages, settings


def settable(name: str) -> Parameter:
    """Find a parameter by its name, flag (temp) or request field (max_tokens, num_predict). Raises ChatError."""
    name = name.lstrip("-").replace("-", "_")
    if name in SETTABLE:
        return SETTABLE[name]
    flag = ("-" if len(name) == 1 else "--") + name.replace("_", "-")
    for row in SETTABLE.values():
        if flag in row.flags.split() or name in (row.ollama, *row.names):
            return row
    near = difflib.get_close_matches(name, SETTABLE, n=1)
    hint = f": did you mean {near[0]}?" if near else ";"
    raise ChatError(f"there is no parameter {name}{hint} /set lists all")


_FORMS = {"boolean": "on or off", "integer": "a whole number", "number": "a number"}


def _value(row: Parameter, text: str) -> Any:
    """Parse a value. Raises ValueError."""
    if row.type == "boolean":
        if text not in _SWITCHES:
            raise ValueError
        return _SWITCHES[text]
    if row.type == "integer":
        return int(text)
    if row.type == "number":
        return float(text)
    if row.type == "texts":
        return [text]
    if row.type == "samplers":
        return list(sampler_names([name for name in text.split(";") if name]))
    try:
        return int(text)
    except ValueError:
        return text  # a seed may be a text


def _checked(message: Any) -> Message:
    role, content = message["role"], message["content"]
    if role not in _ROLES or not (isinstance(content, str) or _are_parts(content)):
        raise ValueError
    kept = {"role": role, "content": content}
    if message.get("reasoning_content"):
        kept["reasoning_content"] = str(message["reasoning_content"])
    return kept


def _are_parts(content: Any) -> bool:
    """Return True for content parts as /save writes them."""
    return isinstance(content, list) and all(
        isinstance(part, dict)
        and (isinstance(part.get("text"), str) if part.get("type") == "text" else part.get("type") in _MEDIA_PARTS)
        for part in content
    )
