"""cluster.yaml: reading, errors, and agreement with the published schema."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from llamado.cluster.file import (
    ClusterConfig,
    ClusterFileError,
    LinkConfig,
    WorkerConfig,
    parse_cluster,
    read_cluster,
    schema,
)

PUBLISHED = Path(__file__).parents[2] / "docs" / "cluster.schema.json"

GOOD: list[dict[str, Any]] = [
    {},
    {"workers": 3, "model": "gemma3", "engine": "llama.cpp", "port": 0},
    {"workers": [{"link": {"latency": 20, "jitter": 1.5, "bandwidth": "1G", "all": True}}, {"threads": 1, "mem": 800}]},
    {
        "workers": [{"host": "10.0.0.7", "port": 50052}],
        "server": {"ctx-size": 4096, "metrics": True, "lora": ["a", "b"]},
    },
    {"restart": {"first": 1, "longest": 5.5, "settled": 0, "crashes": 3}, "stop_timeout": 1, "log_folder": "logs"},
]
# Invalid content and its message. The schema accepts WRONG, the reader does not.
BAD: list[tuple[Any, str]] = [
    ({"workes": 2}, "workes: unknown key; did you mean workers?"),
    ({"zzz": 2}, "zzz: unknown key; known keys: name, model,"),
    ({"workers": -1}, "workers: expected 0 to 64, got -1"),
    ({"workers": [{"prot": 1}]}, "workers[1].prot: unknown key; did you mean port?"),
    ({"workers": [{"link": {"latency": -1}}]}, "workers[1].link.latency: expected 0 to 1e+06, got -1"),
    ({"port": "8080"}, "port: expected an integer, got '8080'"),
    ({"port": True}, "port: expected an integer, got True"),
    ({"engine": "vllm"}, "engine: expected llamado or llama.cpp, got 'vllm'"),
    ({"restart": {"crashes": 1}}, "restart.crashes: expected 2 or more, got 1"),
    ({"server": {"x": [[1]]}}, "server.x[1]: expected a string or an integer or a number, got [1]"),
    ([1], "expected keys and values, got [1]"),
]
WRONG = [
    ({"name": "../x"}, "name: expected letters"),
    ({"server": {"port": 1}}, "server.port: use the key 'port' of the file"),
    (
        {"server": {"ssl-cert-file": "x"}, "replicas": 2},
        "server.ssl-cert-file: clients connect to the gateway; use gateway.ssl-cert-file",
    ),
    ({"workers": [{"host": "10.0.0.7"}]}, "workers[1]: 10.0.0.7 is another machine, where llamado up starts nothing"),
    ({"workers": [{"host": "10.0.0.7", "port": 1, "threads": 2}]}, "workers[1]: 10.0.0.7 is another machine"),
]


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: m.gguf\nworkers:\n- link: {latency: 20}\n- {port: 7, threads: 2}\nserver: {ctx_size: 64}\n")
    config = read_cluster(path)
    assert config.worker_list == (WorkerConfig(link=LinkConfig(latency=20.0)), WorkerConfig(port=7, threads=2))
    assert (config.model, config.server, config.port) == ("m.gguf", {"ctx-size": 64}, 8080)
    assert parse_cluster(None, "x") == ClusterConfig()
    assert len(parse_cluster({"workers": 3}, "x").worker_list) == 3


@pytest.mark.parametrize("given", GOOD)
def test_reader_and_schema_accept_good_files(given: dict[str, Any]) -> None:
    jsonschema_rs.validate(schema(), given)
    read = parse_cluster(given, "x")
    for key, value in given.items():
        found = getattr(read, key)
        if not isinstance(value, dict | list):
            assert found == value
    again = parse_cluster(yaml.safe_load(yaml.safe_dump(given)), "x")
    assert again == read


@pytest.mark.parametrize(("given", "message"), BAD)
def test_reader_and_schema_refuse_bad_files(given: Any, message: str) -> None:
    with pytest.raises(ClusterFileError) as refused:
        parse_cluster(given, "c.yaml")
    assert str(refused.value).startswith(f"c.yaml: {message}")
    assert not jsonschema_rs.is_valid(schema(), given)


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_the_reader_refuses_contradictions(given: Any, message: str) -> None:
    with pytest.raises(ClusterFileError) as refused:
        parse_cluster(given, "c.yaml")
    assert str(refused.value).startswith(f"c.yaml: {message}")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "invalid YAML"), (None, "No such file"), ("&a [*a]", "expected keys")]
)
def test_unreadable_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterFileError, match=message):
        read_cluster(path)


def test_the_published_schema_is_up_to_date() -> None:
    assert json.loads(PUBLISHED.read_text()) == schema()


def test_every_key_has_a_description() -> None:
    def check(part: dict[str, Any]) -> None:
        for name, key in part.get("properties", {}).items():
            assert key["description"], name
            for kind in (key, *key.get("anyOf", [])):
                check(kind)

    check(schema())
    assert set(schema()["properties"]) == {field.name for field in dataclasses.fields(ClusterConfig)}
