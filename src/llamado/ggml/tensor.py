"""Tensor descriptions, the values exchanged by the packages above. The bytes are in a device's buffer.

Shapes (`ne`) and strides (`nb`) have four dimensions, the fastest first, as in ggml. A row runs along dimension 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from llamado.ggml.ops import VIEW_OPS, Op
from llamado.gguf.types import TensorType

Shape = tuple[int, int, int, int]

NO_PARAMS = bytes(64)

# A list indexed by type number: layouts are looked up for every node of every graph.
BLOCK: list[tuple[int, int]] = [(0, 0)] * (max(TensorType) + 1)
for _type in TensorType:
    BLOCK[_type] = (_type.block_size, _type.block_bytes)


def contiguous_strides(type: TensorType, ne: Shape) -> Shape:
    """Return the strides in bytes of a contiguous tensor; `ne[0]` must be a whole number of blocks."""
    block, size = BLOCK[type]
    nb1 = size * (ne[0] // block)
    nb2 = nb1 * ne[1]
    return size, nb1, nb2, nb2 * ne[2]


@lru_cache(4096)
def contiguous_layout(type: TensorType, ne: Shape) -> tuple[Shape, Shape]:
    """Return the shape and strides of a contiguous tensor, cached so that equal tensors share the two tuples."""
    return ne, contiguous_strides(type, ne)


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """A typed, strided array and the operation that computes it (`Op.NONE` for data: weights, inputs, caches).

    `src` holds the operation's sources; absent optional sources are None. `op_params` are the 64 bytes of the
    operation's parameters in ggml's layout. A view (`view_src` is set) shares the memory of `view_src`, starting at
    byte `view_offs`. For other tensors `buffer` and `offset` locate the bytes; if `buffer` is None, the device that
    runs the graph allocates them. Tensors compare by identity.
    """

    type: TensorType
    ne: Shape
    nb: Shape
    op: Op = Op.NONE
    src: tuple[Tensor | None, ...] = ()
    op_params: bytes = NO_PARAMS
    view_src: Tensor | None = None
    view_offs: int = 0
    name: str = ""
    flags: int = field(default=0, init=False)
    buffer: object | None = field(default=None, init=False)
    offset: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"<Tensor {self.name or '?'} {self.op.name} {self.type.name}{list(self.ne)}>"

    @property
    def nelements(self) -> int:
        """Return the number of elements."""
        ne = self.ne
        return ne[0] * ne[1] * ne[2] * ne[3]

    @property
    def nrows(self) -> int:
        """Return the number of rows."""
        ne = self.ne
        return ne[1] * ne[2] * ne[3]

    @property
    def nbytes(self) -> int:
        """Return the bytes from the first element to the end of the last, gaps included."""
        ne, nb = self.ne, self.nb
        if 0 in ne:
            return 0
        block, size = BLOCK[self.type]
        first = size + (ne[0] - 1) * nb[0] if block == 1 else ne[0] * nb[0] // block
        return first + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]

    @property
    def n_dims(self) -> int:
        """Return the number of dimensions up to the last one longer than 1; a scalar has 1."""
        return max((i + 1 for i, n in enumerate(self.ne) if n > 1), default=1)

    @property
    def is_view(self) -> bool:
        """Return True if the tensor shares another tensor's memory."""
        return self.view_src is not None

    @property
    def is_noop(self) -> bool:
        """Return True if no computation is needed: data, a view operation, or no elements."""
        return self.op in VIEW_OPS or self.op is Op.NONE or 0 in self.ne

    def source(self, index: int) -> Tensor | None:
        """Return source number `index`, or None if it is absent."""
        return self.src[index] if index < len(self.src) else None

    def is_contiguous(self, free_dims: int = 0) -> bool:
        """Return True if the elements have no gaps; dimensions 1 to `free_dims` may have any stride."""
        ne, nb = self.ne, self.nb
        block, size = BLOCK[self.type]
        if ne[0] != block and nb[0] != size:
            return False
        expected = size * (ne[0] // block)
        for i in (1, 2, 3):
            if i > free_dims:
                if ne[i] != 1 and nb[i] != expected:
                    return False
                expected *= ne[i]
            else:
                expected = ne[i] * nb[i]
        return True

    def has_contiguous_rows(self) -> bool:
        """Return True if the elements of each row have no gaps."""
        block, size = BLOCK[self.type]
        return self.ne[0] == block or self.nb[0] == size

    def is_transposed(self) -> bool:
        """Return True if the stride of dimension 0 exceeds that of dimension 1."""
        return self.nb[0] > self.nb[1]

    def can_repeat_to(self, other: Tensor) -> bool:
        """Return True if whole copies of this tensor tile `other` (ggml's broadcasting rule)."""
        a, b = self.ne, other.ne
        if 0 in a:
            return 0 in b
        return a == b or not (b[0] % a[0] or b[1] % a[1] or b[2] % a[2] or b[3] % a[3])

    def root(self) -> tuple[Tensor, int]:
        """Return the tensor that owns the memory, and the byte offset of this tensor in it."""
        tensor, offset = self, 0
        while tensor.view_src is not None:
            offset += tensor.view_offs
            tensor = tensor.view_src
        return tensor, offset
