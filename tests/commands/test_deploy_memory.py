"""Memory limits of `llamado deploy`, computed from a model file on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tiny_models import make_llama

from llamado.cluster.deploy.deployment import Deployment
from llamado.commands import cli
from llamado.commands.deploy.memory import model_file, planned_memory

LONG = ("--override-kv", "llama.context_length=int:4194304")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layer=6)


def mib(size: str) -> int:
    return int(size.removesuffix("M"))


def planned(model: Path, *flags: str, workers: int = 0, replicas: int = 1, lws: bool = False) -> tuple[int, int]:
    what = Deployment(
        serve=("-m", str(model), *LONG, "-cram", "0", *flags), workers=workers, replicas=replicas, leader_worker_set=lws
    )
    found = planned_memory(what, "systemd")
    return mib(found.server), mib(found.worker)


def test_memory_grows_with_the_context(model: Path) -> None:
    """A longer context needs a larger KV cache, and more working memory for its masks."""
    few, many = (planned(model, "-c", str(n))[0] for n in (4096, 1 << 20))
    text = planned_memory(Deployment(serve=("-m", str(model), *LONG, "-c", str(1 << 20))), "systemd").text
    found = re.search(r"K/V cache of (\d+) tokens ([\d,]+) MiB", text)
    assert found is not None
    cells, cache = int(found[1]), int(found[2].replace(",", ""))
    assert cells > 4096 and many - few >= cache * (cells - 4096) / cells - 64
    assert planned(model, "-c", str(1 << 20), "-ctk", "q8_0", "-ctv", "q8_0")[0] < many


def test_prompt_cache_counts(model: Path) -> None:
    """It grows to at most half of the limit."""
    alone = planned(model)[0]
    assert planned(model, "-cram", "256")[0] == alone + 256
    assert abs(planned(model, "-cram", "-1")[0] - 2 * alone) <= 64


def test_workers_hold_the_layers_of_each_server(model: Path) -> None:
    context = ("-c", str(1 << 22), "-np", "1")
    alone, _ = planned(model, *context)
    server, worker = planned(model, *context, workers=2)
    assert server < alone and worker < alone
    _, three = planned(model, *context, workers=2, replicas=3)
    assert three > worker and planned(model, *context, workers=2, replicas=3, lws=True)[1] == worker


def test_limits_are_written(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", "1", "--", "-m", str(model)]
    found = planned_memory(Deployment(serve=("-m", str(model)), workers=1), "systemd")
    assert cli.main(["deploy", "systemd", *words]) == 0
    printed = capsys.readouterr()
    assert re.findall("MemoryMax=(.*)", printed.out) == [found.server, found.worker]
    assert f"memory of each server {found.server}, each worker {found.worker}: weights" in printed.err
    assert cli.main(["deploy", "kubernetes", *words]) == 0
    text = capsys.readouterr().out
    pods = [one["spec"]["template"]["spec"] for one in yaml.safe_load_all(text) if "template" in one.get("spec", {})]
    sizes = {pod["containers"][0]["name"]: pod["containers"][0]["resources"] for pod in pods}
    for part, size in (("server", found.server), ("worker", found.worker)):
        assert sizes[part] == {"requests": {"memory": f"{size}i"}, "limits": {"memory": f"{size}i"}}
    assert cli.main(["deploy", "compose", "--memory", "3G", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("memory: 3G") == 2 and "memory of each" not in printed.err


def test_model_path_in_containers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, place, mounted in (
        ([], "/models/tiny.gguf", model.parent),
        (["--models", str(model.parent.parent)], f"/models/{model.parent.name}/tiny.gguf", model.parent.parent),
    ):
        assert cli.main(["deploy", "compose", *folder, "--", "--alias", "a", "-m", str(model)]) == 0
        service = yaml.safe_load(capsys.readouterr().out.partition("\n# ---")[0])["services"]["server"]
        assert service["command"][:3] == ["serve", "--model", place]
        assert service["volumes"][0] == f"{mounted}:/models:ro"
        what = Deployment(serve=("-m", place), models=str(mounted))
        assert model_file(what, "compose") == model
    assert cli.main(["deploy", "systemd", "--", "-m", str(model)]) == 0
    assert f"--model {model} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-m", "/models/absent.gguf"], "there is no such file"),
        (["--models-dir", "/models"], "a router loads several models"),
        (["-m", "MODEL", "--rpc", "far:1"], "a part of the model is on the workers of --rpc"),
        (["-m", "MODEL", "-md", "/models/absent.gguf"], "/models/absent.gguf"),
        (["-m", "MODEL", "--chat-template-file", "/absent"], "/absent"),
    ],
)
def test_memory_that_cannot_be_planned_is_reported(
    flags: list[str], says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model) if word == "MODEL" else word for word in flags]
    assert cli.main(["deploy", "systemd", "--", *words]) == 0
    printed = capsys.readouterr()
    assert "no memory limits: " in printed.err and says in printed.err and "--memory SIZE sets them" in printed.err
    assert "MemoryMax" not in printed.out
