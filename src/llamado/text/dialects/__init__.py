"""Formats in which model families write thoughts and tool calls."""

from llamado.text.dialects.dialect import (
    Content,
    ContinuedMessage,
    Conversation,
    Parser,
    Piece,
    PreparedChat,
    Reasoning,
    ToolCall,
)
from llamado.text.dialects.prepare import prepare, thinks

__all__ = [
    "Content",
    "ContinuedMessage",
    "Conversation",
    "Parser",
    "Piece",
    "PreparedChat",
    "Reasoning",
    "ToolCall",
    "prepare",
    "thinks",
]
