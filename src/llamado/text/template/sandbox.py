"""The program that renders chat templates: a child process with limits on memory, computing time and text.

Templates come with models: they are untrusted code, and a few words of Jinja can take any amount of memory and time. So
they run in Jinja's sandbox, which runs here (`python -m llamado.text.template.sandbox`, started by rendering.py).

It reads requests from standard input until that ends, and writes an answer to each to standard output. Both are UTF-8
JSON after their length in bytes (8 bytes, little-endian). A request: `source`, a template; `renders`, the variables of
each text (none: the template is only compiled); `seconds` of computing. An answer: `texts`, or `reason` and `line` of
the error. A template that takes longer ends this process by SIGPROF.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_MEMORY = 512 << 20
"""Bytes that this process may allocate, if the system can limit them."""
MAX_CHARACTERS = 16 << 20
"""Most characters of one text."""
LENGTH_BYTES = 8


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Loops(NodeTransformer):
    """Makes loops over None do nothing."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # an attribute of the environment, not a name, so that no template can replace it
        node.iter = nodes.Call(nodes.EnvironmentAttribute("items_"), [node.iter], [], None, None)
        node.iter.set_lineno(node.lineno)
        return node


class _MissingValue(jinja2.Undefined):
    """A missing variable or member: nothing, also if it is added to a text or iterated."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other if isinstance(other, str) else super().__radd__(other)

    def items(self) -> Sequence[Any]:
        return ()

    keys = values = items


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions that chat templates expect."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            undefined=_MissingValue,
        )
        self.filters["tojson"] = _tojson
        self.filters["safe"] = str  # nothing here is HTML
        self.globals = {
            name: value
            for name, value in self.globals.items()
            if name in ("range", "dict", "namespace", "cycler", "joiner")
        }
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Loops().visit(super()._parse(source, name, filename))
        return tree

    def items_(self, value: Any) -> Any:
        """Return the values of a loop: none for None, for example tools in a template written for them."""
        return () if value is None else value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # the changes that templates make to lists; every value of a template is its own copy
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON like Hugging Face's filter: nothing is escaped for HTML, unlike in Jinja's filter."""
    if isinstance(value, Iterator):
        value = list(value)  # of a filter such as map
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


_environment = _Environment()


@lru_cache(maxsize=4)  # a model has at most two
def _compiled(source: str) -> jinja2.Template:
    return _environment.from_string(source)


def _render(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    chunks, characters = [], 0
    for chunk in template.generate(values):
        characters += len(chunk)
        if characters > MAX_CHARACTERS:
            raise jinja2.TemplateRuntimeError(f"makes a text of more than {MAX_CHARACTERS:,} characters")
        chunks.append(chunk)
    return "".join(chunks)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a template and render it: return `texts`, or the error. `values` are shared by all renders."""
    template = None
    try:
        template = _compiled(request["source"])
        shared = request["values"]
        return {"texts": [_render(template, {**shared, **values}) for values in request["renders"]]}
    except jinja2.TemplateSyntaxError as error:
        reason = f"is not valid Jinja: {error.message}; give another with --chat-template"
        return {"reason": reason, "line": error.lineno}
    except Exception as error:  # a template is untrusted code: any exception is its fault
        if isinstance(error, MemoryError):
            reason = f"takes more than {MAX_MEMORY >> 20} MiB of memory"
        elif isinstance(error, RecursionError):
            reason = "nests too deeply" if template else "nests too deeply; give another with --chat-template"
        elif isinstance(error, jinja2.TemplateError):
            reason = error.message or type(error).__name__
        else:
            reason = f"{type(error).__name__}: {error}"
        return {"reason": reason[:1000], "line": _line(error)}


def _line(error: Exception) -> int | None:
    """Return the template's line that failed; jinja2 rewrites tracebacks so that their frames show lines of the
    template.
    """
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _limit() -> None:
    """Limit this process: its memory, and that it writes no files, including core dumps."""
    try:
        import resource
    except ImportError:
        return
    limits = {resource.RLIMIT_DATA: MAX_MEMORY, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _allow(seconds: float) -> None:
    """End this process after `seconds` more of computing; 0: no limit any more."""
    if hasattr(signal, "setitimer"):  # elsewhere only the parent watches the time
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer `requests` until they end."""
    while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        body = requests.read(int.from_bytes(head, "little"))
        try:
            request = json.loads(body)
            del body
            _allow(request["seconds"])
            result = answer(request)
            del request
            # Texts follow unencoded: parsing 20 MB of JSON holds the parent's interpreter lock for 70 ms.
            texts = [text.encode("utf-8", "surrogatepass") for text in result.pop("texts", ())]
            found = json.dumps({**result, "sizes": [len(text) for text in texts]}).encode()
            failed = "reason" in result
        except (MemoryError, RecursionError) as error:
            reason = "takes too much memory" if isinstance(error, MemoryError) else "is given values nested too deeply"
            found, texts, failed = json.dumps({"reason": reason}).encode(), [], True
        _allow(0)
        answers.writelines((len(found).to_bytes(LENGTH_BYTES, "little"), found, *texts))
        answers.flush()
        del found, texts
        if failed:
            gc.collect()  # a traceback holds everything that the template allocated


if __name__ == "__main__":
    _limit()
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except OSError:
        pass  # the parent has ended
    os._exit(0)
