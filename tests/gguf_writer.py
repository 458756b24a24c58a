"""A writer of GGUF files that packs equal vocabularies once, which takes longer than all else in a small file."""

from __future__ import annotations

from typing import Any

import gguf

_packed: dict[tuple[Any, ...], bytes] = {}


class GGUFWriter(gguf.GGUFWriter):
    """The writer of the gguf package, which packs each string and number of an array by itself."""

    def _pack_val(
        self, val: Any, vtype: gguf.GGUFValueType, add_vtype: bool, sub_type: gguf.GGUFValueType | None = None
    ) -> bytes:
        kinds = {*map(type, val)} if isinstance(val, list) else set()
        if vtype is not gguf.GGUFValueType.ARRAY or kinds not in ({str}, {int}):
            return super()._pack_val(val, vtype, add_vtype, sub_type)
        key = (self.endianess, add_vtype, sub_type, *val)
        if key not in _packed:
            _packed[key] = super()._pack_val(val, vtype, add_vtype, sub_type)
        return _packed[key]
