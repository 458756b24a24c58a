"""Runs the encoders of a projector file on a device."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import Buffer, Device
from llamado.engine.media.segments import SegmentedGraph
from llamado.errors import LlamadoError
from llamado.ggml.tensor import Tensor
from llamado.gguf.header import ModelFile
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import MediaChunk, Piece, TokenText, chunks_of
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.encoder import EMBEDDINGS, MediaEncoder
from llamado.models.encoders.registry import MediaEncoders

log = logging.getLogger(__name__)

_SECONDS = 0.1
"""Seconds between two returns to the engine, unless a single operation takes longer."""
_PACE = 2e10
"""Floating-point operations a second, before any were measured."""
_GRAPHS_KEPT = 4
_SAMPLE = 2048
"""Bytes of each end of a tensor in the fingerprint (see forward/device_rows.py)."""
_SIDE = 448
"""Pixels of a side of a picture for warming up, if the model has no size of its own."""

Key = tuple[MediaKind, tuple[int, ...]]


class EncoderRunner:
    """The encoders of a projector `file` on a device. The engine's thread encodes; `prepare` may be called from any."""

    def __init__(self, file: GGUFFile, encoders: MediaEncoders, device: Device) -> None:
        """Load the weights. Raises DeviceError."""
        self.file, self.encoders, self.device = file, encoders, device
        self.pace = _PACE
        self._buffers: list[Buffer] = device.load([(tensor, _bytes(file, name)) for name, tensor in _weights(encoders)])
        self._graphs: OrderedDict[Key, SegmentedGraph] = OrderedDict()
        self.fingerprint = fingerprint(file, device.numerics)

    def prepare(self, media: Media) -> list[Piece]:
        """Return the pieces of a prompt for a picture or sound (see MediaEncoder.prepare). Raises MediaError.

        The chunks' digests also identify the encoders: cells of the embeddings of other encoders are not reused.
        """
        return [self._own(piece) for piece in self.encoders.prepare(media)]

    def _own(self, piece: Piece) -> Piece:
        """Return a piece whose digest also identifies the encoders."""
        if isinstance(piece, (str, TokenText)):
            return piece
        if isinstance(piece, MediaChunk):
            return self._identified(piece)
        return lambda n_before: self._identified(piece(n_before))

    def _identified(self, chunk: MediaChunk) -> MediaChunk:
        return replace(chunk, digest=hashlib.sha256(self.fingerprint + chunk.digest).digest())

    def begin(self, chunk: MediaChunk) -> EncoderRun:
        """Begin to encode a chunk: only the latest one that was begun can advance. Raises LlamadoError."""
        graph = self._graph(chunk.kind, chunk.input.shape)
        for name, tensor in graph.inputs.items():
            data = chunk.input.arrays.get(name)
            if data is None or data.nbytes != tensor.nbytes:
                found = "none" if data is None else f"{data.nbytes} bytes"
                raise MediaError(f"the encoder's input '{name}' takes {tensor.nbytes} bytes, and {found} are given")
            self.device.write(tensor, data)
        return EncoderRun(self, graph, chunk.n_tokens, self.encoders.of(chunk.kind).n_embd)

    def _graph(self, kind: MediaKind, shape: tuple[int, ...]) -> SegmentedGraph:
        """Return the graph for inputs of a shape, built once; the least recently used ones are dropped."""
        key = kind, shape
        graph = self._graphs.get(key)
        if graph is None:
            while len(self._graphs) >= _GRAPHS_KEPT:
                self._graphs.popitem(last=False)[1].free()
            graph = self._graphs[key] = SegmentedGraph(self.device, self.encoders.of(kind).build(shape))
        self._graphs.move_to_end(key)
        return graph

    def warm_up(self) -> None:
        """Compile the kernels for a picture and a sound of common sizes."""
        for encoder in self.encoders.each:
            try:
                pieces = encoder.prepare(_blank(encoder))
            except MediaError as error:
                log.debug("encoder: not warmed up: %s", error)
                continue
            for shape in {chunk.input.shape for chunk in chunks_of(pieces)}:
                self._graph(encoder.kind, shape).prepare()

    def close(self) -> None:
        """Release the memory, and close the file."""
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()
        for buffer in self._buffers:
            buffer.free()
        self.file.close()


class EncoderRun:
    """The encoding of one chunk."""

    def __init__(self, runner: EncoderRunner, graph: SegmentedGraph, n_tokens: int, width: int) -> None:
        self._runner, self._graph = runner, graph
        self._shape = n_tokens, width
        self._at = 0

    def advance(self) -> NDArray[np.float32] | None:
        """Compute segments for about a tenth of a second; return the embeddings, [n_tokens, width], after the last one.

        Raises MediaError for a wrong number of embeddings, and DeviceError naming the encoder.
        """
        runner, graph = self._runner, self._graph
        device, began, last = runner.device, time.perf_counter(), 0.0
        while self._at < len(graph.graphs):
            cost = graph.costs[self._at]
            if last and last - began + cost / runner.pace > _SECONDS:
                return None
            since = last or began
            try:
                device.submit(graph.graphs[self._at])
                device.finish()
            except LlamadoError as error:
                error.args = (f"{error} (while encoding media on {device.name})",)
                raise
            last = time.perf_counter()
            # small segments measure little but overhead
            weight = 0.3 * min(cost / 1e9, 1.0)
            runner.pace += weight * (cost / max(last - since, 1e-6) - runner.pace)
            self._at += 1
        output = graph.outputs[EMBEDDINGS]
        n_tokens, width = self._shape
        if output.nbytes != 4 * n_tokens * width:
            n = output.nbytes // (4 * width)
            raise MediaError(f"the encoder computed {n} embeddings for {n_tokens} tokens of {width} elements")
        data = device.read(output, 0, output.nbytes).result()
        return data.view(np.float32).reshape(n_tokens, width).copy()


def memory_needed(file: ModelFile, encoders: MediaEncoders) -> int:
    """Return about how many bytes the encoders take of this machine's memory: the weights, unless they are mapped from
    the file, and the activations for a picture of the model's size.
    """
    weights = 0 if file.mapped else sum(tensor.nbytes for _, tensor in _weights(encoders))
    working = 0
    for encoder in encoders.each:
        keys = encoder.keys
        side = keys.int_("image_size", _SIDE) // max(keys.int_("patch_size", 1), 1) if encoder.rate == 0 else 40
        n_ff = keys.int_("feed_forward_length", 4096)
        working = max(working, 4 * side**2 * (8 * keys.int_("embedding_length", 1024) + 2 * n_ff))
    return weights + working


def fingerprint(file: GGUFFile, numerics: str | None) -> bytes:
    """Return a SHA-256 of everything that embeddings depend on besides the medium: the file's metadata, name, shape and
    ends of each tensor, and the device's numerics.
    """
    digest = hashlib.sha256(f"{numerics}\n".encode())
    for key in sorted(file.metadata):
        if key.startswith("clip."):
            digest.update(f"{key} {file.metadata[key]!r}\n".encode())
    for name in sorted(file.tensors):
        info, data = file.tensors[name], file.data(name)
        digest.update(f"{name} {info.type.name} {info.ne}\n".encode())
        digest.update(data[:_SAMPLE].tobytes())
        digest.update(data[-_SAMPLE:].tobytes())
    return digest.digest()


def _weights(encoders: MediaEncoders) -> list[tuple[str, Tensor]]:
    """Return the names and weights of all encoders."""
    return [item for encoder in encoders.each for item in encoder.weights.items()]


def _bytes(file: GGUFFile, name: str) -> NDArray[np.uint8]:
    info = file.tensors[name]
    return file.shard_data(info.shard)[info.offset : info.offset + info.nbytes]


def _blank(encoder: MediaEncoder) -> Media:
    """Return a picture or sound without content, of a common size."""
    if encoder.kind is MediaKind.AUDIO:
        return Media(MediaKind.AUDIO, np.zeros(encoder.rate, np.float32), encoder.rate)
    side = encoder.keys.int_("image_size", _SIDE)
    return Media(MediaKind.IMAGE, np.zeros((side, side, 3), np.uint8))
