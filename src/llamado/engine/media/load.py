"""Opening and loading a projector file (`--mmproj`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from llamado.devices.device import Device, DeviceError
from llamado.devices.split.placement import SplitOptions, mib
from llamado.engine.errors import EngineError
from llamado.engine.local_devices import Reserve
from llamado.engine.media.accelerator import open_accelerator
from llamado.engine.media.encoder_runner import EncoderRunner, memory_needed
from llamado.engine.media.placed_encoders import PlacedEncoders
from llamado.engine.options import COMPILING, EngineOptions, Report
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import require_token
from llamado.models.base import Model
from llamado.models.encoders.registry import MediaEncoders, load_encoders
from llamado.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass
class ProjectorFile:
    """A projector file before its weights are loaded, and its encoders.

    `again` returns the same encoders anew, for a second device; `accelerator` is the device that encodes; None: the
    CPU.
    """

    file: GGUFFile
    encoders: MediaEncoders
    again: Callable[[], MediaEncoders]
    accelerator: Device | None = None

    def open_accelerator(self, options: EngineOptions, split: SplitOptions | None, device: Device) -> None:
        """Open the accelerator that encodes (see `open_accelerator`); `device` is the CPU. Raises UnknownDevice."""
        self.accelerator = open_accelerator(options, split, self.encoders, device.numerics)

    def close(self) -> None:
        """Close the file and the accelerator. Not after `load`, whose result closes them."""
        self.file.close()
        if self.accelerator is not None:
            self.accelerator.close()

    def reserve(self) -> Reserve:
        """Return about how many bytes of memory it takes."""
        on_card = 0 if self.accelerator is None else memory_needed(self.file, self.encoders, copied=True)
        return Reserve(memory_needed(self.file, self.encoders), on_card)

    def load(self, device: Device, progress: Report | None) -> EncoderRunner:
        """Load the weights, and compile kernels; `device` is the CPU. Raises DeviceError."""
        if progress is not None:
            progress(COMPILING, 0, 0)
        runner = EncoderRunner(self.file, self.encoders, device, self._accelerated())
        if runner.accelerated is None:
            runner.here().warm_up()
        where = device if runner.accelerated is None else runner.accelerated.device
        kinds = " and ".join(encoder.kind.value for encoder in self.encoders.each)
        needed = mib(memory_needed(self.file, self.encoders, copied=where is not device))
        log.info("projector loaded: %s (encodes=%s, device=%s, memory=%s)", self.file.source, kinds, where.name, needed)
        return runner

    def _accelerated(self) -> PlacedEncoders | None:
        """Return the encoders on the accelerator, with their kernels; None if it cannot take them."""
        device = self.accelerator
        if device is None:
            return None
        try:
            placed = PlacedEncoders(self.file, self.again(), device)
            placed.warm_up()
        except DeviceError as error:
            log.warning("encoders: pictures and sounds are encoded on the CPU: %s", error)
            self.accelerator = None
            with suppress(DeviceError):
                device.close()
            return None
        return placed


def open_projector(model: Model, tokenizer: Tokenizer, options: EngineOptions) -> ProjectorFile | None:
    """Open the projector file that the options name; None if they name none.

    Raises GgufError, InvalidModel, UnsupportedModel, MediaError if the vocabulary lacks a token, and EngineError if the
    model cannot take its embeddings.
    """
    if options.mmproj is None:
        return None
    if not model.takes_embeddings:
        raise EngineError(f"--mmproj: the architecture {model.architecture} does not take media")
    file = GGUFFile.open(options.mmproj, mmap=options.mmap)
    try:
        again = partial(
            load_encoders,
            file,
            min_tokens=options.image_min_tokens,
            max_tokens=options.image_max_tokens,
            has_token=lambda text: tokenizer.find(text) is not None,
        )
        encoders = again()
        for encoder in encoders.each:
            for token in encoder.required_tokens:
                require_token(token, tokenizer.find)
            if encoder.n_embd != model.n_embd_input:
                raise EngineError(
                    f"mismatch between text model (n_embd = {model.n_embd_input}) and mmproj (n_embd = "
                    f"{encoder.n_embd}): {file.source} belongs to another model"
                )
    except BaseException:
        file.close()
        raise
    return ProjectorFile(file, encoders, again)
