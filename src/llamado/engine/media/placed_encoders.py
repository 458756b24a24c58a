"""Encoders whose weights are on a device, and their latest graphs."""

from __future__ import annotations

import logging
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import Buffer, Device
from llamado.engine.media.segments import SegmentedGraph
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import MediaChunk, chunks_of
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.encoder import MediaEncoder
from llamado.models.encoders.registry import MediaEncoders

log = logging.getLogger(__name__)

SIDE = 448
"""Pixels of a side of a common picture, if the model has no size of its own."""
_PACE = 2e10
"""Floating-point operations a second, before any were measured."""
_GRAPHS_KEPT = 4

Shape = tuple[int, ...]


class PlacedEncoders:
    """The encoders of a projector `file` on a device. `pace`: floating-point operations a second."""

    def __init__(self, file: GGUFFile, encoders: MediaEncoders, device: Device) -> None:
        """Load the weights. Raises DeviceError."""
        self.encoders, self.device = encoders, device
        self.pace = _PACE
        self._buffers: list[Buffer] = device.load(
            [(tensor, _bytes(file, name)) for name, tensor in weights_of(encoders)]
        )
        self.graphs: OrderedDict[tuple[MediaKind, Shape], SegmentedGraph] = OrderedDict()

    def begin(self, chunk: MediaChunk) -> SegmentedGraph:
        """Return the graph for a chunk, with its inputs. Raises LlamadoError."""
        graph = self._graph(chunk.kind, chunk.input.shape)
        for name, tensor in graph.inputs.items():
            data = chunk.input.arrays.get(name)
            if data is None or data.nbytes != tensor.nbytes:
                found = "none" if data is None else f"{data.nbytes} bytes"
                raise MediaError(f"the encoder's input '{name}' takes {tensor.nbytes} bytes, and {found} are given")
            self.device.write(tensor, data)
        return graph

    def _graph(self, kind: MediaKind, shape: Shape) -> SegmentedGraph:
        """Return the graph for inputs of a shape, built once; the least recently used ones are dropped."""
        key = kind, shape
        graph = self.graphs.get(key)
        if graph is None:
            while len(self.graphs) >= _GRAPHS_KEPT:
                self.graphs.popitem(last=False)[1].free()
            graph = self.graphs[key] = SegmentedGraph(self.device, self.encoders.of(kind).build(shape))
        self.graphs.move_to_end(key)
        return graph

    def warm_up(self) -> None:
        """Compile the kernels for a picture and a sound of common sizes. Raises DeviceError."""
        for encoder in self.encoders.each:
            for shape in common_shapes(encoder):
                self._graph(encoder.kind, shape).prepare()

    def drop_graphs(self) -> None:
        """Release the memory of all graphs."""
        while self.graphs:
            self.graphs.popitem()[1].free()

    def free(self) -> None:
        """Release all memory of the device."""
        self.drop_graphs()
        for buffer in self._buffers:
            buffer.free()


def common_shapes(encoder: MediaEncoder) -> list[Shape]:
    """Return the shapes of inputs for a picture or sound of a common size."""
    try:
        pieces = encoder.prepare(_blank(encoder))
    except MediaError as error:
        log.debug("encoder: no medium of a common size: %s", error)
        return []
    return sorted({chunk.input.shape for chunk in chunks_of(pieces)})


def missing_operation(device: Device, encoders: MediaEncoders) -> str:
    """Return an operation of the encoders that a device cannot run, with the type of its first operand; or nothing."""
    for encoder in encoders.each:
        for shape in common_shapes(encoder):
            for node in encoder.build(shape).nodes:
                type = (node.source(0) or node).type
                if not node.is_noop and not device.supports(node.op, type):
                    return f"{node.op.name} of {type.name}"
    return ""


def weights_of(encoders: MediaEncoders) -> list[tuple[str, Tensor]]:
    """Return the names and weights of all encoders."""
    return [item for encoder in encoders.each for item in encoder.weights.items()]


def _bytes(file: GGUFFile, name: str) -> NDArray[np.uint8]:
    info = file.tensors[name]
    return file.shard_data(info.shard)[info.offset : info.offset + info.nbytes]


def _blank(encoder: MediaEncoder) -> Media:
    """Return a picture or sound without content, of a common size."""
    if encoder.kind is MediaKind.AUDIO:
        return Media(MediaKind.AUDIO, np.zeros(encoder.rate, np.float32), encoder.rate)
    side = encoder.keys.int_("image_size", SIDE)
    return Media(MediaKind.IMAGE, np.zeros((side, side, 3), np.uint8))
