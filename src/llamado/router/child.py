"""One model's process: its start, how it is known to be ready, and its end under all circumstances."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import orjson

from llamado.errors import LlamadoError
from llamado.http.upstream import Pool, UpstreamAddress, UpstreamLost, get
from llamado.processes.guarded import GuardedProcess, Watchdog
from llamado.router.catalog import RoutedModel
from llamado.server.live.log_tail import MODELS

log = logging.getLogger("llamado.router")

_SIGNALED = 128
"""Exit codes above it tell of a signal, as a shell shows them."""
_CHECK_TIMEOUT = 5.0  # seconds a health check may take
IDLE_STOP = 2.0  # seconds that an idle process of ours gets between SIGTERM and SIGKILL
PORT_WAIT = 5.0  # seconds an earlier process may take to leave its port

CRASHES = frozenset(
    128 + getattr(signal, name)
    for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP")
    if hasattr(signal, name)
)
"""Exit codes, as a shell shows them, of processes that a fault of their own ended."""

Progress = Callable[[float, str], None]


class LoadFailed(LlamadoError):
    """A model's process did not get ready; `exit_code` is None when it was ended for that."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Child:
    """A model's process from its start to its end; `ended` is called once, with the exit code."""

    def __init__(
        self, model: RoutedModel, folder: Path, number: int, guard: Watchdog, ended: Callable[[Child], None]
    ) -> None:
        self.model = model
        launch = model.launch
        self._socket = folder / f"{number}.sock" if not launch.url else None
        self.args = [*launch.args, *(["--host", str(self._socket)] if self._socket else [])]
        self.pool = Pool(UpstreamAddress(path=str(self._socket)) if self._socket else UpstreamAddress.parse(launch.url))
        self._guard = guard
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._process: GuardedProcess | None = None
        self.exit: asyncio.Future[int] = self._loop.create_future()
        self._stopping = False

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        return 0 if self._process is None else self._process.pid

    @property
    def stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._stopping

    def start(self) -> None:
        """Start the process. Raises LoadFailed."""
        try:
            self._process = GuardedProcess(
                self.args, self.model.launch.env, self._guard, said=self._said, ended=self._gone
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise LoadFailed(f"cannot start {self.args[0]}: {reason}", 127) from None

    def _said(self, line: str) -> None:
        name = self.model.name
        logging.getLogger(MODELS).info("[%s] %s", name, line, extra={"model": name})

    def _gone(self, code: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._over, code)
        except RuntimeError:
            pass  # the loop is closed

    def _over(self, code: int) -> None:
        self.pool.close()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        if not self.exit.done():
            self.exit.set_result(code)
        self._ended(self)

    @property
    def exit_code(self) -> int | None:
        """Exit code as a shell shows it (128 + the signal's number); None while it runs."""
        return self.exit.result() if self.exit.done() else None

    def last_words(self) -> str:
        """The last line it printed that reads like a reason; "" if none does."""
        return "" if self._process is None else self._process.last_words()

    async def ready(self, progress: Progress) -> None:
        """Wait until it answers its health check with 200. Raises LoadFailed."""
        launch = self.model.launch
        began = self._loop.time()
        try:
            async with asyncio.timeout(launch.ready_timeout):
                while not self.exit.done():
                    if await self._healthy(progress):
                        return
                    waited = self._loop.time() - began
                    await asyncio.wait([self.exit], timeout=0.02 if waited < 3 else 0.1 if waited < 30 else 0.5)
        except TimeoutError:
            raise LoadFailed(
                f"{' '.join(self.args[:3])} … did not answer {self.pool.address}{launch.check} with 200 within "
                f"{launch.ready_timeout:g} s"
            ) from None
        raise LoadFailed(self.end(), self.exit_code)

    def end(self) -> str:
        """Return how the process ended, and its reason if it gave one."""
        code = self.exit_code or 0
        if code > _SIGNALED:
            try:
                return f"ended by {signal.Signals(code - _SIGNALED).name}"
            except ValueError:
                return f"ended by signal {code - _SIGNALED}"
        lines = () if self._process is None else self._process.last_lines
        words = self.last_words() or (lines[-1] if lines else "")
        return f"exit code {code}{': ' + words if words else ''}"

    async def _healthy(self, progress: Progress) -> bool:
        check = self.model.launch.check
        try:
            if not check:
                (await self.pool.connect()).abort()
                return True
            status, body = await get(self.pool, check, timeout=_CHECK_TIMEOUT)
        except (UpstreamLost, TimeoutError):
            return False
        if status != 200:
            try:
                told = orjson.loads(body)
                progress(float(told["progress"]), str(told["stage"]))
            except (ValueError, TypeError, KeyError):
                pass
        return status == 200

    async def port_is_free(self) -> bool:
        """Whether nobody else listens where it will; an earlier process gets a moment to go."""
        if self._socket is not None:
            return True
        end = self._loop.time() + PORT_WAIT
        while True:
            try:
                (await self.pool.connect()).abort()
            except UpstreamLost:
                return True
            if self._loop.time() >= end:
                return False
            await asyncio.sleep(0.1)

    async def stop(self, *, at_once: bool = False, idle: bool = False) -> None:
        """End it: its stop command or SIGTERM, and SIGKILL after the stop timeout; returns when it is gone.

        `idle`: nobody uses it. One of ours has nothing to lose then, and somebody may wait for its place.
        """
        launch = self.model.launch
        patience = min(launch.stop_timeout, IDLE_STOP) if idle and self._socket is not None else launch.stop_timeout
        if self._process is None or self.exit.done():
            self._stopping = True  # one that is about to start does not
            return
        if not self._stopping:
            self._stopping = True
            if not at_once:
                if launch.stop:
                    self._run_stop_command([word.replace("${PID}", str(self.pid)) for word in launch.stop])
                else:
                    self.signal(signal.SIGTERM)
                await asyncio.wait([self.exit], timeout=patience)
            if not self.exit.done():
                if not at_once:
                    log.warning("model %s did not end within %g s: killed", self.model.name, patience)
                self.signal(signal.SIGKILL)
        elif at_once:
            self.signal(signal.SIGKILL)
        # A process in uninterruptible sleep cannot be waited for longer than this.
        await asyncio.wait([self.exit], timeout=max(30.0, launch.stop_timeout + 5))

    def _run_stop_command(self, command: list[str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                env=dict(self.model.launch.env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            log.warning("model %s: cmdStop %s: %s; SIGTERM instead", self.model.name, command[0], error)
            self.signal(signal.SIGTERM)
            return
        threading.Thread(target=process.wait, name="llamado-stop", daemon=True).start()

    def kill(self) -> None:
        """End it at once, without waiting."""
        self._stopping = True
        self.signal(signal.SIGKILL)

    def signal(self, sig: int) -> None:
        """Send a signal to the process and all below it."""
        if self._process is not None:
            self._process.signal(sig)
