"""Render chat templates in child processes, so that no template can use this process's time or memory.

A child (`text.template.sandbox`) serves one caller at a time and is kept for the next one with any template. A child
that exceeds its time is killed and replaced; only the caller of that template gets an error.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from llamado.installation import python_command
from llamado.text.errors import TemplateError, TemplateTooCostly

PATIENCE = 10.0
"""Seconds until a child's answer is late: the machine may be busy with other things."""

_LENGTH_BYTES = 8
_MAX_ANSWER = 128 << 20  # bytes: the most characters of a text at four each, and JSON's escapes
_LARGE = 4 << 20  # bytes of a request and its answer after which a child holds too much memory to be kept
_KEPT = 2  # children: one for short conversations and one for long ones
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TZ", "SYSTEMROOT")


class _ChildExit(Exception):
    """A child ended without an answer; `timed_out`: it exceeded its time."""

    def __init__(self, timed_out: bool, how: str = "") -> None:
        super().__init__(how)
        self.timed_out = timed_out


class _Child:
    """A running `text.template.sandbox`."""

    def __init__(self) -> None:
        # Closing one end of this pair ends the child's input, so the child ends even if this process crashes.
        self._socket, theirs = socket.socketpair()
        # without secrets and other parts of this process's environment that a template does not need
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(("LC_", "PYTHON"))
        }
        piped = sys.platform == "win32"  # there no process can have a socket as its input
        try:
            self._process = subprocess.Popen(
                python_command("-m", "llamado.text.template.sandbox"),
                stdin=subprocess.PIPE if piped else theirs.fileno(),
                stdout=subprocess.PIPE if piped else theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is handled by this process
            )
        except BaseException:
            theirs.close()
            raise
        if piped:
            for pump in (self._pump_input, self._pump_output):
                threading.Thread(target=pump, args=(theirs,), name="llamado-template", daemon=True).start()
        else:
            theirs.close()
        self.large = False

    def _pump_input(self, theirs: socket.socket) -> None:
        """Copy from the socket to the child, until the socket is closed."""
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:
            while part := theirs.recv(1 << 16):
                pipe.write(part)
                pipe.flush()

    def _pump_output(self, theirs: socket.socket) -> None:
        """Copy from the child to the socket, until the child ends."""
        assert self._process.stdout is not None
        with suppress(OSError), theirs, self._process.stdout as pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                theirs.sendall(part)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> tuple[dict[str, Any], list[str]]:
        """Send a request; return the answer and its texts. Raises _Died."""
        deadline = time.monotonic() + PATIENCE
        try:
            self._socket.settimeout(PATIENCE)
            self._socket.sendall(len(request).to_bytes(_LENGTH_BYTES, "little"))
            self._socket.sendall(request)
            length = int.from_bytes(b"".join(self._receive(_LENGTH_BYTES, deadline)), "little")
            if length > _MAX_ANSWER:
                raise _ChildExit(False, f"it answered with {length:,} bytes")
            answer: dict[str, Any] = json.loads(b"".join(self._receive(length, deadline)))
            sizes: list[int] = answer.get("sizes", [])
            if sum(sizes) > _MAX_ANSWER:
                raise _ChildExit(False, f"it answered with {sum(sizes):,} bytes")
            texts = [self._text(size, deadline) for size in sizes]
        except TimeoutError:
            self.end()
            raise _ChildExit(True) from None
        except OSError:
            raise self._died() from None
        self.large = len(request) + sum(sizes) > _LARGE
        return answer, texts

    def _receive(self, count: int, deadline: float) -> Iterator[bytes]:
        """Receive `count` bytes, in parts."""
        while count:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._socket.recv(min(count, 1 << 20))
            if not part:
                raise self._died()
            count -= len(part)
            yield part

    def _text(self, size: int, deadline: float) -> str:
        """Receive a text of `size` bytes; in parts, because decoding a long one would hold the interpreter's lock."""
        parts, rest = [], b""
        for part in self._receive(size, deadline):
            data = rest + part
            end = len(data) - 1
            while end > 0 and data[end] & 0xC0 == 0x80:  # the last character may be incomplete
                end -= 1
            parts.append(data[:end].decode("utf-8", "surrogatepass"))
            rest = data[end:]
        return "".join([*parts, rest.decode("utf-8", "surrogatepass")])

    def _died(self) -> _ChildExit:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return _ChildExit(False, "it closed its output")
        if code == -getattr(signal, "SIGPROF", 0):
            return _ChildExit(True)
        return _ChildExit(False, f"signal {-code}" if code < 0 else f"exit status {code}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


_lock = threading.Lock()
_idle: list[_Child] = []


def start() -> None:
    """Start a child, which takes a tenth of a second, before the first template needs it. Does not wait."""
    with _lock, suppress(OSError):  # if it still fails later, `render` reports it
        if not _idle:
            _idle.append(_Child())


@atexit.register
def end() -> None:
    """End the idle children; the next rendering starts another."""
    with _lock:
        while _idle:
            _idle.pop().end()


def render(
    source: str, values: Mapping[str, Any], renders: Sequence[Mapping[str, Any]], name: str, seconds: float
) -> list[str]:
    """Return the text of a template for each of `renders`, its variables besides `values`; all must be JSON values.

    Without any renders the template is only compiled. `name`: name of the template in errors. Raises TemplateError if
    it fails, and TemplateTooCostly if it takes more than `seconds` of computing or ends its process.
    """
    try:
        request = _written({"source": source, "values": values, "renders": renders, "seconds": seconds})
    except RecursionError:
        raise TemplateError("is given values nested too deeply", name=name) from None
    except (TypeError, ValueError) as error:
        raise TemplateError(f"is given values that JSON cannot hold: {error}", name=name) from None
    try:
        child = _take_child()
        try:
            answer, texts = child.ask(request)
        except BaseException:
            child.end()
            start()  # the next caller finds it ready
            raise
    except _ChildExit as death:
        if death.timed_out:
            raise TemplateTooCostly(
                f"takes more than {seconds:g} s of computing; it may never end", name=name
            ) from None
        raise TemplateTooCostly(f"ended the process that rendered it ({death})", name=name) from None
    except OSError as error:
        raise TemplateError(f"cannot be rendered: no process can be started for it ({error})", name=name) from None
    _return_child(child)
    if "reason" in answer:
        raise TemplateError(answer["reason"], name=name, line=answer.get("line"))
    return texts


def _written(value: Any) -> bytes:
    """Return JSON; by orjson if possible, which holds the interpreter's lock a twentieth of the time for long
    conversations.
    """
    options = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
    try:
        return orjson.dumps(value, option=options)
    except TypeError:  # halves of surrogate pairs, numbers beyond 64 bits
        return json.dumps(value).encode()


def _take_child() -> _Child:
    with _lock:
        while _idle:
            child = _idle.pop()
            if child.alive:
                return child
            child.end()
    return _Child()


def _return_child(child: _Child) -> None:
    with _lock:
        if len(_idle) < _KEPT and not child.large:
            _idle.append(child)
            return
    child.end()
    start()
