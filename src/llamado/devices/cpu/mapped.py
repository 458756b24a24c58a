"""SIGBUS handler for mapped files: end the process with a reason if a mapped file is truncated while in use.

Touching a page that the file no longer has raises SIGBUS in the thread that touches it, mostly in machine code, so only
a signal handler can report it. The handler is machine code, because no Python may run in it. For an address outside the
watched ranges it restores the previous handler (the system's, faulthandler's) and returns: the instruction is retried
and raises the signal for that handler. A signal that this process sent itself has no address. It comes from a handler
installed later that passes on what it received (faulthandler); the instruction is retried, too.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu import machine_code
from llamado.devices.cpu.machine_code import ExecutableMemory, MachineCode
from llamado.devices.kernel_cache import KernelCache

_NAME = "on_bus_error"
_SLOTS = 1024
_SA_SIGINFO, _SA_ONSTACK = 4, 0x0800_0000
_SIGBUS = 7
_CODE, _SENDER, _ADDRESS = 8, 16, 16  # offsets in siginfo_t of si_code, si_pid (code 0 or less) and si_addr


class _Slot(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),  # 0: unused
        ("text", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


class _Action(ctypes.Structure):
    """`struct sigaction` of 64-bit Linux, glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_uint64),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_uint64),
    )


_slots = (_Slot * _SLOTS)()
_texts: list[bytes] = [b""] * _SLOTS
_before = _Action()
_lock = threading.Lock()
_handler: object = None
"""Keeps the handler's code in memory."""


def watch(path: Path, memory: NDArray[np.uint8], advice: str) -> Callable[[], None]:
    """Report a missing page in `memory` as a truncation of `path`, with advice; return a function that ends the watch.

    Works on Linux; does nothing elsewhere.
    """
    address, size = memory.ctypes.data, memory.nbytes
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8 or not size:
        return lambda: None
    name = str(path).encode("unicode_escape").decode()
    text = f"llamado: {name} became shorter while it was in use; {advice}\n".encode()
    with _lock:
        _install()
        for slot in _slots:
            if slot.end and slot.start < address + size and address < slot.end:
                slot.end = 0  # the old mapping is gone
        number = next((i for i, slot in enumerate(_slots) if not slot.end), None)
        if number is None:
            return lambda: None
        slot, _texts[number] = _slots[number], text
        slot.start, slot.length = address, len(text)
        slot.text = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
        slot.end = address + size

    def end() -> None:
        with _lock:
            if _texts[number] is text:
                slot.end, _texts[number] = 0, b""

    return end


def _install() -> None:
    """Install the handler once. A handler that is installed later takes precedence."""
    global _handler
    if _handler is not None:
        return
    address, code = _load({"slots": ctypes.addressof(_slots), "before": ctypes.addressof(_before)})
    action = _Action(handler=address, flags=_SA_SIGINFO | _SA_ONSTACK)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(_SIGBUS, ctypes.byref(action), ctypes.byref(_before)) == 0:
        _handler = code


def _load(variables: Mapping[str, int]) -> tuple[int, object]:
    """Return the address of the handler in memory, and what keeps it there. `variables`: name → address."""
    if not machine_code.SUPPORTED:
        from llamado.devices.cpu.llvm import LoadedObjects

        objects = LoadedObjects()
        return objects.add(_compile(_module(variables)), _NAME), objects
    cache = KernelCache(("devices/cpu/mapped.py", "devices/cpu/machine_code.py"), ["x86_64"], warns=False)
    name = cache.entry(_NAME, b"")
    data = cache.read(name)
    if data is None:
        data = machine_code.link(_compile(_module({}))).write()
        cache.write(name, data)
    code = ExecutableMemory(MachineCode.read(data), variables)
    return code.address(_NAME), code


def _compile(module: Any) -> bytes:
    import llvmlite.binding as llvm

    from llamado.devices.cpu.llvm import initialize

    machine = llvm.Target.from_triple(initialize()).create_target_machine(codemodel="small", reloc="pic")
    return bytes(machine.emit_object(llvm.parse_assembly(str(module))))


def _module(variables: Mapping[str, int]) -> Any:
    """Build `void on_bus_error(int signal, siginfo_t*, void*)`, which calls only async-signal-safe functions.

    `variables`: addresses of "slots" and "before"; those without one are resolved when the code is loaded.
    """
    from llvmlite import ir

    made = ir.Module("mapped")
    i8, i32, i64, nothing = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VoidType()
    pointer = i8.as_pointer()

    handler = ir.Function(made, ir.FunctionType(nothing, [i32, pointer, pointer]), _NAME)
    b = ir.IRBuilder(handler.append_basic_block("entry"))

    def function(name: str, result: Any, *arguments: Any) -> Any:
        """Declare a function of the C library."""
        found = made.globals.get(name)
        return found or ir.Function(made, ir.FunctionType(result, arguments), name)

    def read(address: Any, offset: int, type: Any = i64) -> Any:
        return b.load(b.inttoptr(b.add(address, ir.Constant(i64, offset)), type.as_pointer()))

    def variable(name: str) -> Any:
        known = name in variables
        return ir.Constant(i64, variables[name]).inttoptr(pointer) if known else ir.GlobalVariable(made, i8, name)

    slots, old = variable("slots"), variable("before")
    nowhere = ir.Constant(pointer, None)
    about = b.ptrtoint(handler.args[1], i64)
    was_sent = b.icmp_signed("<=", read(about, _CODE, i32), ir.Constant(i32, 0))
    with b.if_then(was_sent):
        by_us = b.icmp_signed("==", read(about, _SENDER, i32), b.call(function("getpid", i32), []))
        with b.if_then(b.not_(by_us)):
            b.call(function("sigaction", i32, i32, pointer, pointer), [handler.args[0], old, nowhere])
            b.call(function("raise", i32, i32), [handler.args[0]])  # delivered when this handler has returned
        b.ret_void()
    fault = read(about, _ADDRESS)
    first = b.ptrtoint(slots, i64)
    end = b.add(first, ir.Constant(i64, ctypes.sizeof(_slots)))
    start = b.block
    loop, known, on, unknown = (handler.append_basic_block(name) for name in ("loop", "known", "on", "unknown"))
    b.branch(loop)
    b.position_at_end(loop)
    slot = b.phi(i64)
    slot.add_incoming(first, start)
    after = b.icmp_unsigned(">=", fault, read(slot, _Slot.start.offset))
    before = b.icmp_unsigned("<", fault, read(slot, _Slot.end.offset))
    b.cbranch(b.and_(after, before), known, on)
    b.position_at_end(known)
    text = b.inttoptr(read(slot, _Slot.text.offset), pointer)
    b.call(function("write", i64, i32, pointer, i64), [ir.Constant(i32, 2), text, read(slot, _Slot.length.offset)])
    b.call(function("_exit", nothing, i32), [ir.Constant(i32, 1)])
    b.unreachable()
    b.position_at_end(on)
    following = b.add(slot, ir.Constant(i64, ctypes.sizeof(_Slot)))
    slot.add_incoming(following, on)
    b.cbranch(b.icmp_unsigned("<", following, end), loop, unknown)
    b.position_at_end(unknown)
    b.call(function("sigaction", i32, i32, pointer, pointer), [handler.args[0], old, nowhere])
    b.ret_void()
    return made
