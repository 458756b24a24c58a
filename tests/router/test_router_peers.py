"""Models of other routers and servers, listed and served as this router's own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_process import Start, config, fake

from llamado.router.catalog import Rewrite
from llamado.router.peers import MAX_HOPS, Peer, Peers
from llamado.router.swap_config import SwapConfigError, read_swap_config


class EchoServer:
    """A server that returns every request as its response."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/base"
        self.silent = False
        self._held: list[socket.socket] = []
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if self.silent:
                self._held.append(connection)
                continue
            with closing(connection):
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
                while len(body) < int(headers.get("content-length", 0)):
                    body += connection.recv(65536)
                told = json.dumps({"first": lines[0], "headers": headers, "body": json.loads(body)}).encode()
                start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(told)
                connection.sendall(start + told)

    def close(self) -> None:
        self._socket.close()
        for connection in self._held:
            connection.close()


@pytest.fixture
def echo_server() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


def ask(router: Any, model: str, **more: Any) -> httpx.Response:
    headers = {"authorization": "Bearer the-client-s", "x-api-key": "the-client-s"}
    return router.http.post("/v1/chat/completions?a=b", json={"model": model, **more}, headers=headers)


def test_models_of_peers_are_listed_and_served(start_router: Start, echo_server: EchoServer, tmp_path: Path) -> None:
    filters = {"stripParams": "temperature, model", "setParams": {"provider": {"zdr": True}, "model": "no"}}
    peers = {
        "one": {"proxy": echo_server.url, "models": ["m", "both", "a"], "apiKey": "${secret-word}", "filters": filters},
        "two": {"proxy": echo_server.url, "models": ["both", "org/n"]},
    }
    router = start_router(config({"a": fake("A")}, peers=peers, macros={"secret-word": "sk-peer"}))
    listed = {one["id"]: one for one in router.http.get("/v1/models").json()["data"]}
    assert list(listed) == ["a", "m", "one/both", "one/a", "two/both", "org/n"]
    assert listed["m"]["name"] == "one: m" and listed["m"]["meta"] == {"llamaswap": {"peerID": "one"}}
    assert listed["a"]["source"] == "config" and listed["m"]["status"] == {"value": "remote"}
    assert router.http.get("/v1/models/org/n").json()["id"] == "org/n"

    got = ask(router, "m", temperature=1, seed=3).json()
    assert got["first"] == "POST /base/v1/chat/completions?a=b HTTP/1.1"
    assert got["body"] == {"model": "m", "seed": 3, "provider": {"zdr": True}}
    assert got["headers"]["authorization"] == "Bearer sk-peer" and got["headers"]["x-api-key"] == "sk-peer"
    got = ask(router, "two/both", temperature=1).json()
    assert got["body"] == {"model": "both", "temperature": 1}
    assert not {"authorization", "x-api-key"} & got["headers"].keys()
    assert ask(router, "a").json()["name"] == "A"  # own models take precedence
    assert ask(router, "one/a").json()["body"]["model"] == "a"
    assert ask(router, "both").status_code == 400
    assert "sk-peer" not in router.log.read_text()


def test_unavailable_peers(start_router: Start, echo_server: EchoServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nowhere = f"http://127.0.0.1:{gone.getsockname()[1]}"
    peers = {
        "gone": {"proxy": nowhere, "models": ["g"]},
        "slow": {"proxy": echo_server.url, "models": ["s"], "timeouts": {"responseHeader": 0.05}},
    }
    router = start_router({"peers": peers})
    echo_server.silent = True
    lost, late = ask(router, "g"), ask(router, "s")
    assert lost.status_code == 502 and "peer 'gone'" in lost.json()["error"]["message"]
    assert late.status_code == 504 and "peer 'slow' gave no answer within 0.05 s" in late.json()["error"]["message"]


def test_routing_loops_end(start_router: Start) -> None:
    def routers(url: str) -> Any:
        return start_router({"peers": {"other": {"proxy": url, "models": ["m"]}}})

    with socket.create_server(("127.0.0.1", 0)) as held:
        first = routers(f"http://127.0.0.1:{held.getsockname()[1]}")
    second = routers(first.url)
    first.server.router.peers = Peers([Peer(name="other", url=second.url, models=("m",))])
    answer = ask(first, "m")
    assert answer.status_code == 508 and f"{MAX_HOPS} routers" in answer.json()["error"]["message"]


def test_keys_are_not_printed() -> None:
    peer = Peer(name="p", url="http://h:1", models=("m",), key="sk-hidden", rewrite=Rewrite())
    assert "sk-hidden" not in repr(peer) + str(peer)


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        ("p: {models: [m]}", r"peers.p.proxy: expected http"),
        ("p: {proxy: 'ftp://h', models: [m]}", r"peers.p.proxy: expected http"),
        ("p: {proxy: 'http://h'}", r"peers.p.models: there is none"),
        ("p: {proxy: 'http://h', models: [m], apiKey: \"a\\nb\"}", r"peers.p.apiKey: the key has characters"),
        ("p: {proxy: 'http://h', models: [m], apiKey: '${env.NO_SUCH_KEY_HERE}'}", r"no NO_SUCH_KEY_HERE"),
        ("p: {proxy: 'http://h', models: [a]}", r"p/a is the name of a model of this router already"),
        ("p: {proxy: 'http://h', models: [m], timeouts: {responseHeader: x}}", r"expected a number"),
    ],
)
def test_errors_name_the_mistake(tmp_path: Path, peers: str, why: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"models: {{p/a: {{cmd: 'x --port ${{PORT}}'}}}}\npeers:\n  {peers}\n")
    with pytest.raises(SwapConfigError, match=why):
        read_swap_config(path)
