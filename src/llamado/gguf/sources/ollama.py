"""Models fetched by Ollama, read from its store: a manifest names the blob that is the GGUF file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import orjson

from llamado.gguf.errors import MissingBlob, SourceError

DEFAULT_HOST, DEFAULT_USER, DEFAULT_TAG = "registry.ollama.ai", "library", "latest"
MODEL_LAYER = "application/vnd.ollama.image.model"
PROJECTOR_LAYER = "application/vnd.ollama.image.projector"
_MOST_BYTES = 1 << 20
"""Bytes of a manifest; usual ones have one kilobyte."""
_PART = re.compile(r"(?!\.+$)[A-Za-z0-9._-]+")
_HOST = re.compile(r"(?!\.+$)[A-Za-z0-9._-]+(:\d+)?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


def store() -> Path:
    """Return Ollama's models folder: `$OLLAMA_MODELS` or `~/.ollama/models`."""
    return Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()


def find_ollama_model(name: str) -> Path:
    """Return the GGUF blob of `[[host/]user/]name[:tag]`; raise `SourceError` if Ollama does not have it."""
    found = _blob(name, MODEL_LAYER)
    if found is None:
        raise SourceError(
            f"Ollama's manifest {_manifest(name)} names no GGUF file (layer {MODEL_LAYER}); use the model's GGUF from "
            "the Hugging Face hub: -hf user/model"
        )
    return found


def find_ollama_projector(name: str) -> Path | None:
    """Return the blob of a model's projector; None if it has none, or keeps its encoder in the model's file.

    Raises SourceError.
    """
    return _blob(name, PROJECTOR_LAYER)


def _manifest(name: str) -> Path:
    host, user, model, tag = _parse(name)
    return store() / "manifests" / host / user / model / tag


def _blob(name: str, layer: str) -> Path | None:
    """Return the blob of the first layer of a type; None if the model has no such layer. Raises SourceError."""
    root, manifest = store(), _manifest(name)
    if not manifest.is_file():
        known = installed(root)
        has = f"; it has {', '.join(known[:10])}{' …' if len(known) > 10 else ''}" if known else ""
        raise SourceError(
            f"Ollama's store {root} has no model '{name}'{has}: run `ollama pull {name}`, or set OLLAMA_MODELS to the "
            "folder it uses"
        )
    try:
        with open(manifest, "rb") as file:
            layers = orjson.loads(file.read(_MOST_BYTES))["layers"]
        digests = [one["digest"] for one in layers if one.get("mediaType") == layer]
        match = _DIGEST.fullmatch(digests[0]) if digests else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"Ollama's manifest {manifest} cannot be read: {error}; run `ollama pull {name}`") from error
    if match is None:
        return None
    blob = root / "blobs" / f"sha256-{match[1]}"
    if not blob.is_file():
        raise MissingBlob(f"Ollama's manifest {manifest} points to {blob}, which is missing: run `ollama pull {name}`")
    return blob


def _parse(name: str) -> tuple[str, str, str, str]:
    path, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # no colon, or the colon of a port
        path, tag = name, DEFAULT_TAG
    parts = path.split("/")
    if len(parts) > 3:
        raise SourceError(f"'{name}' is not an Ollama model; write name, user/name or host/user/name, then :tag")
    host, user, model = (DEFAULT_HOST, DEFAULT_USER, "")[: 3 - len(parts)] + tuple(parts)
    if not _HOST.fullmatch(host) or not all(_PART.fullmatch(part) for part in (user, model, tag)):
        raise SourceError(f"'{name}' is not an Ollama model; write name, user/name or host/user/name, then :tag")
    return host, user, model, tag


def installed(root: Path) -> list[str]:
    """Return the names of the models in a store."""
    names = []
    for manifest in sorted((root / "manifests").glob("*/*/*/*")):
        host, user, model, tag = manifest.parts[-4:]
        short = [part for part, usual in ((host, DEFAULT_HOST), (user, DEFAULT_USER)) if part != usual]
        names.append("/".join([*short, model]) + f":{tag}")
    return names
