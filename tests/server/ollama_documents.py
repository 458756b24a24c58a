"""Requests and answers in Ollama's documents (docs/api.md, docs/openapi.yaml of ollama/ollama) and of Open WebUI.

Answers are given as keys with the types of their values; `Maybe` marks optional keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Maybe:
    """An optional key of an answer."""

    shape: Any


DURATIONS = {
    "total_duration": int,
    "load_duration": int,
    "prompt_eval_count": int,
    "prompt_eval_duration": int,
    "eval_count": int,
    "eval_duration": int,
}
HEAD = {"model": str, "created_at": str, "done": bool}
DETAILS = {
    "parent_model": str,
    "format": str,
    "family": str,
    "families": [str],
    "parameter_size": str,
    "quantization_level": str,
}
LOGPROB = {"token": str, "logprob": float, "bytes": [int]}
END = {**DURATIONS, "done_reason": str, "logprobs": Maybe([{**LOGPROB, "top_logprobs": Maybe([LOGPROB])}])}
CALL = {"function": {"name": str, "arguments": dict, "index": Maybe(int)}, "id": Maybe(str)}
MESSAGE = {"role": str, "content": str, "thinking": Maybe(str), "tool_calls": Maybe([CALL])}

GENERATE_PART = {**HEAD, "response": str, "thinking": Maybe(str)}
GENERATE_END = {**GENERATE_PART, **END, "context": Maybe([int])}
CHAT_PART = {**HEAD, "message": MESSAGE}
CHAT_END = {**CHAT_PART, **END}
LOADED = {**HEAD, "done_reason": str}
TAGS = {
    "models": [{"name": str, "model": str, "modified_at": str, "size": int, "digest": str, "details": DETAILS}],
}
PS = {
    "models": [
        {
            "name": str,
            "model": str,
            "size": int,
            "digest": str,
            "details": DETAILS,
            "expires_at": str,
            "size_vram": int,
            "context_length": int,
        }
    ]
}
SHOW = {
    "modelfile": str,
    "parameters": str,
    "template": str,
    "details": DETAILS,
    "model_info": dict,
    "capabilities": [str],
    "modified_at": str,
    "license": Maybe(str),
    "tensors": Maybe([{"name": str, "type": str, "shape": [int]}]),
}
EMBED = {
    "model": str,
    "embeddings": [[float]],
    "total_duration": int,
    "load_duration": int,
    "prompt_eval_count": int,
}
EMBEDDINGS = {"embedding": [float]}
STATUS = {"status": str, "digest": Maybe(str), "total": Maybe(int), "completed": Maybe(int)}
ERROR = {"error": str}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The location"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "format"],
        },
    },
}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
SKY = [{"role": "user", "content": "why is the sky blue?"}]
EVERY_OPTION = {
    "num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7,
    "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
    "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6, "penalize_newline": True, "stop": ["\n", "user:"],
    "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "low_vram": False,
    "vocab_only": False, "use_mmap": True, "use_mlock": False, "num_thread": 8,
}  # fmt: skip

# Documented requests: path, body, and the shapes of the answer's chunks and of its last chunk.
DOCUMENTED: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "generate": ("generate", {"prompt": "Why is the sky blue?"}, GENERATE_PART, GENERATE_END),
    "generate at once": ("generate", {"prompt": "Why?", "stream": False}, None, GENERATE_END),
    "generate with a suffix": (
        "generate",
        {"prompt": "def gcd(a, b):", "suffix": "    return result", "options": {"temperature": 0}, "stream": False},
        None,
        GENERATE_END,
    ),
    "generate to a schema": (
        "generate",
        {"prompt": "Respond using JSON", "stream": False, "format": AGE},
        None,
        GENERATE_END,
    ),
    "generate JSON": (
        "generate",
        {"prompt": "Respond using JSON", "format": "json", "stream": False},
        None,
        GENERATE_END,
    ),
    "generate raw": ("generate", {"prompt": "[INST] why? [/INST]", "raw": True, "stream": False}, None, GENERATE_END),
    "generate by a seed": ("generate", {"prompt": "Why?", "options": {"seed": 123}}, GENERATE_PART, GENERATE_END),
    "generate with every option": (
        "generate",
        {"prompt": "Why?", "stream": False, "options": EVERY_OPTION},
        None,
        GENERATE_END,
    ),
    "generate going on": ("generate", {"prompt": "And?", "context": [1, 2, 3], "stream": False}, None, GENERATE_END),
    "generate with logprobs": (
        "generate",
        {"prompt": "Why?", "logprobs": True, "top_logprobs": 2, "stream": False},
        None,
        GENERATE_END,
    ),
    "load by generate": ("generate", {}, None, {**LOADED, "response": str}),
    "chat": ("chat", {"messages": SKY}, CHAT_PART, CHAT_END),
    "chat at once": ("chat", {"messages": SKY, "stream": False}, None, CHAT_END),
    "chat to a schema": (
        "chat",
        {"messages": SKY, "stream": False, "format": AGE, "options": {"temperature": 0}},
        None,
        CHAT_END,
    ),
    "chat with history": (
        "chat",
        {"messages": [*SKY, {"role": "assistant", "content": "due to rayleigh scattering."}, *SKY]},
        CHAT_PART,
        CHAT_END,
    ),
    "chat by a seed": ("chat", {"messages": SKY, "options": {"seed": 101, "temperature": 0}}, CHAT_PART, CHAT_END),
    "chat with tools": ("chat", {"messages": SKY, "stream": False, "tools": [WEATHER]}, None, CHAT_END),
    "chat with tools, streamed": ("chat", {"messages": SKY, "tools": [WEATHER]}, CHAT_PART, CHAT_END),
    "chat after a tool": (
        "chat",
        {
            "messages": [
                {"role": "user", "content": "What is the weather in Toronto?"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "get_current_weather", "arguments": {"location": "Toronto"}}},
                    ],
                },
                {"role": "tool", "content": "11 degrees celsius", "tool_name": "get_current_weather"},
            ],
            "tools": [WEATHER],
            "stream": False,
        },
        None,
        CHAT_END,
    ),
    "chat with logprobs": (
        "chat",
        {"messages": SKY, "logprobs": True, "top_logprobs": 1},
        {**CHAT_PART, "logprobs": Maybe([{**LOGPROB, "top_logprobs": [LOGPROB]}])},
        CHAT_END,
    ),
    "load by chat": ("chat", {"messages": []}, None, {**LOADED, "message": {"role": str, "content": str}}),
}

# Requests of Open WebUI (backend/open_webui/routers/ollama.py): method, path, body, and the shape of the answer.
OPEN_WEBUI: dict[str, tuple[str, str, dict[str, Any] | None, Any]] = {
    "verify a connection": ("GET", "/api/version", None, {"version": str}),
    "list models": ("GET", "/api/tags", None, TAGS),
    "which are loaded": ("GET", "/api/ps", None, PS),
    "show": ("POST", "/api/show", {"model": "MODEL", "name": "MODEL"}, SHOW),
    "chat": (
        "POST",
        "/api/chat",
        {
            "model": "MODEL",
            "messages": [{"role": "user", "content": "Hi"}],
            "options": {"temperature": 0.7, "num_ctx": 4096, "num_predict": 8},
            "keep_alive": "5m",
            "stream": True,
        },
        CHAT_END,
    ),
    "a title": (
        "POST",
        "/api/chat",
        {
            "model": "MODEL",
            "messages": [{"role": "user", "content": "Name this chat."}],
            "options": {"num_predict": 8},
            "stream": False,
        },
        CHAT_END,
    ),
    "generate": (
        "POST",
        "/api/generate",
        {"model": "MODEL", "prompt": "Hi", "options": {"num_predict": 4}, "stream": False, "context": None},
        GENERATE_END,
    ),
}


def problems(value: Any, shape: Any, where: str = "answer") -> list[str]:
    """Return the places at which a value differs from the documented shape."""
    if isinstance(shape, Maybe):
        shape = shape.shape
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{where} is no object"]
        missing = [key for key, inner in shape.items() if key not in value and not isinstance(inner, Maybe)]
        unknown = value.keys() - shape.keys()
        wrong = [p for key in shape.keys() & value.keys() for p in problems(value[key], shape[key], f"{where}.{key}")]
        return [
            *(f"{where} has no {key}" for key in missing),
            *(f"{where}.{key} is unknown" for key in unknown),
            *wrong,
        ]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where} is no array"]
        return [p for i, item in enumerate(value) for p in problems(item, shape[0], f"{where}[{i}]")]
    kinds = (int, float) if shape is float else (shape,)
    fits = isinstance(value, kinds) and (shape is bool or not isinstance(value, bool))
    return [] if fits else [f"{where} is {value!r:.50}, not {shape.__name__}"]
