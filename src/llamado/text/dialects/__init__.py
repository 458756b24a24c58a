"""How families of models write thoughts and tool calls."""

from llamado.text.dialects.dialect import ChatRequest, Content, Parser, Piece, Prepared, Reasoning, ToolCall
from llamado.text.dialects.prepare import prepare

__all__ = ["ChatRequest", "Content", "Parser", "Piece", "Prepared", "Reasoning", "ToolCall", "prepare"]
