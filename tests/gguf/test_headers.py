"""A model's header is looked at before the rest is fetched: of every source, and of servers with and without ranges."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf_bytes as by
import httpx
import pytest
import stand_in_sites as loopback

from llamado.gguf.errors import GgufError, SourceError
from llamado.gguf.header import Header
from llamado.gguf.sources import header
from llamado.gguf.sources.fetch import ATTEMPTS
from llamado.gguf.sources.resolve import resolve
from llamado.gguf.types import TensorType

WEIGHTS = 24 << 20


class Refused(Exception):
    """What the checks of these tests raise."""


def model(n_words: int = 10, weights: int = WEIGHTS) -> bytes:
    words = b"".join(by.text(f"word {i}") for i in range(n_words))
    keys = [
        by.entry("general.architecture", by.STRING, by.text("quagga")),
        by.entry("tokenizer.ggml.tokens", by.ARRAY, by.array(by.STRING, n_words, words)),
    ]
    return by.file(keys, [by.tensor("a", [weights // 4])], bytes(weights))


def refuse(seen: Header) -> None:
    assert seen.metadata["general.architecture"] == "quagga"
    assert seen.types == {"a": TensorType.F32}
    raise Refused(seen.source)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "PAUSE", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("n_words", [10, 200_000])
def test_a_refused_url_costs_its_header(tmp_path: Path, ranges: bool, n_words: int) -> None:
    content = model(n_words)
    with loopback.serve(loopback.Site(files={"/m.gguf": content}, ranges=ranges)) as site:
        with pytest.raises(Refused, match=f"{site.url}/m.gguf"):
            resolve(f"{site.url}/m.gguf", cache_dir=tmp_path, check=refuse)
        head = len(content) - WEIGHTS
        # Without ranges the sockets' buffers fill before the server sees that nobody reads.
        assert site.sent["/m.gguf"] <= max(2 * head, 1 << 20) + (0 if ranges else 12 << 20) < len(content)
        assert not list(tmp_path.rglob("*.gguf*")) or not any(p.stat().st_size for p in tmp_path.rglob("*.gguf*"))
        wanted: list[Header] = []
        path = resolve(f"{site.url}/m.gguf", cache_dir=tmp_path, check=wanted.append)
        assert path.read_bytes() == content and len(wanted) == 1
        resolve(f"{site.url}/m.gguf", cache_dir=tmp_path, check=refuse)  # what is here is not looked at again


@pytest.fixture
def hub_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[loopback.Site]:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with loopback.serve(loopback.Site(headers={"ETag": f'"{"e" * 40}"'}, password="Bearer hf_secret")) as site:
        one, two = "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"
        loopback.add_repo(site, "me/split", {one: model(), two: bytes(WEIGHTS)})
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        yield site


@pytest.mark.slow
def test_of_a_split_model_on_the_hub_the_first_shard_is_looked_at(hub_site: loopback.Site, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="me/split/m-Q8_0-00001-of"):
        resolve("hf:me/split", cache_dir=tmp_path, check=refuse)
    assert sum(n for path, n in hub_site.sent.items() if path.endswith(".gguf")) <= 1 << 20
    assert not any("00002-of" in path for _, path, _ in hub_site.asked)
    path = resolve("hf:me/split", cache_dir=tmp_path, check=lambda seen: None)
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    resolve("hf:me/split", cache_dir=tmp_path, check=refuse)  # it is in the hub's cache


def test_a_short_name_is_refused_by_its_architecture_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is asked

    def check(seen: Header) -> None:
        raise Refused(f"{seen.source}: {seen.metadata['general.architecture']}")

    for name, says in (("glm", "GLM.*deepseek2"), ("qwen3", "Qwen3.*qwen3moe")):
        with pytest.raises(Refused, match=says):
            resolve(name, cache_dir=tmp_path, check=check)
    with pytest.raises(SourceError) as caught:
        resolve("unknown", cache_dir=tmp_path)
    assert "smollm2" in str(caught.value) and "qwen3" not in str(caught.value) and "glm" not in str(caught.value)


@pytest.mark.slow
def test_what_is_no_model_is_not_fetched(tmp_path: Path) -> None:
    page = b"<html>" + random.Random(1).randbytes(4 << 20)
    cut = model(weights=0)[:-60]
    with loopback.serve(loopback.Site(files={"/page": page, "/cut": cut, "/none.gguf": b""})) as site:
        for name, says in (
            ("page", "web page"),
            ("cut", f"{site.url}/cut.*it is damaged"),
            ("none.gguf", "ends too early"),
        ):
            with pytest.raises(GgufError, match=says):
                resolve(f"{site.url}/{name}", cache_dir=tmp_path, check=refuse)
        with pytest.raises(SourceError, match="404"):
            resolve(f"{site.url}/missing.gguf", cache_dir=tmp_path, check=refuse)
        assert site.sent.get("/page", 0) <= 1 << 20


@pytest.mark.slow
def test_a_server_that_is_busy_for_a_while(tmp_path: Path) -> None:
    with loopback.serve(loopback.Site(files={"/m.whl": model()}, failures=[503] * (ATTEMPTS - 1))) as site:
        with httpx.Client() as client:
            assert header.fetch_header(client, f"{site.url}/m.whl", "it").source == "it"
        site.failures = [503] * ATTEMPTS
        with httpx.Client() as client, pytest.raises(SourceError, match="503"):
            header.fetch_header(client, f"{site.url}/m.whl", "it")


@pytest.mark.slow
def test_a_broken_connection_is_taken_up_where_it_broke(tmp_path: Path) -> None:
    content = model(200_000)
    site = loopback.Site(files={"/m": content}, cut_after=300_000, cuts=3)
    with loopback.serve(site), httpx.Client() as client:
        seen = header.fetch_header(client, f"{site.url}/m", "it")
    assert len(seen.metadata.strings("tokenizer.ggml.tokens")) == 200_000


@pytest.mark.slow
def test_endless_headers_end(tmp_path: Path) -> None:
    """A count that only gigabytes could hold: no more is read than the largest header has."""
    promise = by.entry("a", by.STRING, struct.pack("<Q", 1 << 40))
    content = by.file([promise]) + bytes(70 << 20)
    with loopback.serve(loopback.Site(files={"/m": content})) as site:
        with httpx.Client() as client, pytest.raises(GgufError, match="ends too early"):
            header.fetch_header(client, f"{site.url}/m", "it")
        assert site.sent["/m"] < len(content)
