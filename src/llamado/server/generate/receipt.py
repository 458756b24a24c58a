"""`llamado_receipt`: the build, model files, instruction set and settings of an answer, to reproduce it elsewhere."""

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

_NOT_IN_PROFILE = ("seed", "stream", "id_slot", "n_predict", "max_tokens", "n_probs", "generation_prompt")
"""Settings outside of the profile: they differ from request to request, or change no token."""

_hashes: dict[tuple[str, int, int], str] = {}
_hashing = threading.Lock()


def model_origin(info: ModelInfo) -> ModelOrigin:
    """Return the hashes of the model's files. Takes seconds the first time, when the files are read."""
    path = Path(info.path)
    paths = [path.parent / name for name in shard_names(path.name) or [path.name]]
    paths += [Path(adapter.path) for adapter in info.adapters]
    return ModelOrigin(info.name, tuple((p.name, file_hash(p)) for p in paths), info.instruction_set)


def file_hash(path: Path) -> str | None:
    """Return a file's SHA-256, cached until its size or its time changes; None if the file is gone."""
    try:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        with _hashing:  # one thread reads the file, concurrent calls wait for its hash
            if key not in _hashes:
                with path.open("rb") as file:
                    _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return _hashes[key]
    except OSError:
        return None


def receipt_json(request: GenerationRequest, origin: ModelOrigin, seed: Seed | None) -> dict[str, Any]:
    """Return the receipt of one answer. `profile_id` is equal if all settings but the seed and the length are."""
    settings = generation_settings(request, seed=seed)
    profile = {name: value for name, value in settings.items() if name not in _NOT_IN_PROFILE}
    return {
        "build": BUILD,
        "model": origin.model,
        "files": [{"name": name, "sha256": hash} for name, hash in origin.files],
        "instruction_set": origin.instruction_set,
        "profile_id": hashlib.sha256(orjson.dumps(profile, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16],
        "profile": profile,
        "seed": seed_json(seed),
    }
