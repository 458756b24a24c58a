"""One model's process: its start, how it is known to be ready, and its end under all circumstances."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

import orjson

from llamado.errors import LlamadoError
from llamado.installation import python_command
from llamado.router import watchdog
from llamado.router.catalogue import RoutedModel
from llamado.router.log_tail import MODELS
from llamado.router.upstream import Pool, UpstreamAddress, UpstreamLost, get

log = logging.getLogger("llamado.router")

_LINE = 8192  # bytes of a log line
_CHECK_TIMEOUT = 5.0  # seconds a health check may take
IDLE_STOP = 2.0  # seconds that an idle process of ours gets between SIGTERM and SIGKILL
PORT_WAIT = 5.0  # seconds an earlier process may take to leave its port

CRASHES = frozenset(
    128 + sig for sig in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)
)
"""Exit codes, as a shell shows them, of processes that a fault of their own ended."""

Progress = Callable[[float, str], None]


class LoadFailed(LlamadoError):
    """A model's process did not get ready; `exit_code` is None when it was ended for that."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Watchdog:
    """The process of `watchdog.py`: ends the models when this one cannot any more. Started again when it dies."""

    def __init__(self, grace: float, folder: Path) -> None:
        self._grace = grace
        self._folder = folder
        self.cookie = secrets.token_hex(16)
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The watchdog's process id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._discard()
        command = python_command("-I", "-S", watchdog.__file__, self.cookie, str(self._grace), str(self._folder))
        environment = {name: value for name, value in os.environ.items() if name != watchdog.VARIABLE}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        for group in self._groups:
            self._tell(f"+{group}")

    def watch(self, group: int) -> None:
        """A process group began."""
        self._groups.add(group)
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """A process group ended."""
        self._groups.discard(group)
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        process = self._process
        try:
            if process is not None and process.stdin is not None:
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
        except OSError:
            if line != "end":
                # Somebody killed it. The new one hears of all groups.
                self.start()

    def end(self) -> None:
        """All models have ended; it may go."""
        self._tell("end")
        self._discard()

    def _discard(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.stdin is not None:
                process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Child:
    """A model's process from its start to its end; `ended` is called once, with the exit code."""

    def __init__(
        self, model: RoutedModel, folder: Path, number: int, watch: Watchdog, ended: Callable[[Child], None]
    ) -> None:
        self.model = model
        launch = model.launch
        self._socket = folder / f"{number}.sock" if not launch.url else None
        self.args = [*launch.args, *(["--host", str(self._socket)] if self._socket else [])]
        self.pool = Pool(UpstreamAddress(path=str(self._socket)) if self._socket else UpstreamAddress.parse(launch.url))
        self._watch = watch
        self._mark = f"{watch.cookie}-{number}"
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self.exit: asyncio.Future[int] = self._loop.create_future()
        self._stopping = False
        self._last_lines: deque[str] = deque(maxlen=20)

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
        marks = {watchdog.VARIABLE: self._watch.cookie, watchdog.OWN_VARIABLE: self._mark}
        env = dict(self.model.launch.env) | marks
        self._watch.start()
        try:
            # A session of its own: what a shell or a container's client starts below it ends with it, and a
            # terminal's Ctrl-C reaches the router alone.
            self._process = subprocess.Popen(
                self.args,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise LoadFailed(f"cannot start {self.args[0]}: {reason}", 127) from None
        self._watch.watch(self.pid)
        assert self._process.stdout is not None
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="llamado-log", daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(reader,), name="llamado-wait", daemon=True).start()

    def _read(self, output: IO[bytes]) -> None:
        name = self.model.name
        logger = logging.getLogger(MODELS)
        with output:
            while line := output.readline(_LINE):
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self._last_lines.append(text)
                    logger.info("[%s] %s", name, text, extra={"model": name})

    def _wait(self, reader: threading.Thread) -> None:
        process = self._process
        assert process is not None
        if hasattr(os, "waitid"):
            # Until it is reaped its id belongs to nobody else, so whatever is left of its group can be ended.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        code = process.wait()
        for pid in watchdog.marked(self._mark, watchdog.OWN_VARIABLE):
            # It left the group, as a daemon does; nobody would ever end it.
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        reader.join(0.2)
        try:
            self._loop.call_soon_threadsafe(self._over, 128 - code if code < 0 else code)
        except RuntimeError:
            pass  # the loop is closed

    def _over(self, code: int) -> None:
        self._watch.forget(self.pid)
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
        for line in reversed(list(self._last_lines)):
            if "error" in line.lower() or line.startswith("llamado:"):
                return line
        return ""

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
        words = self.last_words() or (self._last_lines[-1] if self._last_lines else "")
        raise LoadFailed(f"exit code {self.exit_code}{': ' + words if words else ''}", self.exit_code)

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
        if self._process is not None and not self.exit.done():
            try:
                os.killpg(self.pid, sig)
            except (ProcessLookupError, PermissionError):
                pass
