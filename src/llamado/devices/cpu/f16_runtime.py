"""f16 ↔ f32 conversion in integer arithmetic, for CPUs without an instruction for it.

LLVM then calls two functions by the names they have in compilers' run-time libraries, which are not part of a
Python process.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

_HALF, _FLOAT, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)


def _i32(number: int) -> Any:
    return ir.Constant(_I32, number)


def add_to(module: Any) -> None:
    """Add `__extendhfsf2` and `__truncsfhf2` to an IR module."""
    _extend(module)
    _truncate(module)


def _begin(made: Any, name: str, result: Any, argument: Any) -> tuple[Any, Any]:
    function = ir.Function(made, ir.FunctionType(result, [argument]), name)
    function.linkage = "weak"  # kept, though only machine code calls it; several modules may have it
    return ir.IRBuilder(function.append_basic_block()), function.args[0]


def _extend(made: Any) -> None:
    b, half = _begin(made, "__extendhfsf2", _FLOAT, _HALF)
    bits = b.zext(b.bitcast(half, _I16), _I32)
    size = b.and_(bits, _i32(0x7FFF))
    # the exponent's bias is 112 less; the product also normalizes subnormal numbers
    number = b.fmul(b.bitcast(b.shl(size, _i32(13)), _FLOAT), b.bitcast(_i32(0x77800000), _FLOAT))
    quiet = b.select(b.icmp_unsigned(">", size, _i32(0x7C00)), _i32(0x7FC00000), _i32(0x7F800000))
    special = b.or_(quiet, b.shl(b.and_(size, _i32(0x3FF)), _i32(13)))
    finite = b.icmp_unsigned("<", size, _i32(0x7C00))
    chosen = b.select(finite, b.bitcast(number, _I32), special)
    b.ret(b.bitcast(b.or_(chosen, b.shl(b.and_(bits, _i32(0x8000)), _i32(16))), _FLOAT))


def _truncate(made: Any) -> None:
    """Round to nearest, ties to even."""
    b, number = _begin(made, "__truncsfhf2", _HALF, _FLOAT)
    bits = b.bitcast(number, _I32)
    size = b.and_(bits, _i32(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, _i32(13)), _i32(1))
    normal = b.lshr(b.add(b.add(size, _i32(0xC8000FFF)), odd), _i32(13))
    # below 2^-14: adding a half moves the bits to their place in a subnormal, rounded by the addition
    magic = _i32(0x3F000000)
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, _FLOAT), b.bitcast(magic, _FLOAT)), _I32), magic)
    payload = b.or_(_i32(0x7E00), b.and_(b.lshr(size, _i32(13)), _i32(0x3FF)))
    special = b.select(b.icmp_unsigned(">", size, _i32(0x7F800000)), payload, _i32(0x7C00))
    finite = b.select(b.icmp_unsigned("<", size, _i32(0x38800000)), small, normal)
    chosen = b.select(b.icmp_unsigned("<", size, _i32(0x47800000)), finite, special)
    signed = b.or_(chosen, b.lshr(b.and_(bits, _i32(0x80000000)), _i32(16)))
    b.ret(b.bitcast(b.trunc(signed, _I16), _HALF))
