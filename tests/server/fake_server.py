"""Server process over the fake engine: `python fake_server.py PORT_FILE [OPTION=VALUE]…`.

Options: load=SECONDS, fail (fail=KIND: see FAILURES), delay=SECONDS between tokens, tokens=N of an
answer, timeout=SECONDS, connections=N,
sleep=SECONDS, prefix=PATH, json (log), metrics, grace=SECONDS at its end, key=FILE and certificate=FILE (TLS),
parent=PIPE, whose end is that of the parent process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fakes import FakeEngine, served

from llamado.devices.device import DeviceFull, WorkerLost
from llamado.devices.split.placement import NotEnoughMemory
from llamado.engine.options import ModelSource
from llamado.errors import LlamadoError
from llamado.http import connections
from llamado.http.monitoring import logs
from llamado.http.sockets import listen
from llamado.rpc.client.workers import WorkersUnreachable
from llamado.rpc.transport import ConnectError
from llamado.server.model import ServedModel
from llamado.server.run import serve
from llamado.server.settings import Settings
from llamado.server.switches import Switches

FAILURES: dict[str, Exception] = {
    "": LlamadoError("the model file is broken"),
    "memory": NotEnoughMemory("the model needs 9 GB", {}),
    "no-memory": MemoryError(),
    "tensor": DeviceFull("RPC0 has no room for 9 GB more"),
    "unreachable": WorkersUnreachable("no response from 127.0.0.1:50052"),
    "refused": ConnectError("connection refused by 127.0.0.1:50052"),
    "lost": WorkerLost("RPC0", "it closed the connection"),
}


def main(arguments: Sequence[str]) -> int:
    port_file, *given = arguments
    options = dict(argument.partition("=")[::2] for argument in given)
    logs.configure(as_json="json" in options)

    def load(settings: Settings, report: Callable[[float, str], None]) -> ServedModel:
        seconds = float(options.get("load", "0"))
        for step in range(10):
            report(step / 10, "pretending to load")
            time.sleep(seconds / 10)
        if "fail" in options:
            raise FAILURES[options["fail"]]
        engine = FakeEngine(delay=float(options.get("delay", "0")), answer="x" * int(options.get("tokens", "50")))
        return replace(served(engine), close=engine.close)

    if "parent" in options:
        os.environ["LLAMADO_PARENT_FD"] = str(os.open(options["parent"], os.O_RDONLY))
    if "grace" in options:
        connections.GRACE = int(options["grace"])
    sockets = listen(("127.0.0.1",), 0)
    Path(port_file).write_text(str(sockets[0].getsockname()[1]))
    most = options.get("connections")
    settings = Settings(
        source=ModelSource(spec="fake"),
        switches=Switches(
            sleep_idle_seconds=int(options.get("sleep", "-1")),
            api_prefix=options.get("prefix", ""),
            metrics="metrics" in options,
        ),
        timeout=int(options.get("timeout", "3600")),
        ssl_key=options.get("key"),
        ssl_cert=options.get("certificate"),
        max_connections=None if most is None else int(most),
    )
    return serve(settings, load, sockets)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
