"""A model's header is looked at before the rest is fetched: of every source, and of servers with and without ranges."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import gguf_bytes as by
import httpx
import pytest
import stand_in_sites as loopback
from tiers import first_of

from llamado.gguf.errors import GgufError, SourceError
from llamado.gguf.header import Header
from llamado.gguf.sources import fetch, header
from llamado.gguf.sources.catalog import LARGE
from llamado.gguf.sources.fetch import ATTEMPTS
from llamado.gguf.sources.resolve import read_header, resolve
from llamado.gguf.types import TensorType

WEIGHTS = 24 << 20


class CheckFailed(Exception):
    """Raised by the checks of these tests."""


@cache
def model(n_words: int = 10, weights: int = WEIGHTS, name: str = "a") -> bytes:
    words = b"".join(by.text(f"word {i}") for i in range(n_words))
    keys = [
        by.entry("general.architecture", by.STRING, by.text("quagga")),
        by.entry("tokenizer.ggml.tokens", by.ARRAY, by.array(by.STRING, n_words, words)),
    ]
    return by.file(keys, [by.tensor(name, [weights // 4])], bytes(weights))


def refuse(seen: Header) -> None:
    assert seen.metadata["general.architecture"] == "quagga"
    assert [(info.name, info.type, info.shard) for info in seen.tensors.values()] == [("a", TensorType.F32, 0)]
    raise CheckFailed(seen.source)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "PAUSE", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("answer", first_of([(True, 200_000), (False, 10), (True, 10), (False, 200_000)], 2), ids=str)
def test_a_rejected_url_costs_only_its_header(tmp_path: Path, answer: tuple[bool, int]) -> None:
    ranges, n_words = answer
    content = model(n_words)
    with loopback.serve(loopback.Site(files={"/m.gguf": content}, ranges=ranges)) as site:
        with pytest.raises(CheckFailed, match=f"{site.url}/m.gguf"):
            resolve(f"{site.url}/m.gguf", cache_dir=tmp_path, check=refuse)
        head = len(content) - WEIGHTS
        # Without ranges the sockets' buffers fill before the server notices that the client stopped reading.
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
        loopback.add_repo(
            site, "me/split", {one: model(), two: model(0, name="b"), "m-Q2_K.gguf": model(), "m-Q4_K_M.gguf": b""}
        )
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        yield site


@pytest.mark.slow
def test_of_a_split_model_on_the_hub_all_headers_are_looked_at(hub_site: loopback.Site, tmp_path: Path) -> None:
    def check(seen: Header) -> None:
        assert [(info.name, info.shard) for info in seen.tensors.values()] == [("a", 0), ("b", 1)]
        assert seen.n_shards == 2 and seen.nbytes == 2 * WEIGHTS < seen.file_bytes
        assert seen.alternatives == {"hf:me/split:Q2_K": len(model())}, "those whose sizes are known"
        raise CheckFailed(seen.source)

    for _ in range(2):
        with pytest.raises(CheckFailed, match="me/split/m-Q8_0-00001-of"):
            resolve("hf:me/split:Q8_0", cache_dir=tmp_path, check=check)
    assert sum(n for path, n in hub_site.sent.items() if path.endswith(".gguf")) <= 3 << 20
    assert not list(tmp_path.rglob("*.gguf"))
    path = resolve("hf:me/split:Q8_0", cache_dir=tmp_path, check=lambda seen: None)
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    resolve("hf:me/split:Q8_0", cache_dir=tmp_path, check=refuse)  # it is in the hub's cache


@pytest.mark.slow
def test_a_header_alone(hub_site: loopback.Site, tmp_path: Path) -> None:
    """`inspect` reads the same from local files and from servers."""
    path = tmp_path / "m-Q2_K.gguf"
    path.write_bytes(model())
    found = {spec: read_header(spec, cache_dir=tmp_path) for spec in (str(path), "hf:me/split:Q2_K")}
    here, there = found.values()
    assert here.tensors == there.tensors and here.metadata.keys() == there.metadata.keys()
    assert (here.version, here.alignment, here.file_bytes, here.n_shards) == (3, 32, len(model()), 1)
    assert there.file_bytes == here.file_bytes and (here.mapped, there.mapped) == (True, False)
    assert max(hub_site.sent.values()) <= 1 << 20 and not list(tmp_path.rglob("models--*"))
    resolve("hf:me/split:Q2_K", cache_dir=tmp_path)
    hub_site.sent.clear()
    assert read_header("hf:me/split:Q2_K", cache_dir=tmp_path).tensors == here.tensors
    assert not any(path.endswith(".gguf") for path in hub_site.sent), "what is in the cache is not asked for"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LLAMADO_MODELS", raising=False)
    return tmp_path / "home"


@pytest.mark.slow
def test_a_large_model_with_a_short_name(
    hub_site: loopback.Site, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    entry = LARGE["qwen3"]
    content = model()
    loopback.add_repo(hub_site, entry.repo, {entry.file_name: content, "Q-Q2_K.gguf": content[:50]})
    url = f"/{entry.repo}/resolve/main/{entry.file_name}"
    hub_site.linked[url] = hashlib.sha256(content).hexdigest()
    seen: list[Header] = []

    def refuse_later(header: Header) -> None:
        seen.append(header)
        raise CheckFailed

    with pytest.raises(CheckFailed):
        resolve("qwen3", check=refuse_later)
    assert seen[0].alternatives == {f"hf:{entry.repo}:Q2_K": 50} and not (home / ".models").exists()
    hub_site.cut_after, hub_site.cuts = 2 << 20, 2  # the connection breaks twice, and it goes on
    hub_site.asked.clear()
    path = resolve("qwen3", check=seen.append)
    assert path == home / ".models" / entry.file_name and path.read_bytes() == content
    ranges = [asked for method, at, asked in hub_site.asked if method == "GET" and at == url]
    assert ranges[1:] == [None, f"bytes={2 << 20}-", f"bytes={4 << 20}-"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve("qwen3", check=refuse_later) == path, "what is there is not asked for"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match=r"\.models.GLM-4\.7-Flash-Q4_K_M\.gguf is not fetched.*--offline"):
        resolve("glm")


@pytest.mark.slow
def test_a_large_model_that_arrives_damaged(hub_site: loopback.Site, home: Path) -> None:
    entry = LARGE["glm"]
    loopback.add_repo(hub_site, entry.repo, {entry.file_name: model()})
    hub_site.linked[f"/{entry.repo}/resolve/main/{entry.file_name}"] = "0" * 64
    with pytest.raises(SourceError, match="damaged"):
        resolve("glm")
    assert not list(home.rglob("*.gguf")) and not list(home.rglob("*.part"))


def test_a_disk_without_room(
    hub_site: loopback.Site, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = LARGE["glm"]
    loopback.add_repo(hub_site, entry.repo, {entry.file_name: model()})
    stats = os.statvfs(tmp_path)
    free = SimpleNamespace(f_bavail=WEIGHTS // stats.f_frsize, f_frsize=stats.f_frsize)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    with pytest.raises(SourceError, match=r"25 MB are needed.*LLAMADO_MODELS"):
        resolve("glm", check=lambda _: None)
    with pytest.raises(SourceError, match=r"50 MB are needed.*HF_HOME"):
        resolve("hf:me/split:Q8_0", cache_dir=tmp_path, check=lambda _: None)
    assert sum(hub_site.sent.values()) <= 4 << 20


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="smollm2, gemma3, glm, qwen3"):
        resolve("unknown", cache_dir=tmp_path)


@pytest.mark.slow
def test_files_that_are_no_models_are_not_downloaded(tmp_path: Path) -> None:
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
