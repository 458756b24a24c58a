"""Models at a URL."""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_in_sites import Site, serve

from llamado.gguf.errors import SourceError
from llamado.gguf.sources.resolve import resolve


def test_a_url_is_fetched_once(tmp_path: Path) -> None:
    with serve(Site(files={"/a/model.gguf": b"GGUF one", "/b/model.gguf": b"GGUF two"})) as site:
        one = resolve(f"{site.url}/a/model.gguf", cache_dir=tmp_path)
        assert one.read_bytes() == b"GGUF one" and one.name.startswith("model-") and one.suffix == ".gguf"
        assert resolve(f"{site.url}/b/model.gguf?x=1", cache_dir=tmp_path).read_bytes() == b"GGUF two"
        asked = len(site.asked)
        assert resolve(f"{site.url}/a/model.gguf", cache_dir=tmp_path) == one and len(site.asked) == asked


def test_a_url_that_leads_nowhere(tmp_path: Path) -> None:
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
