"""Memory that models of a router need, from the commands that start them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parsers import parser_of
from tiny_models import make_llama

from llamado.commands.memory_need import memory_need
from llamado.devices.limits import memory
from llamado.flags import FlagError, parse
from llamado.router import serve
from llamado.router.api.entries import model_entry
from llamado.router.catalog import Launch, RoutedModel
from llamado.router.fleet import Instance


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("need") / "tiny.gguf", n_vocab=320, n_ctx=65536)


def test_a_need_is_weights_and_cache_and_work(path: Path) -> None:
    def need(*flags: str, environment: Any = None) -> int:
        return memory_need(["/usr/bin/python3", "-m", "llamado", "serve", "-m", str(path), *flags], environment or {})

    small, large = need("-c", "1024"), need("-c", "32768")
    assert path.stat().st_size < small < large
    assert need("-c", "32768", "-ctk", "q8_0", "-ctv", "q8_0") < large
    assert need(environment={"LLAMA_ARG_CTX_SIZE": "32768"}) == large
    assert need() == need("-c", "4096")  # what it may be cut to
    assert need("-c", "1024", "--rpc", "far:1") < small  # workers have the weights
    assert memory_need(["llama-server", "--port", "1", "-m", str(path), "-c", "1024"], {}) == small
    assert memory_need(["/opt/llamado", "serve", "-m", str(path), "-c", "1024"], {}) == small


@pytest.mark.parametrize(
    "command",
    [
        ["vllm", "serve", "x"],
        ["docker", "run", "llama-server"],
        ["llama-server", "-m", "/nowhere/x.gguf"],
        ["llama-server"],
        ["llama-server", "-m", "smollm2", "--no-such-flag"],
    ],
    ids=range(5),
)
def test_unknown_need_is_0(command: list[str]) -> None:
    assert memory_need(command, {}) == 0


def test_the_limit_of_all_models() -> None:
    def limit(*flags: str) -> int:
        return serve._memory_limit(parse(parser_of("serve"), "serve", flags, {})[0])

    assert limit("--models-memory", "24G") == 24 << 30
    assert limit("--models-memory", "0") == 0
    assert limit() == memory().total
    with pytest.raises(FlagError, match="--models-memory"):
        limit("--models-memory", "much")


def test_models_show_their_need() -> None:
    instance = Instance(RoutedModel(name="m", source="preset", launch=Launch(args=("x",))))
    assert "memory" not in model_entry(instance, 0)
    instance.need = 5 << 20
    assert model_entry(instance, 0)["memory"] == 5 << 20
