"""Models that are being fetched because somebody asked the router to."""

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

_EVERY = 0.1  # seconds between two reports of progress


Updates: TypeAlias = asyncio.Queue[tuple[int, int] | str]
"""Progress of a download: bytes done and in all; at the end why it failed, or ""."""


class _Cancelled(Exception):
    """Raised inside of a download that nobody wants any more."""


class Downloads:
    """Fetches models in threads; `changed(event, name, data)` hears of them on the event loop."""

    def __init__(self, changed: Callable[[str, str, Any], None], finished: Callable[[], None]) -> None:
        self._changed = changed
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._cancelled: dict[str, threading.Event] = {}
        self.progress: dict[str, dict[str, dict[str, int]]] = {}
        """Bytes done and in all, by model and file."""
        self._followers: dict[str, set[Updates]] = {}

    def start(self, name: str) -> None:
        """Fetch a model: a name of the catalog or `user/model[:quant]`. Raises SourceError when it is neither."""
        spec = name if name in CATALOG or name in LARGE else None
        repo, quant = ("", None) if spec else split_quant(name)
        cancelled = threading.Event()
        self._cancelled[name] = cancelled
        self.progress[name] = {}
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            if cancelled.is_set():
                raise _Cancelled
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
            except _Cancelled:
                self._call(self._over, name, "it was cancelled")
            except LlamadoError as error:
                self._call(self._over, name, "it was cancelled" if cancelled.is_set() else str(error))
            except Exception as error:
                self._call(self._over, name, f"{type(error).__name__}: {error}")
            else:
                self._call(self._over, name, "")

        self._changed("model_status", name, {"status": "downloading"})
        threading.Thread(target=work, name="llamado-fetch", daemon=True).start()

    def _call(self, function: Callable[..., None], *given: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *given)
        except RuntimeError:
            pass  # the router has ended

    def _report(self, name: str, done: int, total: int) -> None:
        if name in self.progress:
            self.progress[name] = {name: {"done": done, "total": total}}
            self._changed("download_progress", name, self.progress[name])
            for queue in self._followers.get(name, ()):
                queue.put_nowait((done, total))

    def _over(self, name: str, reason: str) -> None:
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
        """Return a queue that gets the bytes done and in all of a model that is being fetched, as they change.

        The last item says why fetching failed, or is "". Call it right after `start`, before the event loop runs
        again: a download may fail at once. Call `leave` at the end.
        """
        updates: Updates = asyncio.Queue()
        self._followers.setdefault(name, set()).add(updates)
        return updates

    def leave(self, name: str, updates: Updates) -> None:
        """Stop updating a queue. When the last one leaves, the model is fetched no further."""
        followers = self._followers.get(name, set())
        if updates in followers:
            followers.discard(updates)
            if not followers:
                del self._followers[name]
                self.cancel(name)

    def cancel(self, name: str) -> bool:
        """Stop fetching a model; False when it is not being fetched."""
        cancelled = self._cancelled.get(name)
        if cancelled is None:
            return False
        cancelled.set()
        return True

    def close(self) -> None:
        """Stop all."""
        for cancelled in self._cancelled.values():
            cancelled.set()


def remove_cached(name: str) -> bool:
    """Delete a cached model's files; False when there were none."""
    for model in stored_models():
        if model.name == name and model.is_removable:
            remove(model)
            return True
    return False
