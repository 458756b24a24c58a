"""Runs the encoders of a projector file, on the CPU or on an accelerator with the CPU behind it."""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import Device, DeviceError
from llamado.engine.media.placed_encoders import SIDE, PlacedEncoders, weights_of
from llamado.gguf.header import ModelFile
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import MediaChunk, Piece, TokenText
from llamado.media.errors import MediaError
from llamado.media.media import Media
from llamado.models.encoders.encoder import EMBEDDINGS
from llamado.models.encoders.registry import MediaEncoders

log = logging.getLogger(__name__)

_SECONDS = 0.1
"""Seconds between two returns to the engine, unless a single operation takes longer."""
_SAMPLE = 2048
"""Bytes of each end of a tensor in the fingerprint (see forward/device_rows.py)."""


class EncoderRunner:
    """The encoders of a projector `file`. The engine's thread encodes; `prepare` may be called from any.

    `device` is the CPU. `accelerated`: the encoders of the same file on a device with the same numerics, which is used
    as long as it works; the runner closes it. Weights are loaded on the CPU when they are needed there.
    """

    def __init__(
        self, file: GGUFFile, encoders: MediaEncoders, device: Device, accelerated: PlacedEncoders | None = None
    ) -> None:
        """Load the weights. Raises DeviceError."""
        self.file, self.encoders, self.device = file, encoders, device
        self.accelerated = accelerated
        self._here: PlacedEncoders | None = None
        if accelerated is None:
            self.here()
        self.fingerprint = fingerprint(file, device.numerics)

    def here(self) -> PlacedEncoders:
        """Return the encoders on the CPU. Raises DeviceError."""
        if self._here is None:
            self._here = PlacedEncoders(self.file, self.encoders, self.device)
        return self._here

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
        return EncoderRun(self, chunk)

    def note_failure(self, error: DeviceError) -> None:
        """Log a failure of the accelerator and release its memory for graphs. A lost one is closed."""
        failed = self.accelerated
        assert failed is not None
        if failed.device.lost is None:
            log.warning("encoders: %s; this picture or sound is encoded on the CPU", error)
            with suppress(DeviceError):
                failed.drop_graphs()
            return
        log.warning("encoders: %s; pictures and sounds are encoded on the CPU from now on", error)
        self._close_accelerator()

    def warm_up(self) -> None:
        """Compile the kernels for a picture and a sound of common sizes. Raises DeviceError."""
        (self.accelerated or self.here()).warm_up()

    def close(self) -> None:
        """Release the memory, and close the accelerator and the file."""
        self._close_accelerator()
        if self._here is not None:
            self._here.free()
        self.file.close()

    def _close_accelerator(self) -> None:
        accelerated, self.accelerated = self.accelerated, None
        if accelerated is not None:
            with suppress(DeviceError):  # of a card that does not respond
                accelerated.device.close()


class EncoderRun:
    """The encoding of one chunk. If the accelerator fails, it begins again on the CPU, which computes the same bits."""

    def __init__(self, runner: EncoderRunner, chunk: MediaChunk) -> None:
        self._runner, self._chunk = runner, chunk
        self._at = 0
        self._placed = runner.accelerated or runner.here()
        try:
            self._graph = self._placed.begin(chunk)
        except DeviceError as error:
            self._begin_here(error)

    def advance(self) -> NDArray[np.float32] | None:
        """Compute segments for about a tenth of a second; return the embeddings, [n_tokens, width], after the last one.

        Raises MediaError for a wrong number of embeddings, and DeviceError naming the encoder.
        """
        try:
            return self._advance()
        except DeviceError as error:
            self._begin_here(error)
            return None

    def _begin_here(self, error: DeviceError) -> None:
        """Begin again on the CPU. Raises the error if it is the CPU's."""
        runner = self._runner
        if self._placed.device is runner.device:
            error.args = (f"{error} (while encoding media on {runner.device.name})",)
            raise error
        if self._placed is runner.accelerated:
            runner.note_failure(error)
        self._placed, self._at = runner.here(), 0
        self._graph = self._placed.begin(self._chunk)

    def _advance(self) -> NDArray[np.float32] | None:
        placed, graph = self._placed, self._graph
        device, began, last = placed.device, time.perf_counter(), 0.0
        output = graph.outputs[EMBEDDINGS]
        while self._at < len(graph.graphs):
            cost = graph.costs[self._at]
            if last and last - began + cost / placed.pace > _SECONDS:
                return None
            since = last or began
            device.submit(graph.graphs[self._at])
            if device.local:
                device.finish()
            else:
                device.read(output, 0, 4).result()  # waits for the segment
            last = time.perf_counter()
            # small segments measure little but overhead
            weight = 0.3 * min(cost / 1e9, 1.0)
            placed.pace += weight * (cost / max(last - since, 1e-6) - placed.pace)
            self._at += 1
        n_tokens, width = self._chunk.n_tokens, self._runner.encoders.of(self._chunk.kind).n_embd
        if output.nbytes != 4 * n_tokens * width:
            n = output.nbytes // (4 * width)
            raise MediaError(f"the encoder computed {n} embeddings for {n_tokens} tokens of {width} elements")
        data = device.read(output, 0, output.nbytes).result()
        return data.view(np.float32).reshape(n_tokens, width).copy()


def memory_needed(file: ModelFile, encoders: MediaEncoders, *, copied: bool = False) -> int:
    """Return about how many bytes of memory the encoders take: the weights, unless they are mapped from the file and
    not `copied`, and the activations for a picture of the model's size.
    """
    weights = 0 if file.mapped and not copied else sum(tensor.nbytes for _, tensor in weights_of(encoders))
    working = 0
    for encoder in encoders.each:
        keys = encoder.keys
        side = keys.int_("image_size", SIDE) // max(keys.int_("patch_size", 1), 1) if encoder.rate == 0 else 40
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
