"""Models at a URL."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import httpx
import numpy as np
import pytest
from stand_in_sites import Site, serve
from tiny_models import make_llama

from llamado import outgoing
from llamado.engine.options import EngineOptions, ModelSource
from llamado.gguf.errors import SourceError
from llamado.gguf.header import Header
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources import fetch, urls
from llamado.gguf.sources.resolve import read_header, resolve
from llamado.server.load import load_served
from llamado.server.settings import Settings


def test_a_url_is_fetched_once(tmp_path: Path) -> None:
    with serve(Site(files={"/a/model.gguf": b"GGUF one", "/b/model.gguf": b"GGUF two"})) as site:
        one = resolve(f"{site.url}/a/model.gguf", cache_dir=tmp_path)
        assert one.read_bytes() == b"GGUF one" and one.name.startswith("model-") and one.suffix == ".gguf"
        assert resolve(f"{site.url}/b/model.gguf?x=1", cache_dir=tmp_path).read_bytes() == b"GGUF two"
        asked = len(site.asked)
        assert resolve(f"{site.url}/a/model.gguf", cache_dir=tmp_path) == one and len(site.asked) == asked


@pytest.mark.full
def test_downloads_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))
    content = make_llama(tmp_path / "made.gguf").read_bytes()
    with serve(Site(files={"/model.gguf": content})) as site, caplog.at_level("INFO", "llamado.server"):
        settings = Settings(source=ModelSource(spec=f"{site.url}/model.gguf"), engine=EngineOptions(n_threads=1))
        for lines in (2, 0):  # the second finds it here
            caplog.clear()
            load_served(settings, lambda share, what: None).close(1)
            said = [text for text in caplog.messages if text.startswith(f"fetching {site.url}/model.gguf: ")]
            assert len(said) >= lines and bool(said) == bool(lines)
            size = f"{len(content) / 1e6:.1f}"
            assert not said or said[-1].endswith(f": {size} of {size} MB")


def test_an_unreachable_url(tmp_path: Path) -> None:
    with serve(Site()) as site, pytest.raises(SourceError, match="404"):
        resolve(f"{site.url}/nope.gguf", cache_dir=tmp_path)
    assert not list((tmp_path / "models").glob("*.gguf"))


def test_the_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with serve(Site(files={"/..%2f..%2fevil.gguf": b"GGUF"})) as site:
        path = resolve(f"{site.url}/..%2f..%2fevil.gguf", cache_dir=tmp_path)
        assert path.parent == tmp_path / "models" and path.is_file()


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="https"):
        resolve("ftp://host/x.gguf", cache_dir=tmp_path)


def split_model(folder: Path) -> dict[str, bytes]:
    """The three files of a model of three tensors, by their names."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    for i in range(3):
        writer.add_tensor(f"blk.{i}.w", np.full((4, 32), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {path.name: path.read_bytes() for path in sorted(folder.glob("m-*.gguf"))}


def test_all_parts_of_a_split_model_are_fetched(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    files = split_model(tmp_path / "made")
    first, *others = files
    reports: list[tuple[int, int]] = []

    def check(seen: Header) -> None:
        assert sorted(seen.tensors) == ["blk.0.w", "blk.1.w", "blk.2.w"] and seen.n_shards == 3
        assert not list((tmp_path / "models").glob("*.gguf*")), "nothing is fetched before it"

    with serve(Site(files={f"/a/{name}": content for name, content in files.items()})) as site:
        url = f"{site.url}/a/{first}?download=true"
        assert read_header(url, cache_dir=tmp_path).n_shards == 3
        path = resolve(url, cache_dir=tmp_path, check=check, progress=lambda *now: reports.append(now))
        asked = len(site.asked)
        assert resolve(url, cache_dir=tmp_path) == path and len(site.asked) == asked
        path.with_name(path.name.replace("00001-of", "00002-of")).unlink()
        assert resolve(url, cache_dir=tmp_path) == path
        assert {asked[1] for asked in site.asked[asked:]} == {f"/a/{others[0]}"}, "what is missing alone"
    size = sum(map(len, files.values()))
    assert reports[-1] == (size, size) and [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert {total for _, total in reports} == {size}
    with GGUFFile.open(path) as file:
        assert [float(file.data(f"blk.{i}.w").view(np.float32)[0]) for i in range(3)] == [0, 1, 2]


def serving(content: bytes, announced: bool = False, **headers: str) -> httpx.MockTransport:
    """A server without ranges, which announces its sizes or does not."""

    def answer(request: httpx.Request) -> httpx.Response:
        size = {"content-length": str(len(content))} if announced else {}
        pieces = [content[at : at + 65536] for at in range(0, len(content), 65536)]
        return httpx.Response(200, headers=size | headers, content=iter(pieces))

    return httpx.MockTransport(answer)


@pytest.mark.parametrize(
    ("extra", "announced", "error"),
    [
        (0, False, ""),
        (100, True, ""),  # padding
        (2 << 20, False, "the server sends more"),
        (2 << 20, True, "the server announces"),
        (-50, False, "the connection ended"),
    ],
)
def test_a_file_has_the_size_that_its_header_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: int, announced: bool, error: str
) -> None:
    content = make_llama(tmp_path / "made.gguf").read_bytes()
    content = content[:extra] if extra < 0 else content + bytes(extra)
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    monkeypatch.setattr(
        urls.UrlModel, "_client", lambda self: outgoing.open_client(transport=serving(content, announced))
    )
    if not error:
        path = resolve("http://x/m.gguf", cache_dir=tmp_path, check=lambda header: None)
        assert path.read_bytes() == content
        return
    with pytest.raises(SourceError, match=error):
        resolve("http://x/m.gguf", cache_dir=tmp_path, check=lambda header: None)
    assert not [path for path in (tmp_path / "models").iterdir() if path.suffix == ".gguf"]


def test_a_file_of_unknown_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls.UrlModel, "_client", lambda self: outgoing.open_client(transport=serving(b"GGUF")))
    with pytest.raises(SourceError, match="does not announce the size"):
        resolve("http://x/m.gguf", cache_dir=tmp_path)


@pytest.mark.parametrize("by", ["fragment", "header"])
def test_a_hash_is_checked_wherever_it_is_stated(tmp_path: Path, by: str) -> None:
    content = b"GGUF one"
    for digest, error in (("0" * 64, "is damaged"), (hashlib.sha256(content).hexdigest(), "")):
        site = Site(files={"/m.gguf": content}, linked={"/m.gguf": digest} if by == "header" else {})
        with serve(site):
            url = f"{site.url}/m.gguf" + (f"#sha256={digest}" if by == "fragment" else "")
            if error:
                with pytest.raises(SourceError, match=error):
                    resolve(url, cache_dir=tmp_path)
                assert not list((tmp_path / "models").glob("*.gguf"))
            else:
                assert resolve(url, cache_dir=tmp_path).read_bytes() == content
    with serve(Site(files={"/m.gguf": content})) as site, pytest.raises(SourceError, match="64 hexadecimal digits"):
        resolve(f"{site.url}/m.gguf#sha256=abc", cache_dir=tmp_path)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_split_model_of_which_a_part_is_missing(tmp_path: Path, missing: int) -> None:
    (tmp_path / "made").mkdir()
    files = split_model(tmp_path / "made")
    names = list(files)
    files.pop(names[missing])
    with serve(Site(files={f"/{name}": content for name, content in files.items()})) as site:
        with pytest.raises(SourceError, match=f"{names[missing]}: the server answers 404"):
            resolve(f"{site.url}/{names[0]}", cache_dir=tmp_path, check=lambda seen: None)
        with pytest.raises(SourceError, match=f"one of 3 parts.*{names[0]}"):
            resolve(f"{site.url}/{names[1]}", cache_dir=tmp_path)
    assert not list((tmp_path / "models").glob("*.gguf*"))
