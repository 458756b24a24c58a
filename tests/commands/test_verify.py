"""`llamado verify` with equal and different servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llamado.client import seed_of
from llamado.commands import cli
from llamado.commands.verify import generated_prompts


class Replica:
    """Server whose tokens depend on the seed. `change` may modify its response."""

    def __init__(self, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None) -> None:
        self.change = change or (lambda asked, told: None)
        self.asked: list[dict[str, Any]] = []
        self.most = self._now = 0
        """Maximum concurrent requests."""
        self._lock = threading.Lock()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                data = json.dumps(replica.tell(self.path, body)).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                data = json.dumps({"build_info": "b1-real", "model_path": "/m.gguf"}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def tell(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": [1000 + (ord(c) % 50) for c in asked["content"][:3]]}
        if asked.get("n_probs"):
            place = len(asked["prompt"]) - 3
            top = [{"id": i, "token": f"t{i}", "logprob": -float(i)} for i in range(place, place + 5)]
            return {"completion_probabilities": [{"top_logprobs": top}]}
        with self._lock:
            self.asked.append(asked)
            self._now += 1
            self.most = max(self.most, self._now)
        tokens = [(asked["seed"] >> i) % 100 for i in range(asked["n_predict"])]
        receipt = {
            "build": "b11434-llamado-1", "model": "m", "files": [{"name": "m.gguf", "sha256": "aa"}],
            "instruction_set": "avx2", "profile_id": "p", "profile": {}, "seed": asked["seed"],
        }  # fmt: skip
        told = {"tokens": tokens, "content": "".join(f"t{t}" for t in tokens), "stop_type": "limit",
                "llamado_receipt": receipt, "model": "m"}  # fmt: skip
        self.change(asked, told)
        with self._lock:
            self._now -= 1
        return told

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(*given: Any) -> Replica:
        made.append(Replica(*given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["verify", *arguments])
    return code, capsys.readouterr().out


Make = Callable[..., Replica]
Output = pytest.CaptureFixture[str]


def test_equal_servers(replica: Make, capsys: Output) -> None:
    a, b, c = replica(), replica(), replica()
    code, out = verify(capsys, a.url, b.url, c.url, "-n", "20", "--parallel", "3", "--n-predict", "5")
    assert code == 0 and "20 prompts, 3 at once: all answers equal, byte by byte" in out
    assert a.url in out and "m.gguf aa avx2, profile p" in out
    for one in (a, b, c):
        assert one.most <= 3
        asked = sorted((r["prompt"], r["seed"]) for r in one.asked)
        assert asked == sorted((p, seed_of(f"verify-{i}")) for i, p in enumerate(generated_prompts(20)))


def test_first_differing_token(replica: Make, capsys: Output) -> None:
    wrong = seed_of("verify-7")

    def change(asked: dict[str, Any], told: dict[str, Any]) -> None:
        if asked["seed"] == wrong:
            told["tokens"][3] += 1
            told["content"] += "!"

    a, b = replica(), replica(change)
    code, out = verify(capsys, a.url, b.url, "-n", "10", "--n-predict", "6", "--json")
    found = json.loads(out)
    assert code == 1 and not found["equal"] and found["different_answers"] == 1
    (difference,) = found["differences"]
    assert difference["number"] == 7 and difference["seed"] == wrong and difference["token"] == 3
    ours, theirs = difference["sides"]
    assert theirs["token"] == ours["token"] + 1 and ours["repeats_itself"] and theirs["repeats_itself"]
    assert [p["id"] for p in ours["top"]] == [3, 4, 5, 6, 7]  # after three equal tokens
    code, out = verify(capsys, a.url, b.url, "-n", "10", "--n-predict", "6")
    assert code == 1 and f"prompt 7 (seed {wrong}): token 3 differs" in out and "1 answer(s) differ" in out


def test_different_bytes_and_shorter_answers(replica: Make, capsys: Output) -> None:
    def content(asked: dict[str, Any], told: dict[str, Any]) -> None:
        told["content"] += " "

    def shorter(asked: dict[str, Any], told: dict[str, Any]) -> None:
        told["tokens"] = told["tokens"][:2]

    for change, place in ((content, 4), (shorter, 2)):
        code, out = verify(capsys, replica().url, replica(change).url, "-n", "1", "--n-predict", "4", "--json")
        assert code == 1 and json.loads(out)["differences"][0]["token"] == place


def test_server_with_varying_answers(replica: Make, capsys: Output) -> None:
    seen: set[str] = set()

    def change(asked: dict[str, Any], told: dict[str, Any]) -> None:
        if asked["prompt"] in seen:
            told["content"] += "?"
        seen.add(asked["prompt"])
        told["tokens"][0] += 1

    code, out = verify(capsys, replica().url, replica(change).url, "-n", "2", "--n-predict", "4")
    assert code == 1 and out.count("its answer differs again when idle") == 2


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"files": [{"name": "m.gguf", "sha256": "bb"}]}, 1, "the model files differ"),
        ({"profile_id": "q"}, 1, "the sampler profiles differ"),
        ({"build": "b2"}, 0, "the builds differ"),
        ({"instruction_set": "vnni"}, 0, "the instruction sets differ"),
    ],
)
def test_receipts_are_compared(replica: Make, capsys: Output, changes: dict[str, Any], code: int, said: str) -> None:
    def change(asked: dict[str, Any], told: dict[str, Any]) -> None:
        told["llamado_receipt"] |= changes

    found, out = verify(capsys, replica().url, replica(change).url, "-n", "2")
    assert found == code and said in out


def test_server_without_receipts(replica: Make, capsys: Output) -> None:
    def change(asked: dict[str, Any], told: dict[str, Any]) -> None:
        del told["llamado_receipt"]

    real = replica(change)
    code, out = verify(capsys, replica().url, real.url, "-n", "2")
    assert code == 0 and f"no receipts from {real.url}" in out and "b1-real, /m.gguf" in out


def test_errors(replica: Make, capsys: Output) -> None:
    assert cli.main(["verify", "http://h:1"]) == 2
    assert cli.main(["verify", "http://h:1", "http://h:2", "--parallel", "0"]) == 2
    assert cli.main(["verify", replica().url, "http://127.0.0.1:1", "-n", "1"]) == 1
    assert "cannot be asked" in capsys.readouterr().err
