"""Requests of hostile clients: damaged bodies, long texts, deep JSON, schemas and grammars that take unbounded time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

PATHS = [
    "/health", "/v1/health", "/models", "/v1/models", "/props", "/slots", "/metrics", "/lora-adapters", "/openapi.json",
]  # fmt: skip
_CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Hi", "n_predict": 2, "stop": ["x"], "logit_bias": [[1, 2.5], ["a", False]], "seed": 1}),
    ("/completion", {"prompt": [1, "a", 2], "n_predict": 1, "samplers": ["top_k"], "n_probs": 2, "stream": True}),
    ("/completions", {"prompt": ["a", {"prompt_string": "b"}], "n_predict": 1, "response_fields": ["content"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "logprobs": 2, "n": 2, "echo": True}),
    ("/v1/chat/completions", {"messages": _CHAT, "max_tokens": 2, "tools": [_TOOL], "tool_choice": "auto"}),
    ("/v1/chat/completions", {"messages": _CHAT, "max_tokens": 2, "stream": True, "response_format": {"type": "text"}}),
    ("/v1/chat/completions/input_tokens", {"messages": _CHAT}),
    ("/v1/chat/completions/control", {"id": "x", "action": "reasoning_end"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 2, "instructions": "y"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "system": "y", "stream": True}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    ("/apply-template", {"messages": _CHAT, "chat_template_kwargs": {"a": 1}}),
    ("/tokenize", {"content": ["Hello wörld", 5], "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}]}),
    ("/embedding", {"content": "x"}),
    ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "x", "documents": ["a", "b"], "top_n": 1}),
    ("/slots/0?action=erase", {"filename": "x"}),
    ("/slots/0?action=save", {"filename": "../../x"}),
    ("/props", {"a": 1}),
    ("/lora-adapters", {"id": 0, "scale": 1}),
]


def answers() -> list[tuple[str, dict[str, Any]]]:
    """Good requests that use what is made at its first use: grammars, long prompts."""
    return [
        ("/completion", {"prompt": "x", "n_predict": 4, "json_schema": {"type": "object"}}),
        ("/completion", {"prompt": "word " * 1500, "n_predict": 4}),
    ]


# --- damage -----------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**64, -(2**70), 10**400, 1.5, -0.0, 1e-320,
    1e308, -1e308, float("nan"), float("inf"), "", "x", "-1", "\x00", "é" * 50, "\ud800", "9" * 400, "null", [], {},
    [[]], [None], [[1, 2, 3]], {"a": {"b": {}}}, [1e308], ["", ""], [True], {"": 1}, {"1": 1e300, "x": False},
    [[10**30, 1]], [{}] * 3, "{{ 7*7 }}", "../../etc/passwd", {"type": "json_object"}, {"prompt_string": 5},
    {"self": 1, "messages": 2, "add_generation_prompt": 3}, [{"role": "assistant", "content": None, "tool_calls": 5}],
    "<|im_start|>" * 20, {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}, 'root ::= "a"*',
    {"$ref": "#"}, [{"type": "function", "function": {"name": "", "parameters": {"$ref": "#/x"}}}], "\\" * 99,
]  # fmt: skip
_KEYS = [
    "prompt", "temperature", "top_k", "top_p", "min_p", "typical_p", "stop", "logit_bias", "samplers", "seed",
    "stream", "n_probs", "id_slot", "n", "n_cmpl", "messages", "content", "tokens", "role", "max_tokens", "mirostat",
    "dry_multiplier", "dry_sequence_breakers", "xtc_probability", "lora", "grammar", "json_schema", "response_format",
    "tools", "tool_choice", "stream_options", "logprobs", "top_logprobs", "t_max_predict_ms", "n_indent", "n_keep",
    "min_keep", "repeat_last_n", "repeat_penalty", "ignore_eos", "cache_prompt", "return_tokens", "return_progress",
    "timings_per_token", "post_sampling_probs", "sse_ping_interval", "chat_template_kwargs", "reasoning_effort",
    "add_generation_prompt", "dynatemp_range", "response_fields", "n_discard", "n_cache_reuse", "verbose",
    "include_usage", "type", "text", "input", "instructions", "system", "thinking", "grammar_lazy",
    "grammar_triggers", "preserved_tokens", "reasoning_budget_tokens", "reasoning_format", "parallel_tool_calls",
    "continue_final_message", "reasoning", "previous_response_id", "filename", "input_prefix", "input_suffix",
    "input_extra", "query", "documents",
]  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with some of its parts replaced, removed or added."""
    if rng.random() < 0.12:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        changed = {k: mutate(v, rng) if rng.random() < 0.35 else v for k, v in value.items()}
        if rng.random() < 0.2 and changed:
            changed.pop(rng.choice(list(changed)))
        while rng.random() < 0.4:
            changed[rng.choice(_KEYS)] = rng.choice(VALUES)
        return changed
    if isinstance(value, list):
        items = [mutate(v, rng) for v in value]
        if rng.random() < 0.3:
            items.insert(rng.randrange(len(items) + 1), rng.choice(VALUES))
        return items
    return value


_BYTES = [b"[" * 2000, b'{"a":' * 500, b"\xed\xa0\x80", b"\x00", b"1e999", b'"\\ud800"', b"\xff\xfe", b"-", b"\xf8\x88"]


def _damaged(body: bytes, rng: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        roll = rng.randrange(4)
        if roll == 0:
            del data[at : at + rng.randrange(8)]
        elif roll == 1:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 5)))
        elif roll == 2:
            data[at:at] = rng.choice(_BYTES)
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """Path and body of a request some of whose values, names or bytes are not as they should be."""
    path, body = rng.choice(BODIES)
    changed = mutate(body, rng)
    if isinstance(changed, dict) and path in ("/completion", "/completions"):
        changed["n_predict"] = rng.choice([1, 2, 3])  # what is sampled is no matter here
    elif isinstance(changed, dict):
        for name in ("max_tokens", "max_output_tokens"):
            if name in changed or path.startswith("/v1/"):
                changed[name] = rng.choice([1, 2])
    if isinstance(changed, dict) and "t_max_predict_ms" not in changed:
        changed["t_max_predict_ms"] = 500  # where the damage takes the limit away
    data = json.dumps(changed).encode()
    return path, _damaged(data, rng) if rng.random() < 0.25 else data


_OK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_TOKENIZE = b'{"content": "x"}'
_WAYS = [
    b"/", b"//", b"/../../etc/passwd", b"/%2e%2e/%2e%2e/etc/passwd", b"/slots/0/../../x?action=save", b"*", b"",
    b"/%00", b"/\xff\xfe", b"/slots/99999999999999999999?action=erase", b"/slots/-1?action=save", b"/slots/a?action=x",
    b"http://x/health", b"/health?" + b"a=b&" * 5000, b"/" + b"a" * 70_000, b"/%", b"/health#x", b"/v1/../health",
    b"/slots/0?action=restore&filename=/etc/passwd", b"/completion;x", b"/models/%2e%2e%2f",
]  # fmt: skip
_METHODS = [
    b"GET", b"POST", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PROPFIND", b"FOO", b"get", b"G\x00T", b"", b"PRI",
    b"A" * 5000,
]  # fmt: skip


def raw_requests(rng: random.Random) -> bytes:
    """Bytes that are hardly HTTP."""
    n = len(_TOKENIZE)
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    headers = [
        b"Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s" % (n, n + 1, _TOKENIZE),
        b"Content-Length: -1\r\n\r\n" + _TOKENIZE,
        b"Content-Length: 99999999999999999999999\r\n\r\n" + _TOKENIZE,
        b"Content-Length: 0x10\r\n\r\n" + _TOKENIZE,
        b"Content-Length: +16\r\n\r\n" + _TOKENIZE,
        b"Content-Length: 3\r\n\r\n" + _TOKENIZE,
        b"Content-Length: 5000\r\n\r\n" + _TOKENIZE,
        b"Content-Length: 16\r\nTransfer-Encoding: chunked\r\n\r\n" + _TOKENIZE,
        b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + _TOKENIZE,
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + _TOKENIZE,
        b"Transfer-Encoding: chunked\r\n\r\n10;x=" + b"y" * 9000 + b"\r\n" + _TOKENIZE + b"\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: x\r\n\r\n" + _TOKENIZE,
        b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (n, _TOKENIZE),
        b"Content-Type: \xff\xff\r\nContent-Length: %d\r\n\r\n%s" % (n, _TOKENIZE),
        b"Expect: 100-continue\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (n, _TOKENIZE),
        b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n",
        b"X-Request-Id: " + b"\xe9\r\n" * 3 + b"\r\n",
        b"Authorization: Bearer " + b"\x00" * 20 + b"\r\n\r\n",
        b"Origin: http://[\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        b"traceparent: 00-zz-zz-01\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"".join(b"X-%d: 1\r\n" % i for i in range(300)) + b"\r\n",
        b": empty\r\n\r\n",
        b"no colon\r\n\r\n",
        b" folded: x\r\n y\r\n\r\n",
        b"X\x00Y: 1\r\n\r\n",
    ]
    roll = rng.randrange(8)
    if roll < 4:
        return post + rng.choice(headers)
    if roll == 4:
        ending = b"Host: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        version = rng.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b""])
        return b"%s %s %s\r\n%s" % (rng.choice(_METHODS), rng.choice(_WAYS), version, ending)
    if roll == 5:
        return _OK * rng.choice([2, 17, 500])
    if roll == 6:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400))) + b"\r\n\r\n"
    cut = bytearray(post + b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (n, _TOKENIZE))
    for _ in range(rng.randrange(1, 4)):
        cut[rng.randrange(len(cut))] = rng.randrange(256)
    return bytes(cut)


# --- deep, wide and long ----------------------------------------------------------------------------------------------


MOST = 10 * 2**20
"""Bytes of a body that the server takes."""


def deep_and_wide() -> Iterator[tuple[str, bytes]]:
    """Paths and bodies of up to 10 MB, and above, whose JSON is the trouble."""
    where = [
        ("/completion", "prompt"), ("/completion", "json_schema"), ("/v1/chat/completions", "messages"),
        ("/v1/chat/completions", "tools"), ("/tokenize", "content"), ("/v1/responses", "input"),
        ("/v1/messages", "messages"), ("/completion", "logit_bias"),
    ]  # fmt: skip
    shapes = [
        "[" * 150 + "]" * 150,
        "[" * 1000 + "]" * 1000,
        "[" * 1_000_000 + "]" * 1_000_000,
        '{"a":' * 190 + "1" + "}" * 190,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[" + "[]," * 90_000 + "[]]",
        "[" + "{}," * 1_000_000 + "{}]",
        "[" + "1," * 990_000 + "1]",
        "[" + '"",' * 990_000 + '""]',
        "[" + "[1,2]," * 99_000 + "[1,2]]",
        "{" + ",".join(f'"k{i}":{i}' for i in range(240_000)) + "}",
        "9" * 1_000_000,
        "[" + "1e308," * 500_000 + "1]",
        '"' + "\\u0041" * 1_700_000 + '"',
        '"' + "\\ud83d\\ude00" * 850_000 + '"',
        "[" + '{"role":"user","content":"x"},' * 90_000 + '{"role":"user","content":"x"}]',
    ]
    for shape in shapes:
        for path, name in where:
            if len(shape) < 10_000 or (len(shape) + len(path)) % 3 != 1:  # a part of the long ones is enough
                more = "" if name == "prompt" else ',"prompt":"x","n_predict":1'
                yield path, f'{{"{name}":{shape}{more}}}'.encode()
    stops = json.dumps([f"stop {i}" for i in range(900_000)])
    for name in ("stop", "samplers", "dry_sequence_breakers", "response_fields", "preserved_tokens"):
        yield "/completion", f'{{"prompt":"x","n_predict":1,"{name}":{stops}}}'.encode()
    pairs = ",".join(f"[{i % 49_000},1]" for i in range(99_000))
    named = ",".join(f'"{i}":1' for i in range(240_000))
    worded = ",".join(f'["word{i} word",1]' for i in range(90_000))
    for bias in (f"[{pairs}]", f"{{{named}}}", f"[{worded}]"):
        yield "/completion", f'{{"prompt":"x","n_predict":1,"logit_bias":{bias}}}'.encode()
    triggers = ",".join(f'{{"type":1,"value":"x{i}"}}' for i in range(60_000))
    yield (
        "/completion",
        f'{{"prompt":"x","n_predict":1,"grammar":"root::=\\"a\\"","grammar_lazy":true,"grammar_triggers":[{triggers}]}}'.encode(),
    )
    yield "/detokenize", b'{"tokens":[' + b"1," * 990_000 + b"1]}"
    yield "/completion", b'{"prompt":[' + b"1," * 990_000 + b'1],"n_predict":1}'
    yield "/completion", b'{"prompt":[' + b'"x",' * 1000 + b'"x"],"n_predict":1}'
    yield "/completion", b" " * (MOST - 50) + b'{"prompt":"x","n_predict":1}'


def long_texts() -> Iterator[tuple[str, bytes]]:
    """Paths and bodies with a text of up to 10 MB, and above, in a field that is tokenized or rendered."""
    most = MOST - 200
    textures = ["a", " ", "word ", "1", "<|im_start|>", "\n", "é", "x\t\n", "[INST]", "it's ", "ab1 .,;!?\r\n"]
    for i, texture in enumerate(textures):
        said = texture * (most // len(texture.encode()))
        text = json.dumps(said, ensure_ascii=False)
        chat = f'{{"messages":[{{"role":"user","content":{text}}}],"max_tokens":1}}'
        bodies = [
            ("/completion", f'{{"prompt":{text},"n_predict":1}}'),
            ("/v1/chat/completions", chat),
            ("/tokenize", f'{{"content":{text}}}'),
            ("/v1/messages", chat),
            ("/v1/responses", f'{{"input":{text},"max_output_tokens":1}}'),
            ("/infill", f'{{"input_prefix":{text},"input_suffix":""}}'),
            ("/apply-template", chat),
            ("/v1/messages/count_tokens", chat),
            ("/completion", f'{{"prompt":"x","n_predict":1,"stop":[{text}]}}'),
            ("/completion", f'{{"prompt":"x","n_predict":1,"logit_bias":[[{text},1]]}}'),
            ("/completion", f'{{"prompt":"x","n_predict":1,"preserved_tokens":[{text}]}}'),
            ("/completion", f'{{"prompt":[1,{text},2],"n_predict":1}}'),
        ]
        for path, body in bodies[i % 3 :: 3]:
            yield path, body.encode()
    parts = json.dumps([{"role": "user", "content": "word " * 1000}] * 3000)
    yield "/v1/chat/completions", f'{{"messages":{parts},"max_tokens":1}}'.encode()
    prompts = json.dumps(["word " * 3000] * 1000)
    yield "/completion", f'{{"prompt":{prompts},"n_predict":1}}'.encode()
    yield "/tokenize", json.dumps({"content": ["word " * 30] * 90_000}).encode()


# --- schemas, grammars, patterns --------------------------------------------------------------------------------------

_PATTERNS = [
    "^(a+)+$", "(a|a)*b", "(a|aa)+$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(.*)*x", "(.*a){20}", "a{1000000}",
    "((a{100}){100}){100}", "(a?){5000}a{5000}", "^(?=.*a)(?=.*b).{1000}$", "(a)\\1{1000}", "[\\u0000-\\uffff]{500}x",
    ".{0,100000}", "(" * 5000 + ")" * 5000, "(" * 500 + "a" + ")*" * 500, "(x+x+)+y", "[" * 10_000,
    "(?:" + "|".join(f"a{i}" for i in range(20_000)) + ")", "(.*b.{30})", "([^b]*b){50}.*a.{15}", "\\p{L}{1,3000}",
    "(?i)" + "straße" * 500,
]  # fmt: skip


def _nested(levels: int, **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}
    return schema


def _schemas() -> Iterator[Any]:
    """JSON Schemas that take much time or memory."""
    for pattern in _PATTERNS:
        yield {"type": "string", "pattern": pattern}
    yield from (_nested(20), _nested(60), _nested(60, additionalProperties={"$ref": "#"}))
    yield {"$ref": "#"}
    yield {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    yield {"$ref": "http://127.0.0.1:1/x.json"}
    yield {"$ref": "file:///etc/passwd"}
    tree = {"type": "object", "properties": {name: {"$ref": "#/$defs/t"} for name in "abcdefgh"}}
    yield {"$ref": "#/$defs/t", "$defs": {"t": tree}}
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    yield {"$ref": "#/$defs/d0", "$defs": {**doubling, "d60": {"type": "null"}}}
    laughs = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(20)}
    yield {"$ref": "#/$defs/d0", "$defs": {**laughs, "d20": {"type": "null"}}}
    both = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
    yield {"$ref": "#/$defs/d0", "$defs": {**both, "d40": {"type": "object", "properties": {"a": {}}}}}
    yield {"enum": [f"value {i}" for i in range(20_000)]}
    yield {"enum": list(range(50_000))}
    yield {"const": "x" * 400_000}
    yield {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}
    names = [f"p{i}" for i in range(2000)]
    yield {"type": "object", "properties": {n: {} for n in names}, "required": names, "additionalProperties": False}
    yield {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": i}}} for i in range(3000)]}
    yield {"oneOf": [{"type": "string", "pattern": f"^a{{{i}}}.*b"} for i in range(300)]}
    yield {"allOf": [{"type": "string", "pattern": f"a{i}.*b{i}"} for i in range(100)]}
    yield {"allOf": [{"type": "integer", "multipleOf": p} for p in (997, 991, 983, 977)]}
    yield {"type": "number", "multipleOf": 1e-300}
    yield {"type": "integer", "minimum": -(10**300), "maximum": 10**300}
    yield {"type": "number", "minimum": 1e-308, "exclusiveMaximum": 1.7e308}
    yield {"type": "string", "minLength": 10**9}
    yield {"type": "string", "minLength": 50_000, "maxLength": 100_000}
    yield {"type": "string", "maxLength": 2**63}
    yield {"type": "array", "minItems": 10**9}
    yield {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2000},
        "minItems": 2000,
    }
    yield {"type": "array", "uniqueItems": True, "maxItems": 10**6}
    yield {"type": "array", "prefixItems": [{"type": "integer"}] * 20_000}
    yield {"type": "object", "minProperties": 10**6}
    yield {"type": "object", "patternProperties": {f"^a{i}.*": {} for i in range(500)}}
    yield {"type": "object", "patternProperties": {"(a+)+": {}, "(a|a)+": {}}, "propertyNames": {"pattern": "(b+)+"}}
    yield {"not": {"not": {"not": {"$ref": "#"}}}}
    yield {"if": {"type": "string"}, "then": {"$ref": "#"}, "else": {"$ref": "#"}}
    yield {"type": ["string"] * 10_000}
    yield {"type": "object", "properties": {"\x00\ud83d\ude00\n": {"const": "\x00"}}, "required": ["\x00"]}
    yield {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": ".*a.{12}"}] * 50}}
    yield {"format": "regex", "type": "string"}
    yield {"description": "x" * 500_000, "type": "string"}
    yield {"type": "object", "properties": {"a" * 100_000: {"type": "null"}}}
    yield {"$dynamicRef": "#a", "$dynamicAnchor": "a"}
    yield {"$defs": {f"d{i}": _nested(3) for i in range(3000)}, "$ref": "#/$defs/d7"}
    yield {"x-guidance": {"whitespace_pattern": "(\\s*)*"}, "type": "object"}


def _grammars() -> Iterator[str]:
    """GBNF grammars of the same kind."""
    yield 'root ::= root root | "a"'
    yield 'root ::= a\na ::= b\nb ::= a | "x"'
    yield "root ::= root"
    yield 'root ::= ("a"*)*'
    yield 'root ::= (""*)*'
    yield 'root ::= "a"{1000000}'
    yield 'root ::= (("a"{1000}){1000}){1000}'
    yield 'root ::= ("a"?){3000} "a"{3000}'
    yield "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000
    yield "root ::= " + "(" * 100_000
    yield "root ::= " + " | ".join(f'"a{i}"' for i in range(30_000))
    yield "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a"'])
    yield "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(300)), 'r300 ::= "a"'])
    yield "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(20_000)), 'r20000 ::= "a"'])
    yield "\n".join(f'r{i} ::= "a"' for i in range(30_000))
    yield 'root ::= "' + "a" * 500_000 + '"'
    yield "root ::= [" + "a-z" * 100_000 + "]*"
    yield "root ::= [^\\x00-\\U0010FFFF]"
    yield "root ::= [\\UFFFFFFFF]"
    yield "root ::= [z-a]+"
    yield 'root ::= "\\x"'
    yield "root ::= missing"
    yield "nothing"
    yield "\x00"
    yield "root ::= " + '"a" | ' * 50_000
    yield 'root ::= expr\nexpr ::= expr "+" expr | expr "*" expr | "(" expr ")" | [0-9]+'
    yield 'root ::= (.*) "x" (.*) "y" (.*) "z"'
    yield 'root ::= "a" root "b" | "a" root | ""'
    yield "root ::= " + "[a-z]* " * 3000
    yield "root ::= <[49999999]>"
    yield "root ::= !<nonsense> .*"
    yield "#" * 500_000


def bombs() -> Iterator[tuple[str, bytes]]:
    """Requests with a schema, a grammar or a pattern that is made to take for ever."""
    few = {"n_predict": 8, "temperature": 0}
    for i, schema in enumerate(_schemas()):
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        anthropic = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
        format = {"type": "json_schema", "name": "x", "schema": schema}
        ways: list[tuple[str, dict[str, Any]]] = [
            ("/completion", {"prompt": "x", "json_schema": schema, **few}),
            ("/v1/chat/completions", {**chat, "response_format": form}),
            ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}),
            ("/v1/messages", {**chat, **anthropic}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 8, "text": {"format": format}}),
        ]
        for path, body in (ways[0], ways[1 + i % 4]):
            yield path, json.dumps(body).encode()
    for grammar in _grammars():
        yield "/completion", json.dumps({"prompt": "x", "grammar": grammar, **few}).encode()
    for pattern in _PATTERNS:
        trigger = {"type": 2, "value": pattern}
        lazy = {"grammar": 'root ::= "a"+', "grammar_lazy": True, "grammar_triggers": [trigger]}
        yield (
            "/completion",
            json.dumps({"prompt": "a" * 50, "logit_bias": [["a", 20]], "n_predict": 48, **lazy}).encode(),
        )


_FEW = {"n_predict": 8, "temperature": 0}


def numeric_schemas() -> Iterator[tuple[str, bytes]]:
    """Requests whose schema has numbers at the ends of what a number can be."""
    ends = [
        0, -1, 2**31, -(2**31) - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64,
        10**19, -(10**19), 10**40, -(10**300), 10**400, 1e19, -1e19, 1e308, -1e308, 5e-324, -5e-324, 1e-300, 0.1,
        -0.0, 1.5e300,
    ]  # fmt: skip
    for i, end in enumerate(ends):
        schemas = [
            {"const": end},
            {"enum": [end, -end, 0]},
            *({"type": kind, bound: end} for kind in ("integer", "number") for bound in _BOUNDS),
            {"type": "integer", "minimum": min(end, 0), "maximum": max(end, 0)},
            {"type": "number", "exclusiveMinimum": min(end, 0), "exclusiveMaximum": max(end, 1)},
            {"type": "string", "maxLength": end},
            {"type": "array", "items": {"const": end}, "minItems": 1},
        ]
        for j, schema in enumerate(schemas):
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
            ways: list[tuple[str, dict[str, Any]]] = [
                ("/completion", {"prompt": "x", "json_schema": schema, **_FEW}),
                ("/v1/chat/completions", {**chat, "response_format": form}),
                ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}),
            ]
            path, body = ways[(i + j) % 3]
            yield path, json.dumps(body).encode()


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def trigger_bombs() -> Iterator[tuple[str, bytes]]:
    """Lazy grammars whose triggers are huge when written out, or slow on every token."""
    huge = "(?:(?:" + "ab" * 100 + "){300}){300}"
    slow = [f"(?:.*?a){{3}}[QZ{chr(ord('k') + i % 16)}]" + "x" * (i // 16) for i in range(64)]
    for patterns in ([huge], [huge] * 8, slow, [f"(?:(?:a{{1,{n}}}){{1,{n}}}){{1,{n}}}Q" for n in (10, 50, 300)]):
        lazy = {
            "grammar": 'root ::= "a"+',
            "grammar_lazy": True,
            "grammar_triggers": [{"type": 2, "value": pattern} for pattern in patterns],
        }
        body = {
            "prompt": "a" * 400,
            "logit_bias": [["a", 20], [" a", 20]],
            "ignore_eos": True,
            **_FEW,
            "n_predict": 200,
        }
        for _ in range(4):
            yield "/completion", json.dumps({**body, **lazy}).encode()


def greedy_answers() -> Iterator[tuple[str, bytes]]:
    """Requests for all probabilities of many tokens."""
    chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    for stream in (False, True):
        yield (
            "/completion",
            json.dumps({"prompt": "x", "n_probs": 100_000, "n_predict": 100, "stream": stream}).encode(),
        )
        several = {"prompt": ["x"] * 64, "n_probs": 20_000, "n_predict": 20, "stream": stream}
        yield "/completion", json.dumps(several).encode()
        many = {"max_tokens": 100, "logprobs": True, "top_logprobs": 100_000, "n": 4, "stream": stream}
        yield "/v1/chat/completions", json.dumps({**chat, **many}).encode()
        yield "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 100, "logprobs": 100_000}).encode()


def upgrades() -> Iterator[tuple[bytes, int]]:
    """Requests that ask for another protocol, and how many answers they may have."""
    inner = b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for wish in (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\n",
    ):
        for body in (b'{"content": "x"}', inner, inner * 3):
            head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + wish
            whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            for data in (whole, chunked):
                yield data, 1
                yield data + _OK, 2


# --- hosts, framing, references, tools, workers that join -------------------------------------------------------------

STRANGE_HOSTS = (
    b"Host: evil.example", b"Host: evil.example:8080", b"Host: localhost.evil.example", b"Host: 127.0.0.1.evil.example",
    b"Host: localhost\r\nHost: evil.example", b"Host: evil.example\r\nHost: localhost", b"Host: [::1].evil.example",
)  # fmt: skip


def strangers() -> Iterator[bytes]:
    """Requests of pages whose name leads to this machine (DNS rebinding), none of which may be served."""
    for host in STRANGE_HOSTS:
        for path in PATHS:
            yield b"GET %s HTTP/1.1\r\n%s\r\nConnection: close\r\n\r\n" % (path.encode(), host)
        for path, body in BODIES:
            text = json.dumps(body).encode()
            head = b"POST %s HTTP/1.1\r\n%s\r\nConnection: close\r\n" % (path.encode(), host)
            yield head + b"Content-Length: %d\r\n\r\n%s" % (len(text), text)


def framings() -> dict[str, tuple[bytes, bytes]]:
    """Chunked bodies that hold next to nothing: how each begins, and what comes again and again."""
    return {
        "one extension": (b"1;", b"x" * 65_536),
        "extensions": (b"", b"1;a=" + b"x" * 30_000 + b"\r\n \r\n"),
        "trailers": (b"2\r\n{}\r\n0\r\n", b"X-Trailer: " + b"x" * 30_000 + b"\r\n"),
        "one length": (b"", b"0" * 65_536),
    }


def references() -> Iterator[tuple[str, bytes]]:
    """Places in schemas that are none, and thousands of biases."""
    chat = [{"role": "user", "content": "x"}]
    for reference in ("#/anyOf/" + "9" * 5000, "#/anyOf/²", "#/" + "a/" * 5000, "#" + "a" * 100_000, "#/~9", "#/%ff"):
        schema = {"anyOf": [{"type": "string"}], "properties": {"a": {"$ref": reference}}, "type": "object"}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        for more in ({"tools": [tool]}, {"tools": [tool], "tool_choice": "required"},
                     {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}):  # fmt: skip
            yield "/v1/chat/completions", json.dumps({"messages": chat, "max_tokens": 2, **more}).encode()
        yield "/completion", json.dumps({"prompt": "x", "n_predict": 2, "json_schema": schema}).encode()
    for key, count in (("word %d ", 20_000), ("9" * 5000 + "%d", 1_500), ("%d" + "\u00e9" * 50, 20_000)):
        biases = {key % n: 1.0 for n in range(count)}
        yield "/completion", json.dumps({"prompt": "x", "n_predict": 2, "logit_bias": biases}).encode()
        yield "/completion", json.dumps({"prompt": "x", "n_predict": 2, "logit_bias": [*biases.items()]}).encode()


def tool_calls() -> Iterator[dict[str, Any]]:
    """Calls of built-in tools that want all memory, all time, or files that are none of theirs."""
    for pattern in (
        "a{1000000000}", "(?R)", "(a+)+$", "|".join(f"word{n}" for n in range(200_000)), "(" * 10_000, "(?<=a*)b",
        "(?:a?){500}a{500}", "\\p{L}{1000}{1000}", "[" + "a-z" * 100_000 + "]",
    ):  # fmt: skip
        yield {"tool": "grep_search", "params": {"path": ".", "pattern": pattern}}
        yield {"tool": "file_glob_search", "params": {"path": ".", "include": pattern[:5000]}}
    for path in (
        "a/" * 60_000 + "b",
        "../../etc/passwd",
        "/etc/passwd",
        "a" * 100_000,
        "x\0y",
        "/dev/zero",
        "~/.ssh/id",
    ):
        yield {"tool": "read_file", "params": {"path": path}}
        yield {"tool": "write_file", "params": {"path": path, "content": "x"}}
        yield {"tool": "file_glob_search", "params": {"path": path}}
        yield {"tool": "edit_file", "params": {"path": path, "edits": [{"old_text": "", "new_text": "x"}] * 1000}}
    for name, text in ((".git/HEAD", "ref: refs/heads/main"), (".git/config", "[core]\n\tworktree = /etc\n")):
        yield {"tool": "write_file", "params": {"path": name, "content": text}}
    yield {"tool": "file_glob_search", "params": {"path": ".", "include": "passwd"}}
    for command in (
        "(env -i setsid sleep 79 &)", "yes", "head -c 200000000 /dev/zero", "sleep 0.2",
        "printf '\\033]0;x\\007%.0s' $(seq 100000)", "kill -STOP $$", "exec 2>&1; cat /proc/self/environ",
    ):  # fmt: skip
        yield {"tool": "exec_shell_command", "params": {"command": command, "timeout": 2}}


def joins() -> Iterator[dict[str, Any]]:
    """Workers that join with fields of any length and kind."""
    yield {"endpoint": "h" * 100_000}
    yield {"endpoint": "a..b:1"}
    yield {"endpoint": "h\r\nX: y"}
    yield {"endpoint": "tls://" + "ä" * 64}
    shares: tuple[Any, ...] = (1e308, -1, 10**400, "1", [], None)
    for share in shares:
        yield {"port": 1, "share": share}
    speeds: tuple[Any, ...] = (1e308, 5e-324, -1, 10**400, "1", {}, None)
    for speed in speeds:
        yield {"port": 1, "devices": [{"decode": speed, "name": "x" * 100_000}]}
    yield {"port": 1, "devices": [{}] * 100_000}
