"""llama-swap's config.yaml: the forms in its documentation, defaults, and error messages."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llamado.router.catalog import Group
from llamado.router.swap_config import SwapConfig, SwapConfigError, command, read_swap_config


def read(tmp_path: Path, text: str) -> SwapConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return read_swap_config(path)


def test_minimal_config(tmp_path: Path) -> None:
    config = read(tmp_path, "models:\n  m1:\n    cmd: llama-server --port ${PORT} -m /x.gguf\n")
    (model,) = config.models
    assert model.launch.args == ("llama-server", "--port", "5800", "-m", "/x.gguf")
    assert model.launch.url == "http://localhost:5800" and model.launch.check == "/health"
    assert model.launch.ready_timeout == 120 and model.ttl == 0 and model.limit == 0 and not model.rewrite
    assert model.group == Group(name="(default)", swap=True, exclusive=True, persistent=False)
    assert config.preload == config.api_keys == () and config.log_level == "info"


FULL = """
healthCheckTimeout: 500
logLevel: warn
logTimeFormat: ""
startPort: 10001
globalTTL: 30
includeAliasesInList: true
apiKeys: ["sk-1", "${env.ROUTER_KEY}"]
macros:
  "latest-llama": >
    /path/to/llama-server
    --port ${PORT}
  "default_ctx": 4096
  "default_args": "--ctx-size ${default_ctx}"
  "home": "${env.ROUTER_HOME}/models"
models:
  "gpt":
    macros:
      "default_ctx": 16384
      "temp": 0.7
    cmd: |
      # a comment
      ${latest-llama} \\
      --model '${home}/gpt 20b.gguf'
        # another
      ${default_args} --temp ${temp} --flag "a b" --say '"x"'
    name: "GPT ${temp}"
    description: "one of OpenAI's, ${MODEL_ID} on ${PORT}"
    env: ["CUDA_VISIBLE_DEVICES=0,1", "EMPTY="]
    proxy: http://127.0.0.1:${PORT}/base/
    checkEndpoint: /custom
    ttl: 60
    useModelName: "openai/gpt"
    filters:
      strip_params: "temperature, top_p, model"
      setParams: {top_k: 3}
      setParamsByID:
        "${MODEL_ID}:low": {effort: low}
    aliases: ["gpt-4o-mini", {id: g, name: "G ${temp}!", unlisted: false}, {id: hidden, unlisted: true}]
    metadata:
      port: ${PORT}
      note: "on ${PORT} with ${temp}"
      list: [1, "${temp}", {a: "${MODEL_ID}"}]
    concurrencyLimit: 4
    sendLoadingState: false
  "hidden-one":
    unlisted: true
    ttl: 0
    cmd: llama-server --port ${PORT} -m y.gguf
  "docker":
    proxy: "http://127.0.0.1:9999"
    cmd: docker run --name ${MODEL_ID} --rm -p 9999:8080 image
    cmdStop: docker stop ${MODEL_ID} --pid ${PID}
    checkEndpoint: none
groups:
  forever:
    exclusive: false
    persistent: true
    members: ["docker"]
hooks:
  on_startup:
    preload: ["gpt-4o-mini", "nobody"]
"""


def test_full_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_KEY", "sk-2")
    monkeypatch.setenv("ROUTER_HOME", "/home/me")
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    config = read(tmp_path, FULL)
    models = {model.name: model for model in config.models}
    assert (config.api_keys, config.preload, config.log_level) == (("sk-1", "sk-2"), ("gpt-4o-mini",), "warn")
    gpt = models["gpt"]
    assert gpt.launch.args == (
        *("/path/to/llama-server", "--port", "10001", "--model", "/home/me/models/gpt 20b.gguf"),
        *("--ctx-size", "16384", "--temp", "0.7", "--flag", "a b", "--say", '"x"'),
    )
    assert gpt.launch.url == "http://127.0.0.1:10001/base/" and gpt.launch.check == "/custom"
    assert gpt.launch.ready_timeout == 500 and (gpt.ttl, gpt.limit) == (60, 4)
    assert gpt.launch.env["CUDA_VISIBLE_DEVICES"] == "0,1" and gpt.launch.env["EMPTY"] == ""
    assert "LLAMA_ARG_PORT" not in gpt.launch.env
    assert gpt.aliases == ("gpt-4o-mini", "g", "hidden", "gpt:low")
    assert gpt.alias_titles == {"gpt-4o-mini": "", "g": "G 0.7!"}
    assert (gpt.title, gpt.description) == ("GPT 0.7", "one of OpenAI's, gpt on 10001")
    assert gpt.metadata == {"port": 10001, "note": "on 10001 with 0.7", "list": [1, 0.7, {"a": "gpt"}]}
    body = {"model": "gpt:low", "temperature": 1, "x": 1}
    gpt.rewrite.apply(body, "gpt:low")
    assert body == {"model": "openai/gpt", "x": 1, "top_k": 3, "effort": "low"}
    hidden, docker = models["hidden-one"], models["docker"]
    assert hidden.hidden and hidden.ttl == 0 and hidden.launch.args[2] == "10002" and docker.ttl == 30
    assert docker.launch.check == "" and docker.launch.stop == ("docker", "stop", "docker", "--pid", "${PID}")
    assert docker.group == Group(name="forever", swap=True, exclusive=False, persistent=True)


def test_unknown_keys_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "matrix: {}\nprofiles: {x: {}}\nmodels:\n  a: {cmd: x, proxy: 'http://h:1', color: red, filters: {f: 1}}\n"
    logging.getLogger("llamado").propagate = True
    read(tmp_path, text)
    assert "matrix, profiles, models.a.color, models.a.filters.f" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models: there is none"),
        ("[1]", "the file: expected keys and values"),
        ("a: [", "no YAML"),
        ("models: {a: {}}", "models.a.cmd: there is no command"),
        ("models: {a: {cmd: x}}", "models.a.proxy: where does the command listen"),
        ("models: {a: {cmd: x, proxy: 'localhost:1'}}", "models.a.proxy: expected http://host:port"),
        ("models: {a: {cmd: x, proxy: 'http://h:99999'}}", "models.a.proxy: expected http://host:port"),
        ("models: {a: {cmd: x, proxy: 'http://['}}", "models.a.proxy: expected http://host:port"),
        ("models: {a: {cmd: 'x ${NO}', proxy: 'http://h:1'}}", "models.a.cmd: there is no macro ${NO}"),
        ("models: {a: {cmd: 'x ${env.NO_SUCH_}', proxy: 'http://h:1'}}", "the environment has no NO_SUCH_"),
        ("macros: {m: '${m} ${m}'}\nmodels: {a: {cmd: '${m}', proxy: 'http://h:1'}}", "contain one another"),
        ("models: {a: {cmd: \"x 'y\", proxy: 'http://h:1'}}", "cannot be split into words"),
        ("models: {a: {cmd: 5, proxy: 'http://h:1'}}", "models.a.cmd: expected a text"),
        ("models: {a: {cmd: x, proxy: 'http://h:1', ttl: soon}}", "models.a.ttl: expected a number"),
        ("models: {a: {cmd: x, proxy: 'http://h:1', env: [X]}}", "models.a.env: expected NAME=VALUE"),
        ("models: {a: {cmd: x, proxy: 'http://h:1', aliases: b}}", "models.a.aliases: expected a list"),
        ("models: {a: {cmd: x, proxy: 'http://h:1', unlisted: maybe}}", "expected true or false"),
        ("models: {a: {cmd: x, proxy: 'http://h:1'}}\ngroups: {g: {members: [b]}}", "there is no model 'b'"),
        (
            "models: {a: {cmd: x, proxy: 'http://h:1'}}\ngroups: {g: {members: [a]}, h: {members: [a]}}",
            "'a' is in 'g' already",
        ),
        ("startPort: 0\nmodels: {a: {cmd: x}}", "startPort: expected 1 to 65535"),
        ("apiKeys: ['']\nmodels: {a: {cmd: x, proxy: 'http://h:1'}}", "apiKeys: a key is empty"),
        ("a: &a [*a]\nmodels: {b: {cmd: x, proxy: 'http://h:1', metadata: *a}}", "without end"),
    ],
)
def test_errors_name_the_mistake(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SwapConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value) and "config.yaml" in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SwapConfigError, match="No such file"):
        read_swap_config(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SwapConfigError):
        read_swap_config(tmp_path / "b.yaml")


def test_commands_are_split() -> None:
    text = """
      python model1.py \\
        -a "double quotes" \\
        # a comment \\
        --b 'single quotes'
        -s

        -c "'both'"
    """
    assert command(text) == ["python", "model1.py", "-a", "double quotes", "--b", "single quotes", "-s", "-c", "'both'"]


HEAD = "models:\n  a: {cmd: x, proxy: 'http://h:1'"


@pytest.mark.parametrize(("given", "seconds"), [("14", 15.0), ("15.5", 15.5), ("", 120.0)])
def test_loading_gets_at_least_fifteen_seconds(tmp_path: Path, given: str, seconds: float) -> None:
    (model,) = read(tmp_path, f"healthCheckTimeout: {given}\n{HEAD}}}\n").models
    assert model.launch.ready_timeout == seconds


def test_ports_are_given_to_models_that_use_them_in_the_order_of_names(tmp_path: Path) -> None:
    text = (
        "startPort: 65535\nmacros: {own: '--at ${PORT}'}\nmodels:\n"
        "  c: {cmd: 'x ${own}'}\n  b: {cmd: x, proxy: 'http://h:1'}\n  a: {cmd: x, proxy: 'http://h:${PORT}/'}\n"
    )
    found = {model.name: model.launch for model in read(tmp_path, text.replace("65535", "7")).models}
    assert (found["a"].url, found["b"].url, found["c"].url) == ("http://h:7/", "http://h:1", "http://localhost:8")
    assert found["c"].args == ("x", "--at", "8")
    assert read(tmp_path, f"startPort: 65535\n{HEAD}}}").models


def test_values_of_macros(tmp_path: Path) -> None:
    text = (
        "macros: {n: 5, yea: true, nay: false, text: ' a ', deep: '${text}', env: '${env.X}'}\n"
        f"{HEAD}, macros: {{n: 6}}, description: ' ${{yea}} ${{n}} ', ttl: -1, concurrencyLimit: -4, metadata: "
        "{n: ' ${n} ', yea: '${yea}', nay: 'is ${nay}', deep: '${deep}', '${n}': 1, none: null}}\nglobalTTL: 9\n"
    )
    (model,) = read(tmp_path, text).models
    assert model.description == "true 6" and model.ttl == 9 and model.limit == 0
    assert model.metadata == {"n": 6, "yea": True, "nay": "is false", "deep": " a ", "6": 1, "none": None}


def test_filters_and_aliases(tmp_path: Path) -> None:
    text = (
        f"{HEAD}, aliases: [' b ', 7, {{id: c, name: C}}], checkEndpoint: ' status ', filters: {{strip_params: 'x, ,y',"
        " stripParams: 'y,z,model', setParamsByID: {a: {p: 1}, b: {p: 2}, d: {p: 3}}}}\n"
    )
    (model,) = read(tmp_path, text).models
    assert model.aliases == ("b", "7", "c", "d") and model.alias_titles == {} and model.launch.check == "/status"
    assert model.rewrite.strip == ("x", "y", "z") and model.launch.stop == () and model.launch.stop_timeout == 5.0
    for name, p in (("a", 1), ("b", 2), ("d", 3)):
        body = {"model": name, "x": 1, "z": 1, "w": 1}
        model.rewrite.apply(body, name)
        assert body["p"] == p and "x" not in body and "z" not in body and body["w"] == 1


def test_groups_of_several_models(tmp_path: Path) -> None:
    text = (
        f"{HEAD}}}\n  b: {{cmd: x, proxy: 'http://h:1'}}\n  c: {{cmd: x, proxy: 'http://h:1'}}\n"
        "groups: {g: {swap: false, members: [a, b]}}\n"
    )
    found = {model.name: model.group for model in read(tmp_path, text).models}
    assert found["a"] == found["b"] == Group(name="g", swap=False, exclusive=True, persistent=False)
    assert found["c"].name == "(default)"


def test_peers(tmp_path: Path) -> None:
    text = (
        "macros: {host: h}\npeers:\n  p: {proxy: ' https://${host}:1/x ', models: [m, 5], apiKey: ' k ', "
        "filters: {strip_params: x}}\n"
        "  q: {proxy: 'http://h', models: [m], timeouts: {responseHeader: 7}}\n"
        "  r: {proxy: 'http://h', models: [m], timeouts: {responseHeader: -7}}\n"
    )
    p, q, r = read(tmp_path, text).peers
    assert (p.name, p.url, p.models, p.key, p.timeout) == ("p", "https://h:1/x", ("m", "5"), "k", 60.0)
    assert p.rewrite.strip == ("x",) and q.key == "" and (q.timeout, r.timeout) == (7.0, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peers: {p: {models: [m]}}", "peers.p.proxy: expected http://host:port, got ''"),
        ("peers: {p: {proxy: 'http://h:0', models: [m]}}", "expected http://host:port"),
        ("peers: {p: {proxy: 'ftp://h', models: [m]}}", "expected http://host:port"),
        ("peers: {p: {proxy: 'http://:1', models: [m]}}", "expected http://host:port"),
        ("peers: {p: {proxy: 'http://h'}}", "peers.p.models: there is none"),
        ("peers: {p: {proxy: 'http://h', models: [m], apiKey: 'é'}}", "no header can have"),
        ("peers: {p: {proxy: 'http://h', models: [m], apiKey: \"a\\tb\"}}", "no header can have"),
        (
            "peers: {p: {proxy: 'http://h', models: [m]}}\nmodels: {p/m: {cmd: x, proxy: 'http://h:1'}}",
            "p/m is the name",
        ),
        (HEAD + ", env: ['=x']}", "expected NAME=VALUE"),
        (HEAD + ", aliases: ['']}", "models.a.aliases: expected a name"),
        (HEAD + ", metadata: 5}", "models.a.metadata: expected keys and values"),
        (HEAD + ", macros: {m: [1]}}", "macro m: expected a text, a number or a switch"),
        (HEAD + ", ttl: true}", "models.a.ttl: expected a number"),
        (HEAD + "}\nstartPort: 65536", "startPort: expected 1 to 65535"),
        (HEAD + "}\napiKeys: [a, ' ']", "apiKeys: a key is empty"),
        (HEAD + "}\napiKeys: [{a: 1}]", "apiKeys: expected a list of texts"),
        ("models: {a: {cmd: '# nothing', proxy: 'http://h:1'}}", "models.a.cmd: there is no command"),
    ],
)
def test_more_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SwapConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_known_keys_are_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("llamado").propagate = True
    read(tmp_path, f"logRequests: true\n{HEAD}, timeouts: {{}}}}\nhooks: {{on_startup: {{}}}}\nlogLevel: ' WARN '\n")
    assert "not supported" not in caplog.text
    read(tmp_path, f"{HEAD}}}\nhooks: {{x: 1, on_startup: {{y: 1}}}}\ngroups: {{g: {{z: 1}}}}\npeers: {{}}\n")
    assert "left out: groups.g.z, hooks.x, hooks.on_startup.y" in caplog.text
