"""`llamado up` with real workers and a real server: start, answers, kills, drains and the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cluster_events import after_message
from tiers import first_of
from tiny_models import make_llama
from up_process import BODY, Up, answer
from waiting import GUARD, until

from llamado.processes.identity import is_same


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    found = Up(tmp_path, make_llama(tmp_path / "tiny.gguf"))
    yield found
    for process in found.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(GUARD)
    until(lambda: not found.left())


@pytest.mark.slow
@pytest.mark.parametrize("given", first_of(["--nodes 2", "--nodes 3 --latency 1"]))
def test_every_service_can_be_killed_in_turn(up: Up, given: str) -> None:
    process = up.start(*given.split(), "--", "-c", "256")
    state = up.ready()
    names = [service["name"] for service in state["services"]]
    assert names == (["worker1", "worker2", "tap1", "server"] if "--latency" in given else ["worker1", "server"])
    expected = answer(state["url"])
    assert len(expected) > 8
    for name in names:
        before = next(service for service in up.ready()["services"] if service["name"] == name)
        os.kill(before["pid"], signal.SIGKILL)

        def again(name: str = name, pid: int = before["pid"]) -> bool:
            now = next(service for service in up.state()["services"] if service["name"] == name)
            return now["pid"] not in (0, pid) and now["phase"] == "ready" and now["restarts"] == 1

        until(again)
        assert answer(state["url"]) == expected, name
    assert all(f"{name.ljust(7)} | " in up.printed("logs") for name in names)
    assert "all slots are idle" in up.printed("logs", "server")
    assert up.printed("drain", "server") == "server is drained\n"
    assert up.printed("down") == "default has stopped\n"
    assert process.wait(GUARD) == 0, (up.folder / "out").read_text()
    assert not up.left()
    assert "no cluster" in up.command("down").stderr


@pytest.mark.full
def test_the_lab_kills_a_worker_and_it_returns(up: Up) -> None:
    """The event stream shows both, and only workers of this cluster can be killed."""
    stranger = subprocess.Popen(["sleep", "600"])
    up.processes.append(stranger)  # type: ignore[arg-type]
    up.start("--nodes", "3", "--latency", "1", "--", "-c", "256", "--lab", "--rpc-failover", "1")
    url = up.ready()["url"]
    expected = answer(url)
    links = httpx.get(f"{url}/lab").json()["links"]
    assert [(link["own"], link["running"], link["watched"]) for link in links] == [(True, True, True)] * 2
    for link in links:  # the first is behind a tap of the cluster's own
        before = {service["name"]: service["pid"] for service in up.ready()["services"]}
        seen: list[str] = []
        view: Any = None
        with httpx.stream("GET", f"{url}/cluster/events", timeout=GUARD) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                view = after_message(view, json.loads(line[6:]))
                state = next(one["state"] for one in view["devices"] if one.get("endpoint") == link["endpoint"])
                if not seen:
                    killed = httpx.post(f"{url}/lab/kill", json={"endpoint": link["endpoint"]}, timeout=GUARD)
                    assert killed.status_code == 200, killed.text
                if seen[-1:] != [state]:
                    seen.append(state)
                if len(seen) > 1 and state == "ready":
                    break
        assert seen[0] == "ready" and len(seen) > 1, seen
        after = {service["name"]: service["pid"] for service in up.ready()["services"]}
        assert {name for name in after if after[name] != before[name]} == {f"worker{links.index(link) + 1}"}
        assert answer(url) == expected
    for wrong in (str(stranger.pid), f"127.0.0.1:{httpx.URL(url).port}", stranger.pid, links[0]["worker"]):
        assert httpx.post(f"{url}/lab/kill", json={"endpoint": wrong}).status_code == 400
    assert httpx.post(f"{url}/lab/start", json={"endpoint": links[0]["endpoint"]}).status_code == 400
    assert stranger.poll() is None
    assert all(service["restarts"] == int(service["role"] == "worker") for service in up.ready()["services"])
    # The server finds a drained worker by its link, so layers are moved, not lost.
    assert up.command("drain", "worker2").stdout == "worker2 is drained\n"
    devices = {one.get("endpoint"): one for one in httpx.get(f"{url}/cluster").json()["devices"]}
    assert links[1]["endpoint"] not in devices and devices[links[0]["endpoint"]]["state"] == "ready"
    assert answer(url) == expected


@pytest.mark.full
def test_a_worker_is_drained_during_requests_over_https_with_a_prefix(up: Up) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("elsewhere.example")  # not a name of this machine
    certificate, key = up.folder / "cert.pem", up.folder / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    tls = ["--ssl-cert-file", str(certificate), "--ssl-key-file", str(key)]
    process = up.start("--nodes", "3", "--latency", "1", "--", "-c", "512", *tls, "--api-prefix", "/llm")
    url = up.ready()["url"]
    assert url.startswith("https://127.0.0.1:") and url.endswith("/llm")
    body = {"prompt": "Once upon a time", "n_predict": 200, "temperature": 0, "ignore_eos": True, "stream": True}

    def text(started: threading.Event) -> str:
        found = ""
        with httpx.stream("POST", f"{url}/completion", json=body, verify=False, timeout=GUARD) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["content"]
                    started.set()
        return found

    expected = text(threading.Event())
    with ThreadPoolExecutor(4) as pool:
        began = [threading.Event() for _ in range(4)]
        streams = [pool.submit(text, one) for one in began]
        assert all(one.wait(GUARD) for one in began)
        assert up.command("drain", "tap1").stdout == "tap1 is drained\n"
        assert [stream.result() for stream in streams] == [expected] * 4
    expected_phases = {"worker1": "drained", "tap1": "drained", "worker2": "ready", "server": "ready"}
    until(lambda: {service["name"]: service["phase"] for service in up.state()["services"]} == expected_phases)
    server = next(service for service in up.state()["services"] if service["name"] == "server")
    os.kill(server["pid"], signal.SIGKILL)
    until(lambda: up.state()["services"][-1]["restarts"] == 1 and up.ready())
    assert text(threading.Event()) == expected
    process.terminate()
    assert process.wait(GUARD) == 0, (up.folder / "out").read_text()


@pytest.mark.full
def test_a_gateway_serves_while_a_replica_is_killed(up: Up) -> None:
    file = up.folder / "cluster.yaml"
    file.write_text("replicas: 2\nworkers: 1\nserver: {ctx-size: 256}\nrestart: {first: 3600, longest: 3600}\n")
    up.start(str(file))
    state = up.ready()
    names = [service["name"] for service in state["services"]]
    assert names == ["worker1.1", "worker2.1", "server1", "server2", "gateway"]
    assert state["url"].endswith(state["services"][-1]["address"])
    expected = answer(state["url"])
    pid = next(service["pid"] for service in state["services"] if service["name"] == "server1")
    os.kill(pid, signal.SIGKILL)
    until(lambda: "was ended by SIGKILL" in up.state()["services"][2]["message"])
    shown = up.command("ps").stdout
    assert "│ server1   │ restarting │" in shown
    with httpx.Client(base_url=state["url"], timeout=GUARD) as http:
        for _ in range(4):  # no request fails while one replica is away
            response = http.post("/completion", json=BODY)
            assert response.status_code == 200 and response.json()["content"].encode() == expected
            assert response.headers["x-llamado-replica"] == state["services"][3]["address"]
    assert up.command("drain", "server1").stdout == "server1 is drained\n"
    assert answer(state["url"]) == expected
    assert "not drained" in up.command("drain", "server2", "--undo").stderr
    assert up.command("drain", "server1", "--undo").stdout == "server1 is ready\n"
    until(lambda: httpx.get(f"{state['url']}/gateway/status").json()["replicas"][0]["state"] == "ready")
    assert answer(state["url"]) == expected


@pytest.mark.full
def test_no_process_survives_a_killed_cluster(up: Up) -> None:
    process = up.start("--nodes", "2", "--", "-c", "256")
    services = up.ready()["services"]
    process.kill()
    process.wait()
    for service in services:
        until(lambda service=service: not is_same(service["pid"], service["mark"]))
    until(lambda: not up.left())
    assert up.state()["phase"] == "gone" and "was killed" in up.command("ps").stdout
    up.start("--", "-c", "256")  # the name is free
    assert len(up.ready()["services"]) == 1


@pytest.mark.full
def test_leftovers_of_a_killed_watchdog_are_ended(up: Up) -> None:
    """`llamado down` ends them. A reused process id is left alone."""
    process = up.start("--nodes", "2", "--", "-c", "256")
    services = up.ready()["services"]
    guards = [pid for pid in up.left() if b"watchdog.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(guards) == 1
    process.send_signal(signal.SIGSTOP)  # otherwise it would start another one
    os.kill(guards[0], signal.SIGKILL)
    process.kill()
    process.wait()
    assert all(is_same(service["pid"], service["mark"]) for service in services)
    path = up.folder / "run" / "llamado" / "default" / "state.json"
    state = json.loads(path.read_text())
    other = subprocess.Popen(["sleep", "600"])
    up.processes.append(other)  # type: ignore[arg-type]
    state["services"].append({**state["services"][0], "name": "other", "pid": other.pid, "mark": "1"})
    path.write_text(json.dumps(state))
    assert "was killed; its remaining processes were stopped" in up.command("down").stdout
    assert not any(is_same(service["pid"], service["mark"]) for service in services)
    assert other.poll() is None


@pytest.mark.full
def test_detach_and_a_taken_name(up: Up) -> None:
    file = up.folder / "cluster.yaml"
    file.write_text(f"name: mine\nmodel: {up.model}\nport: 0\nworkers: 1\nserver: {{ctx-size: 256}}\n")
    done = up.command("up", str(file), "--detach")
    assert done.returncode == 0 and done.stdout.startswith("ready: http://127.0.0.1:"), done.stderr
    assert answer(done.stdout.split()[1])
    again = up.command("up", str(file))
    assert again.returncode == 1 and "a cluster named 'mine' runs already" in again.stderr
    assert up.command("down", "mine").stdout == "mine has stopped\n"


@pytest.mark.full
def test_an_invalid_model_is_refused(up: Up) -> None:
    up.model.write_bytes(b"nothing")
    for more in ([], ["--detach"]):
        done = up.command("up", "-m", str(up.model), "--port", "0", *more)
        assert done.returncode == 1 and "not a GGUF file" in done.stderr and "Traceback" not in done.stderr
    assert not up.left()
