"""OpenAPI descriptions of the bodies and answers of endpoints, as tables.

Objects may have more fields than the tables name; required fields are always present.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamado.engine.parameters import PARAMETERS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _record(required: Mapping[str, Schema], **more: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **more}}


# Bodies

# JSON schema of each type of parameter that is not a JSON type.
_FORMS: dict[str, Schema] = {
    "seed": {"type": ["integer", "string", "null"]},
    "texts": {"type": ["string", "array", "null"], "items": _TEXT},
    "tokens": {"type": ["array", "null"], "items": _TEXT},
    "biases": {"type": ["array", "object", "null"]},
    "samplers": {"type": ["array", "string", "null"], "items": _TEXT},
    "breakers": {"type": ["array", "null"], "items": _TEXT, "minItems": 1},
    "text": {"type": ["string", "null"]},
    "schema": {},
    "triggers": _maybe(
        _list(_record({"type": {"type": "integer", "minimum": 0, "maximum": 3}, "value": _TEXT}, token=_WHOLE))
    ),
    "scales": _maybe(_list(_record({"id": _WHOLE, "scale": _NUMBER}))),
    "stream_options": _maybe(_record({}, include_usage=_FLAG)),
    "fields": {"type": ["array", "null"], "items": _TEXT},
    "slot": {"type": ["integer", "null"]},
}
_OPTIONS: dict[str, Schema] = {
    name: {**_FORMS.get(row.type, {"type": [row.type, "null"]}), "description": row.form or row.help}
    for row in PARAMETERS
    for name in row.names
}
_PROMPT: Schema = {
    "anyOf": [_TEXT, _list({"anyOf": [_TEXT, _WHOLE, _list({"anyOf": [_TEXT, _WHOLE]})]}), _OBJECT],
    "description": "text, tokens, both mixed, an object with `prompt_string`, or a list of these",
}
_PART = {
    "anyOf": [
        _record({"type": {"const": "text"}, "text": _TEXT}),
        _record({"type": _one_of("image_url", "input_audio", "input_video")}),
    ]
}
_TOOL_CALL = _record({"type": {"const": "function"}, "function": _record({"name": _TEXT, "arguments": {}})}, id=_TEXT)
_MESSAGE = _record(
    {"role": _TEXT},
    content={"anyOf": [_TEXT, _list(_PART), {"type": "null"}]},
    reasoning_content=_maybe(_TEXT),
    tool_calls=_maybe(_list(_TOOL_CALL)),
    tool_call_id=_maybe(_TEXT),
    name=_maybe(_TEXT),
)
_FUNCTION = _record({"name": _TEXT}, description=_TEXT, parameters=_OBJECT)
_RESPONSE_FORMAT = _record(
    {"type": _one_of("text", "json_object", "json_schema")},
    schema=_OBJECT,
    json_schema=_record({}, name=_TEXT, schema=_OBJECT, strict=_FLAG),
)
_CHAT: dict[str, Schema] = {
    **{name: schema for name, schema in _OPTIONS.items() if name != "logprobs"},
    "logprobs": {"type": ["boolean", "null"]},
    "top_logprobs": {"type": ["integer", "null"]},
    "model": _TEXT,
    "tools": _maybe(_list(_record({"type": {"const": "function"}, "function": _FUNCTION}))),
    "tool_choice": {"anyOf": [_one_of("auto", "none", "required"), _OBJECT, {"type": "null"}]},
    "parallel_tool_calls": {"type": ["boolean", "null"]},
    "response_format": _maybe(_RESPONSE_FORMAT),
    "reasoning_effort": {"type": ["string", "null"]},
    "reasoning_format": {"enum": ["none", "auto", "deepseek", "deepseek-legacy", None]},
    "reasoning_control": {"type": ["boolean", "null"]},
    "reasoning_budget_tokens": {"type": ["integer", "null"], "minimum": -1},
    "chat_template_kwargs": _maybe(_OBJECT),
    "add_generation_prompt": {"type": ["boolean", "null"]},
    "continue_final_message": {"type": ["boolean", "string", "null"]},
    "parse_tool_calls": {"type": ["boolean", "null"]},
}
_MESSAGES_BODY = _record({"messages": _list(_MESSAGE)}, **_CHAT)
_RESPONSES_BODY = _record(
    {"input": {"anyOf": [_TEXT, _list(_OBJECT)]}},
    model=_TEXT,
    instructions=_maybe(_TEXT),
    max_output_tokens=_maybe(_WHOLE),
    tools=_maybe(_list(_record({"type": _TEXT}))),
    tool_choice={"anyOf": [_one_of("auto", "none", "required"), _OBJECT]},
    text=_record({}, format=_OBJECT),
    reasoning=_maybe(_record({}, effort=_maybe(_TEXT))),
    previous_response_id={"type": "null"},
    stream=_maybe(_FLAG),
    temperature=_maybe(_NUMBER),
    top_p=_maybe(_NUMBER),
)
_ANTHROPIC_BODY = _record(
    {"messages": _list(_record({"role": _TEXT, "content": {"anyOf": [_TEXT, _list(_record({"type": _TEXT}))]}}))},
    model=_TEXT,
    max_tokens=_WHOLE,
    system={"anyOf": [_TEXT, _list(_record({"type": _TEXT}))]},
    tools=_list(_record({"name": _TEXT, "input_schema": _OBJECT}, description=_TEXT)),
    tool_choice=_record({"type": _one_of("auto", "any", "tool", "none")}, name=_TEXT),
    stop_sequences=_list(_TEXT),
    thinking=_record({"type": _one_of("enabled", "disabled", "adaptive")}, budget_tokens=_WHOLE),
    metadata=_OBJECT,
    stream=_FLAG,
    temperature=_NUMBER,
    top_p=_NUMBER,
    top_k=_WHOLE,
)

# Answers

ERROR = _record({"error": _record({"code": _WHOLE, "message": _TEXT, "type": _TEXT})})
_ANTHROPIC_ERROR = _record({"type": {"const": "error"}, "error": _record({"type": _TEXT, "message": _TEXT})})
_TIMINGS = _record(
    {
        "cache_n": _WHOLE,
        "prompt_n": _WHOLE,
        "prompt_ms": _NUMBER,
        "prompt_per_token_ms": _NUMBER,
        "prompt_per_second": _NUMBER,
        "predicted_n": _WHOLE,
        "predicted_ms": _NUMBER,
        "predicted_per_token_ms": _NUMBER,
        "predicted_per_second": _NUMBER,
    },
    draft_n=_WHOLE,
    draft_n_accepted=_WHOLE,
)
_PROBABILITY = _record({"id": _WHOLE, "token": _TEXT, "bytes": _list(_WHOLE)}, logprob=_maybe(_NUMBER), prob=_NUMBER)
_NATIVE = _record(
    {
        "index": _WHOLE,
        "content": _TEXT,
        "tokens": _list(_WHOLE),
        "id_slot": _WHOLE,
        "stop": _FLAG,
        "model": _TEXT,
        "tokens_predicted": _WHOLE,
        "tokens_evaluated": _WHOLE,
        "generation_settings": _OBJECT,
        "prompt": _TEXT,
        "has_new_line": _FLAG,
        "truncated": _FLAG,
        "stop_type": _one_of("none", "eos", "limit", "word"),
        "stopping_word": _TEXT,
        "tokens_cached": _WHOLE,
        "timings": _TIMINGS,
    },
    completion_probabilities=_list(_PROBABILITY),
)
_USAGE = _record(
    {
        "completion_tokens": _WHOLE,
        "prompt_tokens": _WHOLE,
        "total_tokens": _WHOLE,
        "prompt_tokens_details": _record({"cached_tokens": _WHOLE}),
    }
)
_LOGPROBS = _maybe(
    _record(
        {"content": _list(_PROBABILITY)},
        tokens=_list(_TEXT),
        token_logprobs=_list(_maybe(_NUMBER)),
        top_logprobs=_list(_maybe(_OBJECT)),
        text_offset=_list(_WHOLE),
    )
)


def _openai(object: str, choice: Schema) -> Schema:
    return _record(
        {
            "id": _TEXT,
            "object": {"const": object},
            "created": _WHOLE,
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
            "timings": _TIMINGS,
        }
    )


_ASSISTANT_MESSAGE = _record(
    {"role": {"const": "assistant"}, "content": _TEXT},
    reasoning_content=_TEXT,
    tool_calls=_list(
        _record(
            {
                "type": {"const": "function"},
                "id": _TEXT,
                "function": _record({"name": _TEXT, "arguments": _TEXT}),
            }
        )
    ),
)
_REASON = _one_of("stop", "length", "tool_calls")
_RESPONSE = _record(
    {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _WHOLE,
        "completed_at": _WHOLE,
        "status": _one_of("completed", "incomplete"),
        "model": _TEXT,
        "output": _list(
            _record({"id": _TEXT, "type": _one_of("message", "reasoning", "function_call"), "status": _TEXT})
        ),
        "usage": _record({"input_tokens": _WHOLE, "output_tokens": _WHOLE, "total_tokens": _WHOLE}),
    }
)
_ANTHROPIC = _record(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": _list(_record({"type": _one_of("text", "thinking", "tool_use")})),
        "model": _TEXT,
        "stop_reason": _one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": _maybe(_TEXT),
        "usage": _record({"input_tokens": _WHOLE, "cache_read_input_tokens": _WHOLE, "output_tokens": _WHOLE}),
    }
)
_EVENT = _record({"data": _TEXT}, event=_TEXT)
"""One event of a stream. `data` is JSON or `[DONE]`."""
_COUNT = _record({"input_tokens": _WHOLE})
_OPENAI_COUNT = _record({"input_tokens": _WHOLE, "object": {"const": "response.input_tokens"}})
_PIECE = _record({"id": _WHOLE, "piece": {"anyOf": [_TEXT, _list(_WHOLE)]}})
# No field is required: `response_fields` may leave out any of them.
_NATIVE_ANSWER: Schema = {"anyOf": [_NATIVE, _list({"anyOf": [_NATIVE, _OBJECT]}), _OBJECT]}
_INFILL_BODY = _record(
    {"input_prefix": _TEXT, "input_suffix": _TEXT},
    **_OPTIONS,
    input_extra=_list(_record({"text": _TEXT}, filename=_TEXT)),
    prompt=_TEXT,
)

# Ollama's
_OLLAMA_ERROR = _record({"error": _TEXT})
_KEEP_ALIVE = {"type": ["string", "number", "null"], "description": "seconds, or a duration such as 5m"}
_OLLAMA_OPTIONS = _maybe(
    _record(
        {},
        **{
            row.ollama: {**_FORMS.get(row.type, {"type": [row.type, "null"]}), "description": row.form or row.help}
            for row in PARAMETERS
            if row.ollama
        },
    )
)
_OLLAMA_FIELDS: dict[str, Schema] = {
    "options": _OLLAMA_OPTIONS,
    "format": {"anyOf": [{"enum": ["", "json", None]}, _OBJECT]},
    "stream": _maybe(_FLAG),
    "think": {"enum": [True, False, "low", "medium", "high", "max", None]},
    "keep_alive": _KEEP_ALIVE,
    "logprobs": _maybe(_FLAG),
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
}
_OLLAMA_CALL = _record({"function": _record({"name": _TEXT, "arguments": _OBJECT})}, id=_TEXT)
_OLLAMA_MESSAGE = _record(
    {"role": _TEXT},
    content=_maybe(_TEXT),
    thinking=_TEXT,
    tool_calls=_list(_OLLAMA_CALL),
    tool_name=_TEXT,
    images=_list(_TEXT),
)
_OLLAMA_END: dict[str, Schema] = {
    "done_reason": _one_of("stop", "length", "load", "unload"),
    "total_duration": _WHOLE,
    "load_duration": _WHOLE,
    "prompt_eval_count": _WHOLE,
    "prompt_eval_duration": _WHOLE,
    "eval_count": _WHOLE,
    "eval_duration": _WHOLE,
    "logprobs": _list(_record({"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_WHOLE)})),
}
_OLLAMA_HEAD: dict[str, Schema] = {"model": _TEXT, "created_at": _TEXT, "done": _FLAG}
_DETAILS = _record(
    {
        "parent_model": _TEXT,
        "format": _TEXT,
        "family": _TEXT,
        "families": _list(_TEXT),
        "parameter_size": _TEXT,
        "quantization_level": _TEXT,
    }
)
_OLLAMA_MODEL: dict[str, Schema] = {
    "name": _TEXT, "model": _TEXT, "size": _WHOLE, "digest": _TEXT, "details": _DETAILS,
}  # fmt: skip
_OLLAMA_NAMED = _record({"model": _TEXT})

# By endpoint: the schema of its body (None: no body) and of its answer, and True if it may stream the answer.
_ENDPOINTS: dict[str, tuple[Schema | None, Schema, bool]] = {
    "completion": (_record({"prompt": _PROMPT}, **_OPTIONS), _NATIVE_ANSWER, True),
    "infill": (_INFILL_BODY, _NATIVE_ANSWER, True),
    "openai_completion": (
        _record({"prompt": _PROMPT}, **_OPTIONS, model=_TEXT),
        _openai(
            "text_completion",
            _record({"text": _TEXT, "index": _WHOLE, "logprobs": _LOGPROBS, "finish_reason": _REASON}),
        ),
        True,
    ),
    "chat": (
        _MESSAGES_BODY,
        _openai(
            "chat.completion",
            _record({"index": _WHOLE, "message": _ASSISTANT_MESSAGE, "finish_reason": _REASON}, logprobs=_LOGPROBS),
        ),
        True,
    ),
    "control": (
        _record({"id": _TEXT, "action": {"const": "reasoning_end"}}, model=_TEXT),
        _record({"success": _FLAG}, message=_TEXT),
        False,
    ),
    "chat_count": (_MESSAGES_BODY, _OPENAI_COUNT, False),
    "apply_template": (_MESSAGES_BODY, _record({"prompt": _TEXT}), False),
    "responses": (_RESPONSES_BODY, _RESPONSE, True),
    "responses_count": (_RESPONSES_BODY, _OPENAI_COUNT, False),
    "messages": (_ANTHROPIC_BODY, _ANTHROPIC, True),
    "messages_count": (_ANTHROPIC_BODY, _COUNT, False),
    "tokenize": (
        _record(
            {},
            content={"anyOf": [_TEXT, _list({"anyOf": [_TEXT, _WHOLE]})]},
            add_special=_FLAG,
            parse_special=_FLAG,
            with_pieces=_FLAG,
        ),
        _record({"tokens": _list({"anyOf": [_WHOLE, _PIECE]})}),
        False,
    ),
    "ollama_chat": (
        _record({"model": _TEXT}, messages=_list(_OLLAMA_MESSAGE), tools=_CHAT["tools"], **_OLLAMA_FIELDS),
        _record({**_OLLAMA_HEAD, "message": _OLLAMA_MESSAGE}, **_OLLAMA_END),
        True,
    ),
    "ollama_generate": (
        _record(
            {"model": _TEXT},
            prompt=_TEXT,
            suffix=_TEXT,
            system=_TEXT,
            template=_TEXT,
            raw=_FLAG,
            context=_maybe(_list(_WHOLE)),
            images=_maybe(_list(_TEXT)),
            **_OLLAMA_FIELDS,
        ),
        _record({**_OLLAMA_HEAD, "response": _TEXT}, thinking=_TEXT, context=_list(_WHOLE), **_OLLAMA_END),
        True,
    ),
    "ollama_embed": (
        _record(
            {"model": _TEXT, "input": {"anyOf": [_TEXT, _list(_TEXT)]}},
            truncate=_FLAG,
            dimensions=_WHOLE,
            options=_OLLAMA_OPTIONS,
            keep_alive=_KEEP_ALIVE,
        ),
        _record(
            {"model": _TEXT, "embeddings": _list(_list(_NUMBER))},
            total_duration=_WHOLE,
            load_duration=_WHOLE,
            prompt_eval_count=_WHOLE,
        ),
        False,
    ),
    "ollama_embeddings": (
        _record({"model": _TEXT}, prompt=_TEXT, options=_OLLAMA_OPTIONS, keep_alive=_KEEP_ALIVE),
        _record({"embedding": _list(_NUMBER)}),
        False,
    ),
    "ollama_show": (
        _record({"model": _TEXT}, verbose=_FLAG),
        _record(
            {
                "modelfile": _TEXT,
                "parameters": _TEXT,
                "template": _TEXT,
                "details": _DETAILS,
                "model_info": _OBJECT,
                "capabilities": _list(_TEXT),
                "modified_at": _TEXT,
            },
            license=_TEXT,
            tensors=_list(_OBJECT),
        ),
        False,
    ),
    "ollama_tags": (None, _record({"models": _list(_record({**_OLLAMA_MODEL, "modified_at": _TEXT}))}), False),
    "ollama_ps": (
        None,
        _record(
            {
                "models": _list(
                    _record({**_OLLAMA_MODEL, "expires_at": _TEXT, "size_vram": _WHOLE, "context_length": _WHOLE})
                )
            }
        ),
        False,
    ),
    "ollama_version": (None, _record({"version": _TEXT}), False),
    "ollama_change": (_OLLAMA_NAMED, _record({"status": _TEXT}), False),
    "detokenize": (_record({}, tokens=_list(_WHOLE)), _record({"content": _TEXT}), False),
}
_FAILURES = {
    400: "the request is invalid or too long",
    401: "the key is missing or wrong",
    413: "the body is too large",
    500: "internal error",
    501: "not supported by the model or the server",
    503: "unavailable: loading, overloaded, or without a worker",
}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def describe(name: str) -> dict[str, Any]:
    """Return the keyword arguments of `Routes.add` that describe an endpoint's body and answers."""
    body, answer, streams = _ENDPOINTS[name]
    ollama = name.startswith("ollama")
    stream = {"application/x-ndjson": {"schema": _OBJECT}} if ollama else {"text/event-stream": {"schema": _EVENT}}
    content = _json(answer) | (stream if streams else {})
    error = _ANTHROPIC_ERROR if name.startswith("messages") else _OLLAMA_ERROR if ollama else ERROR
    responses: dict[int, Any] = {200: {"description": "the answer", "content": content}}
    responses |= {status: {"description": why, "content": _json(error)} for status, why in _FAILURES.items()}
    described: dict[str, Any] = {"responses": responses}
    if body is not None:
        described["operation"] = {"requestBody": {"required": True, "content": _json(body)}}
    return described
