"""Model downloads started by API requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from llamado.errors import LlamadoError
from llamado.gguf.sources.catalog import CATALOG, LARGE
from llamado.gguf.sources.hub import split_quant
from llamado.gguf.sources.stored import remove, stored_models

log = logging.getLogger("llamado.router")

_EVERY = 0.1  # seconds between two progress reports


Updates: TypeAlias = asyncio.Queue[tuple[int, int] | str]
"""Progress of a download: (bytes done, bytes total); at the end the reason of a failure, or ""."""


class _CancelDownload(Exception):
    """Raised inside a download to cancel it."""


class Downloads:
    """Downloads models in threads. `changed(event, name, data)` is called on the event loop."""

    def __init__(self, changed: Callable[[str, str, Any], None], finished: Callable[[], None]) -> None:
        self._changed = changed
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._cancelled: dict[str, threading.Event] = {}
        self.progress: dict[str, dict[str, dict[str, int]]] = {}
        """(bytes done, bytes total) by model and file."""
        self._followers: dict[str, set[Updates]] = {}

    def start(self, name: str) -> None:
        """Start a download of a catalog name or `user/model[:quant]`. Raises SourceError for any other name."""
        spec = name if name in CATALOG or name in LARGE else None
        repo, quant = ("", None) if spec else split_quant(name)
        cancelled = threading.Event()
        self._cancelled[name] = cancelled
        self.progress[name] = {}
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            if cancelled.is_set():
                raise _CancelDownload
            now = time.monotonic()
            if now - last >= _EVERY or done == total:
                last = now
                self._call(self._report, name, done, total)

        def work() -> None:
            from llamado.engine.options import EngineOptions, ModelSource
            from llamado.engine.supported import fetch_model

            try:
                source = ModelSource(spec=spec, hf_repo=(f"{repo}:{quant}" if quant else repo) or None)
                fetch_model(source, EngineOptions(), progress=report, warn=lambda text: log.warning("%s", text))
            except _CancelDownload:
                self._call(self._finish, name, "it was cancelled")
            except LlamadoError as error:
                self._call(self._finish, name, "it was cancelled" if cancelled.is_set() else str(error))
            except Exception as error:
                self._call(self._finish, name, f"{type(error).__name__}: {error}")
            else:
                self._call(self._finish, name, "")

        self._changed("model_status", name, {"status": "downloading"})
        threading.Thread(target=work, name="llamado-fetch", daemon=True).start()

    def _call(self, function: Callable[..., None], *given: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *given)
        except RuntimeError:
            pass  # the event loop is closed

    def _report(self, name: str, done: int, total: int) -> None:
        if name in self.progress:
            self.progress[name] = {name: {"done": done, "total": total}}
            self._changed("download_progress", name, self.progress[name])
            for queue in self._followers.get(name, ()):
                queue.put_nowait((done, total))

    def _finish(self, name: str, reason: str) -> None:
        self.progress.pop(name, None)
        self._cancelled.pop(name, None)
        for queue in self._followers.pop(name, ()):
            queue.put_nowait(reason)
        if reason:
            log.error("download of %s failed: %s", name, reason)
            self._changed("download_failed", name, {"reason": reason})
        else:
            log.info("downloaded %s", name)
            self._finished()
            self._changed("download_finished", name, {})

    def join(self, name: str) -> Updates:
        """Return a queue that receives (bytes done, bytes total) of a running download.

        The last item is the reason of a failure, or "". Call this right after `start`, before the event loop runs
        again: a download can fail at once. Call `leave` at the end.
        """
        updates: Updates = asyncio.Queue()
        self._followers.setdefault(name, set()).add(updates)
        return updates

    def leave(self, name: str, updates: Updates) -> None:
        """Stop updating a queue. Without any queue left, the download is cancelled."""
        followers = self._followers.get(name, set())
        if updates in followers:
            followers.discard(updates)
            if not followers:
                del self._followers[name]
                self.cancel(name)

    def cancel(self, name: str) -> bool:
        """Cancel a download; return False if there is none."""
        cancelled = self._cancelled.get(name)
        if cancelled is None:
            return False
        cancelled.set()
        return True

    def close(self) -> None:
        """Cancel all downloads."""
        for cancelled in self._cancelled.values():
            cancelled.set()


def remove_cached(name: str) -> bool:
    """Delete the files of a cached model; return False if there were none."""
    for model in stored_models():
        if model.name == name and model.is_removable:
            remove(model)
            return True
    return False
