"""How families of models write thoughts and tool calls."""

from llamado.text.dialects.dialect import ChatRequest, Content, Continued, Parser, Piece, Prepared, Reasoning, ToolCall
from llamado.text.dialects.prepare import prepare

__all__ = ["ChatRequest", "Content", "Continued", "Parser", "Piece", "Prepared", "Reasoning", "ToolCall", "prepare"]
