"""A model's process: start, readiness check, and shutdown."""

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
"""Exit codes above this stand for signals, as in a shell."""
_CHECK_TIMEOUT = 5.0  # seconds per health check
IDLE_STOP = 2.0  # seconds between SIGTERM and SIGKILL for an idle llamado process
PORT_WAIT = 5.0  # seconds for an earlier process to release its port

CRASHES = frozenset(
    128 + getattr(signal, name)
    for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP")
    if hasattr(signal, name)
)
"""Exit codes (in shell form) of processes that crashed."""

Progress = Callable[[float, str], None]


class LoadError(LlamadoError):
    """A model's process did not become ready. `exit_code` is None if the router killed it."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Child:
    """A model's process. `ended` is called once, after the process has exited."""

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
        """Process id; also the process group's id."""
        return 0 if self._process is None else self._process.pid

    @property
    def stopping(self) -> bool:
        """True once the process is being stopped."""
        return self._stopping

    def start(self) -> None:
        """Start the process. Raises LoadError."""
        try:
            self._process = GuardedProcess(
                self.args, self.model.launch.env, self._guard, on_line=self._on_output, on_exit=self._on_exit
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise LoadError(f"cannot start {self.args[0]}: {reason}", 127) from None

    def _on_output(self, line: str) -> None:
        name = self.model.name
        logging.getLogger(MODELS).info("[%s] %s", name, line, extra={"model": name})

    def _on_exit(self, code: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._finish, code)
        except RuntimeError:
            pass  # the loop is closed

    def _finish(self, code: int) -> None:
        self.pool.close()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        if not self.exit.done():
            self.exit.set_result(code)
        self._ended(self)

    @property
    def exit_code(self) -> int | None:
        """Exit code in shell form (128 + signal number); None while the process runs."""
        return self.exit.result() if self.exit.done() else None

    def last_words(self) -> str:
        """Return the last output line that looks like a reason; "" if there is none."""
        return "" if self._process is None else self._process.last_words()

    async def ready(self, progress: Progress) -> None:
        """Wait until the health check returns 200. Raises LoadError."""
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
            raise LoadError(
                f"{' '.join(self.args[:3])} … did not answer {self.pool.address}{launch.check} with 200 within "
                f"{launch.ready_timeout:g} s"
            ) from None
        raise LoadError(self.describe_exit(), self.exit_code)

    def describe_exit(self) -> str:
        """Return the exit status as text, with a reason if the process printed one."""
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
                health = orjson.loads(body)
                progress(float(health["progress"]), str(health["stage"]))
            except (ValueError, TypeError, KeyError):
                pass
        return status == 200

    async def port_is_free(self) -> bool:
        """Return True if no other process listens on the address. Waits up to PORT_WAIT for an earlier one to exit."""
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
        """Stop the process with its stop command or SIGTERM, then SIGKILL; return after it has exited.

        `idle`: the model has no requests. An idle llamado process loses nothing and is killed sooner, since another
        model may be waiting for the memory.
        """
        launch = self.model.launch
        patience = min(launch.stop_timeout, IDLE_STOP) if idle and self._socket is not None else launch.stop_timeout
        if self._process is None or self.exit.done():
            self._stopping = True  # cancels a pending start
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
                    log.warning("model %s: did not exit within %g s, killed", self.model.name, patience)
                self.signal(signal.SIGKILL)
        elif at_once:
            self.signal(signal.SIGKILL)
        # Bounded, because a process in uninterruptible sleep does not exit.
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
            log.warning("model %s: cmdStop %s failed (%s), sending SIGTERM", self.model.name, command[0], error)
            self.signal(signal.SIGTERM)
            return
        threading.Thread(target=process.wait, name="llamado-stop", daemon=True).start()

    def kill(self) -> None:
        """Kill the process without waiting."""
        self._stopping = True
        self.signal(signal.SIGKILL)

    def signal(self, sig: int) -> None:
        """Send a signal to the process group."""
        if self._process is not None:
            self._process.signal(sig)
