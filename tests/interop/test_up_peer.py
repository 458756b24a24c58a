"""`llamado up --engine llama.cpp`: real workers and a real server, kept running and ended as ours are."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tiny_models import make_llama
from waiting import until

sys.path.insert(0, str(Path(__file__).parent.parent / "cluster"))
from up_process import Up, answer

pytestmark = [pytest.mark.interop, pytest.mark.full]


@pytest.mark.slow
def test_real_programs_each_killed_in_turn(tmp_path: Path, peer_bin: Path) -> None:
    up = Up(tmp_path, make_llama(tmp_path / "tiny.gguf"))
    up.environment["PATH"] = f"{peer_bin}{os.pathsep}{up.environment['PATH']}"
    process = up.start("--nodes", "3", "--latency", "1", "--engine", "llama.cpp", "--", "-c", "256", "-np", "1")
    try:
        state = up.ready()
        expected = answer(state["url"])
        names = [service["name"] for service in state["services"]]
        assert names == ["worker1", "worker2", "tap1", "server"]
        commands = {s["name"]: Path(f"/proc/{s['pid']}/cmdline").read_text() for s in state["services"]}
        assert "ggml-rpc-server" in commands["worker1"] and "llama-server" in commands["server"]
        for name in names:
            before = {service["name"]: service["pid"] for service in up.ready()["services"]}
            os.kill(before[name], signal.SIGKILL)
            # A real server does not live without its workers: it is started again as well.
            changed = {one: pid for one, pid in before.items() if one in (name, "server")}

            def again(changed: dict[str, int] = changed) -> bool:
                now = up.state()["services"]
                return all(one["phase"] == "ready" and one["pid"] != changed.get(one["name"]) for one in now)

            until(again)
            assert answer(state["url"]) == expected, name
        process.kill()
        process.wait()
        until(lambda: not up.left())
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
