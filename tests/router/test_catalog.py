"""The catalog: models from flags, folders, presets and caches, their names, and their command lines."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import gguf
import pytest

from llamado.commands.cli import make_parser
from llamado.flags import FlagError, parse
from llamado.gguf.sources.catalog import LARGE
from llamado.installation import own_command
from llamado.router import presets
from llamado.router.catalog import Catalog, CatalogError, RoutedModel, cached_models, load, models_in
from llamado.router.downloads import remove_cached
from llamado.router.presets import PresetError, read_presets


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_ARG_CTX_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def catalog(*flags: str) -> Catalog:
    return load(parse(make_parser("serve"), "serve", flags)[0])


def arguments(model: RoutedModel) -> dict[str, Any]:
    """Return the flags of the model's process, with their values."""
    args = list(model.launch.args)
    assert args[:5] == own_command("serve")
    found: dict[str, Any] = {}
    for i, arg in enumerate(args[5:], 5):
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            follows = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else True
            found[name] = value if equals else follows
    return found


def test_models_by_flags() -> None:
    """Older guides give several -m, and aliases that name their file."""
    models = ["-m", "models/a.gguf", "-m", "models/b.gguf", "-m", "gemma3"]
    aliases = ["--alias", "one=a.gguf,two=b", "--alias", "uno=models/a.gguf"]
    found = catalog(*models, *aliases, "-c", "512", "--temp", "-1", "--metrics", "--no-slots")
    assert list(found.models) == ["gemma3", "one", "two"]
    one = found.models["one"]
    assert one.source == "command_line" and set(one.aliases) == {"a", "a.gguf", "models/a.gguf", "uno"}
    for name in ("one", "a", "a.gguf", "uno", "models/a.gguf"):
        assert found.find(name) is one
    assert found.find("c") is None
    given = arguments(one)
    assert given["--model"] == "models/a.gguf" and given["--alias"] == "one" and given["--ctx-size"] == "512"
    assert given["--temp"] == "-1.0" and given["--metrics"] is True and given["--no-slots"] is True


@pytest.mark.parametrize("name", ["--api-key", "-1", "--port=1", "-m", "a b", "--alias=x"])
def test_file_names_like_flags_stay_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A process gets the file and the name it was listed by, and nothing else."""
    (tmp_path / f"{name}.gguf").touch()
    monkeypatch.chdir(tmp_path)
    (model,) = catalog("--models-dir", ".").models.values()
    assert model.name == name
    given, _ = parse(make_parser("serve"), "serve", model.launch.args[5:])
    assert given.alias == [name] and [Path(path).name for path in given.model] == [f"{name}.gguf"]
    assert given.given == {"alias", "model"}


def test_one_model_may_have_bare_aliases(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    found = catalog("-m", "a.gguf", "--models-dir", str(tmp_path), "--alias", "n,m")
    assert list(found.models) == ["n", "x"] and found.find("m") is found.models["n"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-m", "a.gguf", "-m", "b.gguf", "-a", "x"], "of which model"),
        (["-m", "a.gguf", "-m", "b.gguf", "-a", "x=c.gguf"], "expected NAME=FILE"),
        (["-m", "a.gguf", "-m", "b.gguf", "-a", "=a.gguf"], "expected NAME=FILE"),
        (["-m", "a.gguf", "-m", "a.gguf"], "is given twice"),
    ],
)
def test_invalid_aliases(flags: list[str], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        catalog(*flags)


def test_duplicate_names() -> None:
    with pytest.raises(CatalogError, match="two models are called"):
        catalog("-m", "a.gguf", "-m", "b.gguf", "-a", "x=a.gguf,x=b.gguf")
    assert list(catalog("-m", "1/a.gguf", "-m", "2/a.gguf").models) == ["1/a.gguf", "2/a.gguf"]


def test_folder_of_models(tmp_path: Path) -> None:
    for name in (
        "single.gguf", "notes.txt", "mmproj-single.gguf", "mtp-x.gguf", "loose-00001-of-00002.gguf",
        "loose-00002-of-00002.gguf", "vision/v.gguf", "vision/mmproj-F16.gguf", "split/s-00001-of-00003.gguf",
        "split/s-00002-of-00003.gguf", "split/s-00003-of-00003.gguf", "empty/readme.md", "only/mmproj.gguf",
        "späce d/x.gguf",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "dangling.gguf").symlink_to("nowhere")
    found = models_in(str(tmp_path))
    assert {name: path.name for name, path in found.items()} == {
        "single": "single.gguf",
        "loose-00001-of-00002": "loose-00001-of-00002.gguf",
        "vision": "v.gguf",
        "split": "s-00001-of-00003.gguf",
        "späce d": "x.gguf",
    }
    with pytest.raises(CatalogError, match="no such folder"):
        models_in(str(tmp_path / "no"))


PRESETS = """\
version = 1
; a comment
[*]
c = 8192   # the context
n-predict = 5
metrics = true
load-on-startup = yes

[local]
c=4096
no-slots = 1
LLAMA_ARG_THREADS = 3
alias = first, second
tags = t2,t1
stop-timeout = 3
load-on-startup = off
port = 1234
api-key = secret
host = 0.0.0.0

[custom]
model = /abs/x.gguf
chat-template-kwargs = {"a": 1}
no-such-option = 5

[ggml-org/M-GGUF:q4_k_m]
temp = 0.5
"""


def test_presets(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line overrides a model's section, that overrides [*], and that overrides the environment."""
    logging.getLogger("llamado").propagate = True
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "local.gguf").touch()
    (folder / "other.gguf").touch()
    ini = tmp_path / "p.ini"
    ini.write_text(PRESETS.replace("\n", "\r\n"))
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "9")
    monkeypatch.setenv("LLAMA_API_KEY", "router's")
    found = catalog("--models-dir", str(folder), "--models-preset", str(ini), "-np", "2")
    assert list(found.models) == ["custom", "ggml-org/M-GGUF:Q4_K_M", "local", "other"]
    local, other = found.models["local"], found.models["other"]
    given = arguments(local)
    assert (given["--ctx-size"], given["--predict"], given["--threads"]) == ("4096", "5", "3")
    assert given["--metrics"] is given["--no-slots"] is True and given["--parallel"] == "2"
    assert not {"--port", "--api-key", "--host", "--models-dir"} & set(given) and given["--alias"] == "local"
    assert local.aliases == ("first", "second") and local.tags == ("t1", "t2") and local.source == "preset"
    assert local.launch.stop_timeout == 3 and not local.load_on_startup and other.load_on_startup
    assert "LLAMA_API_KEY" not in local.launch.env and local.launch.env["LLAMA_ARG_N_PREDICT"] == "9"
    assert arguments(other)["--ctx-size"] == "8192" and other.source == "models_dir"
    assert arguments(found.models["ggml-org/M-GGUF:Q4_K_M"])["--hf-repo"] == "ggml-org/M-GGUF:Q4_K_M"
    assert arguments(found.models["custom"])["--chat-template-kwargs"] == '{"a": 1}'
    assert "no-such-option" in caplog.text
    assert local.preset.startswith("[local]\n") and "ctx-size = 4096\n" in local.preset
    assert "stop-timeout = 3\n" in local.preset
    # A shown preset can be parsed again and means the same.
    ini.write_text(local.preset)
    again = catalog("--models-preset", str(ini), "-np", "2").models["local"]
    assert {**arguments(again), "--tags": ""} == {**given, "--tags": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LLAMA_ARG_N_PREDICT")
        ini.write_text(PRESETS)
        over = catalog("--models-dir", str(folder), "--models-preset", str(ini), "-c", "77").models["local"]
        assert arguments(over)["--ctx-size"] == "77"


def test_projectors_of_models(tmp_path: Path) -> None:
    """A preset names one; in a folder, the one in the model's own folder is its own. The router's is not inherited."""
    (tmp_path / "p.ini").write_text("[m]\nmodel = x.gguf\nmmproj = y.gguf\n")
    found = arguments(catalog("--models-preset", str(tmp_path / "p.ini"), "--mmproj", "z.gguf").models["m"])
    assert found["--mmproj"] == "y.gguf"
    for name in ("single.gguf", "mmproj-single.gguf", "vision/v-Q8_0.gguf", "vision/mmproj-F16.gguf",
                 "vision/mmproj-Q8_0.gguf"):  # fmt: skip
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "d" / name).touch()
    models = catalog("--models-dir", str(tmp_path / "d")).models
    found = arguments(models["vision"])
    assert found["--mmproj"] == str(tmp_path / "d" / "vision" / "mmproj-Q8_0.gguf")
    assert "--mmproj" not in arguments(models["single"])


def projector_file(path: Path, *kinds: str) -> None:
    """Write a projector file without tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "clip")
    for kind in kinds:
        writer.add_bool(f"clip.has_{kind}_encoder", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_media_of_models_that_are_not_loaded(tmp_path: Path) -> None:
    projector_file(tmp_path / "both.gguf", "vision", "audio")
    projector_file(tmp_path / "d" / "ear" / "mmproj.gguf", "audio")
    (tmp_path / "d" / "ear" / "m.gguf").touch()
    (tmp_path / "broken.gguf").write_text("GGUF?")
    (tmp_path / "p.ini").write_text(
        f"[both]\nmodel = x.gguf\nmmproj = {tmp_path}/both.gguf\n[broken]\nmodel = x.gguf\n"
        f"mmproj = {tmp_path}/broken.gguf\n[missing]\nmodel = x.gguf\nmmproj = no.gguf\n[none]\nmodel = x.gguf\n"
    )
    found = catalog("--models-preset", str(tmp_path / "p.ini"), "--models-dir", str(tmp_path / "d")).models
    assert {name: model.input_modalities for name, model in found.items()} == {
        "both": ("text", "image", "audio"), "broken": ("text",), "ear": ("text", "audio"), "missing": ("text",),
        "none": ("text",),
    }  # fmt: skip


def test_media_of_cached_models(tmp_path: Path) -> None:
    hub_model(tmp_path, "u/m", "m-Q4_K_M.gguf", "mmproj-F16.gguf")
    hub_model(tmp_path, "u/plain", "m-Q4_K_M.gguf")
    projector_file(tmp_path / "hf" / "hub" / "models--u--m" / "blobs" / "mmproj-F16.gguf", "vision")
    ini = tmp_path / "p.ini"
    ini.write_text("[off]\nhf-repo = u/m:q4_k_m\nmmproj-auto = 0\n[any]\nhf-repo = u/m\n")
    found = catalog("--models-preset", str(ini)).models
    assert {name: model.input_modalities for name, model in found.items()} == {
        "u/m:Q4_K_M": ("text", "image"), "u/plain:Q4_K_M": ("text",), "off": ("text",), "any": ("text", "image"),
    }  # fmt: skip


def test_a_projector_is_removed_with_the_last_model_that_has_it(tmp_path: Path) -> None:
    hub_model(tmp_path, "u/m", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16.gguf", "mmproj-Q8_0.gguf", "mmproj-F16.gguf")
    blobs = tmp_path / "hf" / "hub" / "models--u--m" / "blobs"

    def left() -> list[str]:
        return sorted(path.name for path in blobs.iterdir())

    assert remove_cached("u/m:BF16")
    assert left() == ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q8_0.gguf"]
    assert remove_cached("u/m:Q8_0")
    assert left() == ["m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"]
    assert remove_cached("u/m:Q4_K_M")
    assert left() == []


@pytest.mark.parametrize(
    ("text", "message", "left"),
    [
        ("[a\nmodel = x", "line 1: expected", ["good"]),
        ("[a]\nmodel x", "line 2: expected", ["good"]),
        ("[a]\nmodel = y\n1x = 2", "line 3: expected", ["good"]),
        ("[a]\nctx-size = 5", "which model", ["good"]),
        ("[a]\nmodel x\n[a]\nmodel = x", "line 2: expected", ["a", "good"]),
    ],
)
def test_a_malformed_section_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, message: str, left: list[str]
) -> None:
    """The router starts; the section is logged and its model is not served."""
    logging.getLogger("llamado").propagate = True
    path = tmp_path / "p.ini"
    path.write_text(f"{text}\n[good]\nmodel = g\n")
    assert sorted(catalog("--models-preset", str(path)).models) == left
    assert message in caplog.text
    assert "is ignored" in caplog.text and str(path) in caplog.text


def test_a_section_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "p.ini"
    path.write_text("[ a ]\nc = 1\nmodel = x\n[a]\nmodel = y\nmodel = z # w\n\n[b];x\nmodel=\n")
    sections = read_presets(path)
    assert sections["a"] == ({"model": ("z",)}, {}) and sections["b"] == ({"model": ("",)}, {})
    with pytest.raises(PresetError, match="No such file"):
        read_presets(tmp_path / "none")
    assert presets.canonical("u/m:foo-q4_0") == "u/m:Q4_0" and presets.canonical("plain") == "plain"


def hub_model(tmp_path: Path, repo: str, *files: str) -> None:
    folder = tmp_path / "hf" / "hub" / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for file in files:
        (folder / "blobs" / file).write_text("GGUF")
        (snapshot / file).symlink_to(folder / "blobs" / file)


def test_large_catalog_models_are_cached_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_MODELS", str(tmp_path / "models"))
    path = tmp_path / "models" / LARGE["qwen3"].file_name
    assert "qwen3" not in cached_models() and not remove_cached("qwen3")
    path.parent.mkdir()
    path.write_text("GGUF")
    assert arguments(catalog().models["qwen3"])["--model"] == "qwen3" and "glm" not in cached_models()
    assert remove_cached("qwen3") and not path.exists() and "qwen3" not in cached_models()


def test_cached_models(tmp_path: Path) -> None:
    hub_model(tmp_path, "u/m", "m-Q4_K_M.gguf", "m.q8_0.gguf", "mmproj-F16.gguf")
    hub_model(tmp_path, "u/split", "s-Q2_K-00001-of-00002.gguf", "s-Q2_K-00002-of-00002.gguf")
    hub_model(tmp_path, "u/part", "s-Q2_K-00001-of-00002.gguf")
    assert list(cached_models()) == ["u/m:Q4_K_M", "u/m:Q8_0", "u/split:Q2_K"]
    found = catalog()
    assert list(found.models) == ["u/m:Q4_K_M", "u/m:Q8_0", "u/split:Q2_K"]
    assert found.models["u/m:Q8_0"].source == "cache"
    assert arguments(found.models["u/m:Q8_0"])["--hf-repo"] == "u/m:Q8_0"
    # A preset that uses a cached model may hide the cached one.
    ini = tmp_path / "p.ini"
    ini.write_text("[*]\ndedup-cache-models = 1\n[mine]\nhf-repo = u/m:q8_0\n")
    found = catalog("--models-preset", str(ini))
    assert {name: model.hidden for name, model in found.models.items()} == {
        "mine": False, "u/m:Q4_K_M": False, "u/m:Q8_0": True, "u/split:Q2_K": False,
    }  # fmt: skip
    assert remove_cached("u/split:Q2_K") and remove_cached("u/m:Q8_0") and not remove_cached("u/m:Q8_0")
    assert list(cached_models()) == ["u/m:Q4_K_M"]
    left = sorted(path.name for path in (tmp_path / "hf").rglob("blobs/*"))
    assert left == ["m-Q4_K_M.gguf", "mmproj-F16.gguf", "s-Q2_K-00001-of-00002.gguf"]


def test_model_processes_get_no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools belong to the router; presets cannot enable them for a model's process."""
    monkeypatch.setenv("LLAMA_ARG_TOOLS", "all")
    preset = tmp_path / "models.ini"
    preset.write_text("[a]\nmodel = a.gguf\ntools = all\nmcp-servers-json = {}\nagent = true\n")
    flags = ("--models-preset", str(preset), "--tools", "all", "--ui-mcp-proxy", "--tools-runtime", "ssh:x")
    launch = catalog(*flags).models["a"].launch
    assert not [arg for arg in launch.args if re.match("--(tools|mcp|agent|ui-mcp)", arg)]
    assert "LLAMA_ARG_TOOLS" not in launch.env
