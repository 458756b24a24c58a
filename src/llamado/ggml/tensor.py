"""Tensor: the value every room above speaks of. A description only; the bytes live in a device's buffer.

Shapes (`ne`) and strides (`nb`) have four dimensions, the fastest first, as in ggml. A row runs along dimension 0.
"""

from __future__ import annotations

from functools import lru_cache

from llamado.ggml.ops import VIEW_OPS, Op
from llamado.gguf.types import TensorType

Shape = tuple[int, int, int, int]

NO_PARAMS = bytes(64)

# One list look-up by type number: this runs for every node of every graph.
BLOCK: list[tuple[int, int]] = [(0, 0)] * (max(TensorType) + 1)
for _type in TensorType:
    BLOCK[_type] = (_type.block_size, _type.block_bytes)


def contiguous_strides(type: TensorType, ne: Shape) -> Shape:
    """Strides in bytes of a tensor without gaps; `ne[0]` must be a whole number of blocks."""
    block, size = BLOCK[type]
    nb1 = size * (ne[0] // block)
    nb2 = nb1 * ne[1]
    return size, nb1, nb2, nb2 * ne[2]


@lru_cache(4096)
def whole(type: TensorType, ne: Shape) -> tuple[Shape, Shape]:
    """Shape and strides of a tensor without gaps: the same objects for all of them, of which many graphs have many."""
    return ne, contiguous_strides(type, ne)


class Tensor:
    """A typed, strided array and the operation that computes it (`Op.NONE`: nothing does, the bytes are there already).

    `src` are the operation's sources, as many as the operation defines; absent optional ones are None.
    `op_params` are the 64 bytes of the operation's parameters, laid out as ggml does.
    A view (`view_src` set) lies in the memory of `view_src`, `view_offs` bytes in. Otherwise `buffer` and `offset` say
    where the bytes are; `buffer` None leaves the placing to the device that runs the graph.
    Two tensors are equal only when they are the same object.
    """

    __slots__ = (
        "buffer",
        "flags",
        "name",
        "nb",
        "ne",
        "offset",
        "op",
        "op_params",
        "src",
        "type",
        "view_offs",
        "view_src",
    )

    def __init__(
        self,
        type: TensorType,
        ne: Shape,
        nb: Shape,
        op: Op = Op.NONE,
        src: tuple[Tensor | None, ...] = (),
        op_params: bytes = NO_PARAMS,
        view_src: Tensor | None = None,
        view_offs: int = 0,
        name: str = "",
    ) -> None:
        self.type = type
        self.ne = ne
        self.nb = nb
        self.op = op
        self.src = src
        self.op_params = op_params
        self.view_src = view_src
        self.view_offs = view_offs
        self.name = name
        self.flags = 0
        self.buffer: object | None = None
        self.offset = 0

    def __repr__(self) -> str:
        return f"<Tensor {self.name or '?'} {self.op.name} {self.type.name}{list(self.ne)}>"

    @property
    def nelements(self) -> int:
        """Number of elements."""
        ne = self.ne
        return ne[0] * ne[1] * ne[2] * ne[3]

    @property
    def nrows(self) -> int:
        """Number of rows."""
        ne = self.ne
        return ne[1] * ne[2] * ne[3]

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last one, gaps included."""
        ne, nb = self.ne, self.nb
        if 0 in ne:
            return 0
        block, size = BLOCK[self.type]
        first = size + (ne[0] - 1) * nb[0] if block == 1 else ne[0] * nb[0] // block
        return first + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]

    @property
    def n_dims(self) -> int:
        """Dimensions up to the last one longer than 1; a scalar has 1."""
        return max((i + 1 for i, n in enumerate(self.ne) if n > 1), default=1)

    @property
    def is_view(self) -> bool:
        """Whether the memory is another tensor's."""
        return self.view_src is not None

    @property
    def is_noop(self) -> bool:
        """Whether there is nothing to compute: a view operation, or no elements."""
        return self.op in VIEW_OPS or self.op is Op.NONE or 0 in self.ne

    def source(self, index: int) -> Tensor | None:
        """Source number `index`, or None where the operation was given none."""
        return self.src[index] if index < len(self.src) else None

    def is_contiguous(self, free_dims: int = 0) -> bool:
        """Whether elements follow one another without gaps; dimensions 1..`free_dims` may have any stride."""
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
        """Whether elements within a row follow one another."""
        block, size = BLOCK[self.type]
        return self.ne[0] == block or self.nb[0] == size

    def is_transposed(self) -> bool:
        """Whether rows are spread wider than columns."""
        return self.nb[0] > self.nb[1]

    def is_permuted(self) -> bool:
        """Whether strides do not ascend."""
        nb = self.nb
        return nb[0] > nb[1] or nb[1] > nb[2] or nb[2] > nb[3]

    def same_shape(self, other: Tensor) -> bool:
        """Whether both have the same `ne`."""
        return self.ne == other.ne

    def can_repeat_to(self, other: Tensor) -> bool:
        """Whether whole copies of this tensor tile `other` (ggml's broadcasting rule)."""
        a, b = self.ne, other.ne
        if 0 in a:
            return 0 in b
        return a == b or not (b[0] % a[0] or b[1] % a[1] or b[2] % a[2] or b[3] % a[3])

    def root(self) -> tuple[Tensor, int]:
        """The tensor that owns the memory, and the byte offset of this one in it."""
        tensor, offset = self, 0
        while tensor.view_src is not None:
            offset += tensor.view_offs
            tensor = tensor.view_src
        return tensor, offset
