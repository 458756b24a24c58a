"""Responses to bytes, and bytes to responses."""

from __future__ import annotations

from collections import deque

from llamado.rpc.wire.buffer import MessageBuffer
from llamado.rpc.wire.messages import Command, Response, TensorData, WireError
from llamado.rpc.wire.table import DATA_RESPONSE, SIZE, ResponseForm, response_form

__all__ = ["ResponseReader", "has_response", "write_response"]


def has_response(command: Command) -> bool:
    """Return True if a command has a response."""
    return response_form(command) is not None


def write_response(command: Command, response: Response) -> bytes:
    """Return the bytes of a response to `command`. The caller sends the bulk data behind `TensorData`."""
    form = response_form(command)
    assert form is not None
    return form.encode(response)


class ResponseReader(MessageBuffer):
    """The client's side: responses from bytes, in the order in which they were `expect`ed."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: deque[tuple[Command, ResponseForm, int]] = deque()

    def expect(self, command: Command, size: int = 0) -> None:
        """Expect one more response, after all earlier ones. `size`: its bytes, for a command in `DATA`."""
        form = response_form(command)
        if form is None:
            raise ValueError(f"{command.name} has no response")
        self._expected.append((command, form, size))

    @property
    def n_expected(self) -> int:
        """Responses still to come."""
        return len(self._expected)

    def next(self) -> tuple[Command, Response] | None:
        """Return the next response and its request's command, None until more bytes are fed. Raises WireError."""
        held = self._held
        if self.bulk or not held:
            return None
        if not self._expected:
            raise WireError("a response to no request")
        if len(held) < SIZE.size:
            return None
        command, form, data = self._expected[0]
        (size,) = SIZE.unpack(held)
        if form is DATA_RESPONSE:
            if size != data:
                raise WireError(f"{command.name} gave {size} bytes of {data}")
            del held[: SIZE.size]
            self.bulk = size
            self._expected.popleft()
            return command, TensorData(size)
        if size != form.layout.size:
            raise WireError(f"{command.name} was answered with {size} bytes; it is {form.layout.size}")
        end = SIZE.size + size
        if len(held) < end:
            return None
        response: Response = form.kind(*form.layout.unpack(held, SIZE.size))
        del held[:end]
        self._expected.popleft()
        return command, response
