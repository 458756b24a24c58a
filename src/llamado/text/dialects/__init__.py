"""How families of models write thoughts and tool calls."""
