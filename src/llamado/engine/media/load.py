"""Opening and loading a projector file (`--mmproj`)."""

from __future__ import annotations

import logging
from typing import NamedTuple

from llamado.devices.device import Device
from llamado.devices.split.placement import mib
from llamado.engine.errors import EngineError
from llamado.engine.media.encoder_runner import EncoderRunner, memory_needed
from llamado.engine.options import COMPILING, EngineOptions, Report
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import require_token
from llamado.models.base import Model
from llamado.models.encoders.registry import MediaEncoders, load_encoders
from llamado.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class ProjectorFile(NamedTuple):
    """A projector file before its weights are loaded, and its encoders."""

    file: GGUFFile
    encoders: MediaEncoders

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def memory_needed(self) -> int:
        """Return about how many bytes of this machine's memory it takes."""
        return memory_needed(self.file, self.encoders)

    def load(self, device: Device, progress: Report | None) -> EncoderRunner:
        """Load the weights, and compile kernels. Raises DeviceError."""
        if progress is not None:
            progress(COMPILING, 0, 0)
        runner = EncoderRunner(self.file, self.encoders, device)
        runner.warm_up()
        kinds = " and ".join(encoder.kind.value for encoder in self.encoders.each)
        log.info("projector loaded: %s (encodes=%s, memory=%s)", self.file.source, kinds, mib(self.memory_needed()))
        return runner


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
        encoders = load_encoders(
            file,
            min_tokens=options.image_min_tokens,
            max_tokens=options.image_max_tokens,
            has_token=lambda text: tokenizer.find(text) is not None,
        )
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
    return ProjectorFile(file, encoders)
