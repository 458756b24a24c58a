"""`llamado_receipt`: what an answer was made with, for whoever wants the same answer elsewhere, or to know why not."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import orjson

from llamado.build import BUILD
from llamado.engine.sampling.rng import Seed
from llamado.gguf.shards import shard_names
from llamado.server.generate.generation_settings import generation_settings, seed_json
from llamado.server.generate.request import GenerationRequest
from llamado.server.model import ModelInfo, ModelOrigin

_OF_ONE_ANSWER = ("seed", "stream", "id_slot", "n_predict", "max_tokens", "n_probs", "generation_prompt")
"""Settings that do not belong to a profile: they differ from request to request, or change no token."""

_hashes: dict[tuple[str, int, int], str] = {}
_hashing = threading.Lock()


def model_origin(info: ModelInfo) -> ModelOrigin:
    """Read the model's files, the first time; takes seconds."""
    path = Path(info.path)
    paths = [path.parent / name for name in shard_names(path.name) or [path.name]]
    paths += [Path(adapter.path) for adapter in info.adapters]
    return ModelOrigin(info.name, tuple((p.name, file_hash(p)) for p in paths), info.instruction_set)


def file_hash(path: Path) -> str | None:
    """A file's SHA-256, read again only where its size or its time has changed; None where it is gone."""
    try:
        stat = path.stat()
        known = (str(path), stat.st_size, stat.st_mtime_ns)
        with _hashing:  # whoever asks at the same time waits for the first
            if known not in _hashes:
                with path.open("rb") as file:
                    _hashes[known] = hashlib.file_digest(file, "sha256").hexdigest()
            return _hashes[known]
    except OSError:
        return None


def receipt_json(asked: GenerationRequest, origin: ModelOrigin, seed: Seed | None) -> dict[str, Any]:
    """The receipt of one answer. `profile_id` is equal where all settings but the seed and the length are."""
    settings = generation_settings(asked, seed=seed)
    profile = {name: value for name, value in settings.items() if name not in _OF_ONE_ANSWER}
    return {
        "build": BUILD,
        "model": origin.model,
        "files": [{"name": name, "sha256": hash} for name, hash in origin.files],
        "instruction_set": origin.instruction_set,
        "profile_id": hashlib.sha256(orjson.dumps(profile, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16],
        "profile": profile,
        "seed": seed_json(seed),
    }
