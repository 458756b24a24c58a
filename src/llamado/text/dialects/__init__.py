"""Formats in which model families write thoughts and tool calls."""

from llamado.text.dialects.dialect import Content, Continued, Conversation, Parser, Piece, Prepared, Reasoning, ToolCall
from llamado.text.dialects.prepare import prepare, thinks

__all__ = [
    "Content",
    "Continued",
    "Conversation",
    "Parser",
    "Piece",
    "Prepared",
    "Reasoning",
    "ToolCall",
    "prepare",
    "thinks",
]
