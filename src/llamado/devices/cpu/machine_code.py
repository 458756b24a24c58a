"""Linker and loader of machine code for Linux on x86-64: warm starts need no LLVM.

The linker makes position-independent code of an object file (ELF-64; relocations of the System V ABI for x86-64), the
kernel cache stores it, and the loader copies it to executable memory. LLVM's own loader puts the sections of an object
where the system has space, and ends the process if they lie more than 2 GiB apart.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import struct
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Self

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
"""True if code of this machine can be linked and loaded here."""

_PROGRAM, _SYMBOLS, _RELOCATIONS = 1, 2, 4
"""Types of sections: SHT_PROGBITS, SHT_SYMTAB, SHT_RELA."""
_FUNCTION = 2
"""Type of a symbol: STT_FUNC."""
_WRITABLE, _LOADED = 1, 2
"""Flags of sections: SHF_WRITE, SHF_ALLOC."""
_FRAMES = ".eh_frame"
"""Section about stack frames, which only debuggers and exceptions use."""
_DISTANCE, _CALL, _CELLS = 2, 4, (9, 41, 42)
"""Types of relocations: R_X86_64_PC32, R_X86_64_PLT32, and three for a cell with an address (R_X86_64_GOTPCREL,
R_X86_64_GOTPCRELX, R_X86_64_REX_GOTPCRELX).
"""
_JUMP = b"\xff\x25"
"""`jmp *distance(%rip)`, before 4 bytes of the distance."""


class MachineCodeError(Exception):
    """An object file that cannot be linked, or code that cannot be loaded."""


class MachineCode(NamedTuple):
    """Position-independent code with its constants."""

    data: bytes
    functions: dict[str, int]
    """Name → offset."""
    imports: dict[str, int]
    """Name of something outside → offset of the 8 bytes that get its address."""

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Return code from the bytes that `write` returned."""
        (size,) = struct.unpack_from("<I", data)
        return cls(data[4 + size :], *json.loads(data[4 : 4 + size]))

    def write(self) -> bytes:
        """Return the code as bytes."""
        names = json.dumps([self.functions, self.imports]).encode()
        return struct.pack("<I", len(names)) + names + self.data


class _Section(NamedTuple):
    """An entry of the section table (`Elf64_Shdr`)."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    """An entry of the symbol table (`Elf64_Sym`)."""

    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


def link(file: bytes) -> MachineCode:
    """Link an object file: put its sections behind each other, and resolve the references among them.

    Raises MachineCodeError for writable data and for relocations that LLVM does not make for kernels.
    """
    table, (entry, count, names) = struct.unpack_from("<Q", file, 40)[0], struct.unpack_from("<3H", file, 58)
    sections = [_Section(*struct.unpack_from("<2I4Q2I2Q", file, table + entry * i)) for i in range(count)]
    texts = sections[names].offset
    image, places = bytearray(), dict[int, int]()
    for i, section in enumerate(sections):
        if not section.flags & _LOADED or not section.size or _text(file, texts + section.name) == _FRAMES:
            continue
        if section.flags & _WRITABLE or section.type != _PROGRAM:
            raise MachineCodeError(f"section {_text(file, texts + section.name)} is not code or constants")
        _align(image, section.alignment)
        places[i] = len(image)
        image += file[section.offset : section.offset + section.size]
    linked = _Image(image, places, _symbols(file, sections))
    for section in sections:
        if section.type == _RELOCATIONS and section.info in places:
            for at in range(section.offset, section.offset + section.size, 24):
                linked.relocate(places[section.info], *struct.unpack_from("<QIIq", file, at))
    defined = [(name, s) for name, s in linked.symbols if s.section in places and s.info & 15 == _FUNCTION]
    functions = {name: places[s.section] + s.value for name, s in defined}
    return MachineCode(bytes(image), functions, linked.imports)


class _Image:
    """Sections in their places, with cells for addresses and jumps through them behind."""

    def __init__(self, data: bytearray, places: Mapping[int, int], symbols: list[tuple[str, _Symbol]]) -> None:
        self.data, self.symbols, self.imports = data, symbols, dict[str, int]()
        self._places = places
        self._jumps: dict[str, int] = {}

    def relocate(self, start: int, offset: int, type: int, symbol: int, addend: int) -> None:
        """Apply an entry of a relocation table (`Elf64_Rela`) for the section at `start`."""
        name, found = self.symbols[symbol]
        inside = found.section in self._places
        if type in (_DISTANCE, _CALL) and inside:
            target = self._places[found.section] + found.value
        elif type == _CALL and not found.section:
            target = self._jump(name)
        elif type in _CELLS and not found.section:
            target = self._cell(name)
        else:
            raise MachineCodeError(f"relocation {type} to {name or 'a section'} is not supported")
        struct.pack_into("<i", self.data, start + offset, target + addend - (start + offset))

    def _cell(self, name: str) -> int:
        if name not in self.imports:
            _align(self.data, 8)
            self.imports[name] = len(self.data)
            self.data += bytes(8)
        return self.imports[name]

    def _jump(self, name: str) -> int:
        if name not in self._jumps:
            cell = self._cell(name)
            self._jumps[name] = len(self.data)
            self.data += _JUMP + struct.pack("<i", cell - (len(self.data) + len(_JUMP) + 4))
        return self._jumps[name]


def _symbols(file: bytes, sections: list[_Section]) -> list[tuple[str, _Symbol]]:
    (table,) = (section for section in sections if section.type == _SYMBOLS)
    names = sections[table.link].offset
    found = [
        _Symbol(*struct.unpack_from("<I2BH2Q", file, at))
        for at in range(table.offset, table.offset + table.size, table.entry_size)
    ]
    return [(_text(file, names + symbol.name), symbol) for symbol in found]


def _text(file: bytes, start: int) -> str:
    return file[start : file.index(b"\0", start)].decode()


def _align(data: bytearray, alignment: int) -> None:
    data += bytes(-len(data) % max(alignment, 1))


class ExecutableMemory:
    """Machine code in memory, until this object is no longer referenced."""

    def __init__(self, code: MachineCode, symbols: Mapping[str, int] | None = None) -> None:
        """`symbols`: addresses of what the code imports; functions of the C library are found by their names.

        Raises MachineCodeError if a name is unknown or the system refuses executable memory.
        """
        self._pages = mmap.mmap(-1, len(code.data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages[: len(code.data)] = code.data
        for name, offset in code.imports.items():
            address = symbols[name] if symbols and name in symbols else _address_of(name)
            struct.pack_into("<Q", self._pages, offset, address)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._functions = code.functions
        if _libc().mprotect(self._start, len(self._pages), mmap.PROT_READ | mmap.PROT_EXEC):
            reason = os.strerror(ctypes.get_errno())
            raise MachineCodeError(f"the system refuses executable memory ({reason})")

    def address(self, function: str) -> int:
        """Return the address of a function of the code."""
        return self._start + self._functions[function]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _address_of(name: str) -> int:
    try:
        return ctypes.cast(_libc()[name], ctypes.c_void_p).value or 0
    except AttributeError as error:
        raise MachineCodeError(f"this machine's C library has no function {name}") from error
