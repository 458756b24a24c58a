"""Control vectors with random directions, as GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np


def make_control(path: Path, n_embd: int, layers: Iterable[int], *, size: float = 1.0, seed: int = 0) -> Path:
    """Write directions of length `size` · √n_embd for these layers."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    numbers = [*layers]
    writer.add_uint32("controlvector.layer_count", len(numbers))
    for layer in numbers:
        writer.add_tensor(f"direction.{layer}", (rng.standard_normal(n_embd) * size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
