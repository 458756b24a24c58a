"""Server processes over the fake engine, forked from a process that has imported everything.

`python server_processes.py` is that process: it reads and writes one line of JSON per command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class ServerProcess:
    """A server: `fake_server.py` with arguments, its stderr in a file."""

    def __init__(self, source: Source, log: Path, arguments: list[str]) -> None:
        self._source, self._log = source, log
        self.returncode: int | None = None
        self.pid: int = source.ask({"start": arguments, "log": str(log)})

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._source.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fake_server.py", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait(60)

    def log(self) -> str:
        """Return the output so far."""
        return self._log.read_text(errors="replace")


class Source:
    """The process from which servers are forked."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def fork(log: str, arguments: list[str]) -> int:
    """Start a server; return its process."""
    import fake_server

    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for number, (path, flags) in enumerate(
            ((os.devnull, os.O_RDONLY), (os.devnull, os.O_WRONLY), (log, os.O_WRONLY | os.O_CREAT))
        ):
            file = os.open(path, flags, 0o600)
            os.dup2(file, number)
            os.close(file)
        code = fake_server.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(code)


def main() -> None:

    for line in sys.stdin:
        what = json.loads(line)
        if "start" in what:
            answer: int | None = fork(what["log"], what["start"])
        else:
            process, status = os.waitpid(what["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if process else None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
