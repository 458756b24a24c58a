"""Deployment files: their target programs accept them, and llamado parses their command lines."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml
from doctor_stand_ins import listening
from parsers import parser_of
from tiers import chosen

from llamado.cluster.deploy import monitoring, targets
from llamado.cluster.deploy.deployment import (
    Deployment,
    DeploymentError,
    SecretText,
    environment_file,
    flag_name,
    variable,
)
from llamado.cluster.deploy.kubernetes import WAITING
from llamado.cluster.deploy.targets import TARGETS, write
from llamado.commands import cli
from llamado.commands.http_options import access_rules
from llamado.flags import FLAGS, FlagError, Kind, ParsedFlags, parse
from llamado.http.access import AccessRules

SERVE = ("-m", "/models/m.gguf", "-c", "8192", "-np", "4", "--alias", "a $b")
SECRET_FLAGS = (
    "--api-key=sk-one,sk-two --api_prefix /v1.x/ --ssl-key-file /k.pem --ssl-cert-file /c.pem --cluster-token sk-token "
    "--slot-save-path /srv/slots"
)
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "many": {"replicas": 3, "workers": 2, "memory": "16G", "cpus": 2.5},
    "closed": {"replicas": 2, "workers": 2, "tls": True, "key": True, "domain": "llm.example"},
    "locked": {"serve": (*SERVE, "--mlock", "--metrics")},
    "behind a gateway": {"replicas": 2, "workers": 1, "gateway": ("--patience", "20"), "tls": True, "key": True},
    "by flags": {"serve": (*SERVE, *SECRET_FLAGS.split()), "replicas": 2},
    "behind a gateway by flags": {
        "serve": (*SERVE, "--api-key-file", "/keys", "--api-prefix", "/llm", "--hf-token", "sk-hub"),
        "gateway": ("--ssl-key-file", "/k.pem", "--ssl-cert-file", "/c.pem", "--admin-key", "sk-admin"),
    },
}
"""Deployments. Every secret in them begins with sk-."""
KUBERNETES = "1.31.0"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
IN_EACH_RUN = ["closed", "behind a gateway by flags"]
"""Deployments whose files other programs read in each run, if they are installed."""


@pytest.fixture(autouse=True)
def parsers_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "make_parser", parser_of)


@pytest.fixture(params=KINDS)
def deployment(request: pytest.FixtureRequest) -> Deployment:
    return Deployment(**{"serve": SERVE, **KINDS[request.param]})


@cache
def files_for(target: str, deployment: Deployment) -> Mapping[str, str]:
    return MappingProxyType(targets.files_for(target, deployment))


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install nginx prometheus systemd")
    return found


def read_yaml(text: str) -> Any:
    """Parse YAML with its C library, which accepts no subclasses of `str`."""
    return yaml.load(str(text), Loader=LOADER)


def run_program(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, check=False)


def written(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def read(command: list[str]) -> tuple[str, ParsedFlags]:
    """Parse a command line of llamado; return the sub-command and its flags."""
    return command[0], parse(parser_of(command[0]), command[0], command[1:], {})[0]


def check_serve_command(command: list[str], deployment: Deployment, *, host: str, rpc: list[str]) -> ParsedFlags:
    name, flags = read(command)
    assert not flags.api_key and not flags.cluster_token and not flags.hf_token
    assert name == "serve" and flags.model == ["/models/m.gguf"] and flags.ctx_size == 8192 and flags.parallel == 4
    assert flags.host == host and flags.metrics and flags.alias == ["a $b"]
    assert (flags.rpc or []) == ([",".join(rpc)] if rpc else [])
    return flags


# --- systemd ----------------------------------------------------------------------------------------------------------


def entries(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value)
    return found


def command_of(line: str, instance: int) -> list[str]:
    """Parse a command line like systemd: quotes, %i, variables, and doubled signs."""
    words = [word.replace("%i", str(instance)).replace("%%", "%") for word in shlex.split(line)]
    return [expand_variables(word) for word in words][1:]


def expand_variables(text: str) -> str:
    """Expand variables, all unset except CREDENTIALS_DIRECTORY, which is kept; `$$` becomes `$`."""
    return re.sub(
        r"\$(\$|\w+|\{[^}]*\})",
        lambda found: "$" if found[1] == "$" else found[0] if "CREDENTIALS" in found[1] else "",
        text,
    )


def test_systemd(deployment: Deployment) -> None:
    files = files_for("systemd", deployment)
    server = entries(files["llamado-server@.service"])
    rpc = [f"127.0.0.1:{50052 + i}" for i in range(deployment.workers)]
    flags = check_serve_command(command_of(server["ExecStart"][0], 8081), deployment, host="127.0.0.1", rpc=rpc)
    assert flags.port == 8081 and server["Restart"] == ["always"] and "Requires" not in server
    assert ("LimitMEMLOCK" in server) == deployment.mlock and server.get("MemoryMax") == (
        deployment.memory and [deployment.memory]
    )
    behind = deployment.gateway is not None
    assert bool(flags.ssl_cert_file) == deployment.server_https and not flags.api_key
    credentials = [line.partition(":") for line in server.get("LoadCredential", [])]
    assert all(f"${{CREDENTIALS_DIRECTORY}}/{name}" in server["ExecStart"][0] for name, _, _ in credentials)
    assert [path for name, _, path in credentials if name == "api_key_file"] == ["/keys"] * bool(flags.api_key_file)
    assert server.get("EnvironmentFile", []) == ["/etc/llamado/server.env"] * bool(deployment.secrets("server"))
    assert server.get("ReadWritePaths", []) == ["/srv/slots"] * bool(flags.slot_save_path)
    wait = command_of(server["ExecStartPost"][0].replace("$MAINPID", "7"), 8081)
    assert read(wait)[1].pid == 7
    wants = entries(files["llamado.target"])["Wants"][0].split()
    assert len(wants) == deployment.replicas + deployment.workers + behind
    assert f"llamado-server@{8080 + behind}.service" in wants
    if behind:
        gateway = entries(files["llamado-gateway.service"])
        name, flags = read(command_of(gateway["ExecStart"][0], 0))
        assert name == "gateway" and flags.port == 8080 and flags.ssl_cert_file and flags.host == "0.0.0.0"
        servers = [f"http://127.0.0.1:{8081 + i}{deployment.prefix}" for i in range(deployment.replicas)]
        assert flags.replica == [",".join(servers)] and "MemoryMax" not in gateway
        assert [line.partition(":")[0] for line in gateway["LoadCredential"]][-2:] == ["ssl_key_file", "ssl_cert_file"]
    if deployment.workers:
        name, worker = read(command_of(entries(files["llamado-worker@.service"])["ExecStart"][0], 50053))
        assert name == "worker" and worker.port == 50053 and worker.cache and worker.host == "127.0.0.1"


@pytest.mark.parametrize("deployment", chosen(KINDS, IN_EACH_RUN), indirect=True)
def test_systemd_accepts_the_units(deployment: Deployment, tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    folder = written(tmp_path / "units", files_for("systemd", replace(deployment, program=sys.executable)))
    units = [*sorted(folder.glob("*.service")), folder / "llamado.target"]
    done = run_program(analyze, "verify", "--man=no", *units)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    broken = folder / "llamado-server@.service"
    broken.write_text(broken.read_text().replace("ExecStart=", "ExecStrat="))
    assert run_program(analyze, "verify", "--man=no", broken).stderr.strip()


# --- containers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose_schema() -> Any:
    package = pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema: it has compose's schema")
    path = Path(package.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    return jsonschema_rs.validator_for(json.loads(path.read_text()))


def as_compose_reads(value: Any) -> Any:
    """Expand variables like compose."""
    return json.loads(expand_variables(json.dumps(value)))


@pytest.mark.slow
def test_compose(deployment: Deployment, compose_schema: Any) -> None:
    files = files_for("compose", deployment)
    content = read_yaml(files["compose.yaml"])
    assert [error.message for error in compose_schema.iter_errors(content)] == []
    assert list(compose_schema.iter_errors({**content, "services": {"a": {"imgae": "x"}}}))
    services = as_compose_reads(content["services"])
    servers = [name for name in services if name.startswith("server")]
    workers = [name for name in services if name.startswith("worker")]
    assert (len(servers), len(workers)) == (deployment.replicas, deployment.workers)
    published = [name for name, service in services.items() if "ports" in service]
    for name in servers:
        service = services[name]
        flags = check_serve_command(
            service["command"], deployment, host="0.0.0.0", rpc=[f"{worker}:50052" for worker in workers]
        )
        assert set(service.get("depends_on", {})) == set(workers)
        assert service["environment"] == deployment.allowed_hosts(name)
        assert flags.port == 8080 and ("memlock" in service["ulimits"]) == deployment.mlock
        secrets = [path for path in (flags.api_key_file, flags.ssl_key_file, flags.ssl_cert_file) if path]
        assert [Path(path).name for path in secrets] == service.get("secrets", [])
        assert bool(flags.ssl_cert_file) == (deployment.https and published == ["server"])
        assert service.get("env_file", []) == ["./secrets/server.env"] * bool(deployment.secrets("server"))
        assert service.get("deploy", {}).get("resources", {}).get("limits") == (
            {"memory": "16G", "cpus": "2.5"} if deployment.memory else None
        )
    for name in workers:
        assert read(services[name]["command"])[1].host == "0.0.0.0"
    for name in set(services) - {"nginx"}:
        probe = services[name]["healthcheck"]["test"]
        assert probe[:2] == ["CMD", "llamado"] and read(probe[2:])[0] == "wait"
    assert ("nginx" in services) == (deployment.replicas > 1 and deployment.gateway is None) == ("nginx.conf" in files)
    front = "gateway" if deployment.gateway is not None else "nginx" if deployment.replicas > 1 else "server"
    assert published == [front]
    assert services[front]["ports"][0].startswith("127.0.0.1:8080:") != deployment.has_key
    assert "ssl_key_file" in services[front].get("secrets", []) or not deployment.https
    named = {name for service in services.values() for name in service.get("secrets", [])}
    assert named == set(content.get("secrets", {}))
    if deployment.gateway is not None:
        name, flags = read(services["gateway"]["command"])
        urls = [f"http://{server}:8080{deployment.prefix}" for server in servers]
        assert name == "gateway" and flags.replica == [",".join(urls)] and flags.ssl_cert_file and not flags.admin_key
        assert set(services["gateway"]["depends_on"]) == set(servers)


def test_docker(deployment: Deployment) -> None:
    files = files_for("docker", deployment)
    text = files["Dockerfile"].replace("\\\n", " ")
    lines = [line.partition(" ")[::2] for line in text.splitlines() if line and not line.startswith("#")]
    order = [name for name, _ in lines]
    instructions = dict(lines)
    version = re.search(r"python:3\.(\d+)-slim", text)
    assert version is not None and int(version[1]) >= 11 and ">=3.11" in project_file()
    assert instructions["USER"] == "10001:10001" and order.index("USER") < len(order) - 1 - order[::-1].index("RUN")
    assert json.loads(instructions["ENTRYPOINT"]) == ["llamado"]
    links = re.findall(r"ln -s llamado /opt/llamado/bin/(\S+)", text)
    assert set(links) < set(cli.PROGRAMS) and {cli.PROGRAMS[link] for link in links} == {"serve", "worker"}
    assert "install -y --no-install-recommends curl netcat-openbsd" in text
    check_serve_command(json.loads(instructions["CMD"]), deployment, host="0.0.0.0", rpc=[])
    warm = re.search(r"llamado (bench .*?) &&", text)
    assert warm is not None and read(shlex.split(warm[1]))[0] == "bench"
    probe = re.search(r"CMD (\[.*\])$", instructions["HEALTHCHECK"])
    assert probe is not None and json.loads(probe[1])[0] == "llamado"
    name, flags = read(json.loads(probe[1])[1:])
    assert name == "wait" and flags.pid is None  # it finds the process and its address at run time


def project_file() -> str:
    return (Path(__file__).parents[2] / "pyproject.toml").read_text()


# --- nginx and prometheus ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deployment", chosen(KINDS, IN_EACH_RUN), indirect=True)
def test_nginx_accepts_the_file(deployment: Deployment, tmp_path: Path) -> None:
    nginx = program("nginx")
    text = files_for("nginx", deployment)["nginx.conf"]
    if deployment.https:
        from doctor_stand_ins import Certificates

        made = Certificates(tmp_path)
        text = re.sub(r"ssl_certificate .*;", f"ssl_certificate {made.cert};", text)
        text = re.sub(r"ssl_certificate_key .*;", f"ssl_certificate_key {made.key};", text)
    assert "proxy_buffering off;" in text and "proxy_read_timeout 3600s;" in text
    assert (
        text.count("max_fails") == (deployment.replicas if deployment.gateway is None else 1)
        and f"server_name {deployment.domain};" in text
    )
    (tmp_path / "nginx.conf").write_text(text)
    done = run_program(nginx, "-t", "-c", tmp_path / "nginx.conf", "-g", f"pid {tmp_path}/pid;")
    assert done.returncode == 0 and "[warn]" not in done.stderr, done.stderr
    (tmp_path / "nginx.conf").write_text(text.replace("least_conn;", "least_con;"))
    assert run_program(nginx, "-t", "-c", tmp_path / "nginx.conf", "-g", f"pid {tmp_path}/pid;").returncode != 0


@pytest.mark.parametrize("deployment", chosen(KINDS, IN_EACH_RUN), indirect=True)
def test_promtool_accepts_the_files(deployment: Deployment, tmp_path: Path) -> None:
    promtool = program("promtool")
    folder = written(tmp_path / "prometheus", files_for("prometheus", deployment))
    done = run_program(promtool, "check", "config", "--syntax-only", folder / "prometheus.yml")
    assert done.returncode == 0, done.stderr
    done = run_program(promtool, "check", "rules", folder / "llamado.rules.yml")
    assert done.returncode == 0 and f"{len(monitoring.ALERTS)} rules" in done.stdout, done.stderr
    rules = folder / "llamado.rules.yml"
    rules.write_text(rules.read_text().replace("min_over_time(", "min_over_tme("))
    assert run_program(promtool, "check", "rules", rules).returncode != 0


def test_prometheus_uses_prefix_scheme_and_key_of_the_servers(deployment: Deployment) -> None:
    files = files_for("prometheus", deployment)
    (job,) = read_yaml(files["prometheus.yml"])["scrape_configs"]
    assert job["metrics_path"] == f"{deployment.prefix}/metrics" and job.get("scheme") == (
        "https" if deployment.server_https else None
    )
    assert ("authorization" in job) == deployment.server_has_key == any("prometheus.key" in name for name in files)
    if deployment.server_has_key:
        assert job["authorization"]["credentials_file"] == "/etc/llamado/prometheus.key"
        assert files.get("prometheus.key", "\n") == f"{deployment.first_key}\n"
    (down, *_) = read_yaml(files["llamado.rules.yml"])["groups"][0]["rules"]
    url = f"{'https' if deployment.server_https else 'http'}://{{{{ $labels.instance }}}}{deployment.prefix}"
    assert down["annotations"]["summary"].endswith(f"llamado doctor {url}")


def test_nginx_hides_monitoring_below_the_prefix() -> None:
    text = files_for("nginx", Deployment(serve=("-m", "m", "--api-prefix", "/v1.x")))["nginx.conf"]
    (pattern,) = re.findall(r"location ~ (\S+) ", text)
    assert re.match(pattern, "/v1.x/metrics") and re.match(pattern, "/v1.x/slots/0")
    assert not re.match(pattern, "/v1-x/metrics") and not re.match(pattern, "/v1.x/models")
    behind = files_for("nginx", Deployment(serve=("-m", "m", "--api-prefix", "/llm"), gateway=()))["nginx.conf"]
    assert "location ~ ^/(metrics|slots)" in behind  # the gateway adds the prefix of its servers


def test_certificates_of_nginx() -> None:
    """In compose only nginx has them; on one machine the servers behind it have them too."""
    deployment = Deployment(serve=("-m", "m", "--ssl-key-file", "/k.pem", "--ssl-cert-file", "/c.pem"), replicas=2)
    inside = files_for("compose", deployment)["nginx.conf"]
    assert "ssl_certificate /run/secrets/ssl_cert_file;" in inside and "proxy_pass http://llamado;" in inside
    alone = files_for("nginx", deployment)["nginx.conf"]
    assert "ssl_certificate /c.pem;" in alone and "proxy_pass https://llamado;" in alone


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_keys_are_only_in_private_files(deployment: Deployment, target: str, tmp_path: Path) -> None:
    files = files_for(target, deployment)
    assert not [name for name, text in files.items() if "sk-" in text and not isinstance(text, SecretText)]
    for path in write(files, tmp_path / "new"):
        assert bool(path.stat().st_mode & 0o077) != isinstance(
            files[str(path.relative_to(tmp_path / "new"))], SecretText
        )


@pytest.mark.parametrize("target", TARGETS)
def test_keys_are_not_printed(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["deploy", target, "--memory", "1G", "--replicas", "2"]
    serve = ["--", "-m", "m", "--api-key", "sk-one", "--cluster-token=sk-two"]
    assert cli.main([*words, *serve]) == 0
    printed = capsys.readouterr()
    assert "sk-" not in printed.out + printed.err
    assert ("also writes the secrets" in printed.err) == (target not in ("nginx", "grafana"))
    for _ in range(2):
        assert cli.main([*words, "--out", str(tmp_path / "out"), *serve]) == 0
        paths = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and "sk-one" in path.read_text()]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths) and bool(paths) == ("also" in printed.err)
        for path in paths:
            path.chmod(0o644)  # the second write must restrict an existing file


def test_secrets_of_servers_and_gateways() -> None:
    deployment = Deployment(
        **{**KINDS["behind a gateway by flags"], "serve": (*SERVE, "--api-key", "a,b", "--hf-token", "h")}
    )
    assert deployment.secrets("server") == {"LLAMA_API_KEY": "a,b", "HF_TOKEN": "h"}
    assert deployment.secrets("gateway") == {
        "LLAMADO_ADMIN_KEY": "sk-admin", "LLAMA_API_KEY": "a,b", "LLAMADO_REPLICA_KEY": "a"
    }  # fmt: skip
    own = Deployment(serve=("-m", "m", "--api-key", "a"), gateway=("--api-key", "g"))
    assert own.secrets("gateway") == {"LLAMA_API_KEY": "g", "LLAMADO_REPLICA_KEY": "a"}
    unknown = Deployment(serve=("-m", "m"), key=True)
    assert unknown.secrets("server") == {"LLAMA_API_KEY": ""} and "server.env.example" in files_for("systemd", unknown)


def test_a_server_does_not_start_with_an_empty_key() -> None:
    """A secrets file that was not filled in must not leave a server open."""
    parser = cli.make_parser("serve")
    with pytest.raises(FlagError, match="no key given"):
        access_rules(parse(parser, "serve", ["-m", "m"], {"LLAMA_API_KEY": ""})[0])


@pytest.mark.parametrize("value", ["plain-1", "with space", "a#b", 'say "$x"', "it's $5 \\ `x`", '{"a": "b"}'])
def test_environment_files_keep_values(value: str) -> None:
    (text,) = environment_file("x.env", {"A": value}).values()
    word = text.removeprefix("A=").removesuffix("\n")
    if word[0] == '"':  # as systemd and compose do, which is more than shlex does
        word = re.sub(r"\\([$`])", r"\1", word)
    assert shlex.split(word) == [value]


def test_key_files_are_used_from_their_paths(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nsk-first\nsk-second\n")
    deployment = Deployment(serve=("-m", "m", "--api-key-file", str(keys)), gateway=())
    assert deployment.first_key == "sk-first" and deployment.secrets("gateway") == {"LLAMADO_REPLICA_KEY": "sk-first"}
    content = read_yaml(files_for("compose", deployment)["compose.yaml"])
    assert content["secrets"] == {"api_key_file": {"file": str(keys)}}
    for name in ("server", "gateway"):
        command = content["services"][name]["command"]
        assert command[command.index("--api-key-file") + 1] == "/run/secrets/api_key_file"
    assert [*yaml.load_all(str(files_for("kubernetes", deployment)["llamado-secrets.yaml"]), Loader=LOADER)]
    both = Deployment(serve=("-m", "m", "--api-key-file", "/a"), gateway=("--api-key-file", "/b"))
    content = read_yaml(files_for("compose", both)["compose.yaml"])
    assert content["secrets"] == {"api_key_file": {"file": "/a"}, "gateway_api_key_file": {"file": "/b"}}


# --- grafana ----------------------------------------------------------------------------------------------------------


def expressions() -> dict[str, str]:
    """Return all expressions of alerts and panels."""
    deployment = Deployment()
    groups = read_yaml(files_for("prometheus", deployment)["llamado.rules.yml"])["groups"]
    found = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    for panel in json.loads(files_for("grafana", deployment)["llamado-dashboard.json"])["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_promtool_accepts_the_expressions_of_grafana(tmp_path: Path) -> None:
    promtool = program("promtool")
    rules = [
        {"record": f"drawn:{i}", "expr": text.replace("$__rate_interval", "5m")}
        for i, text in enumerate(expressions().values())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    done = run_program(promtool, "check", "rules", path)
    assert done.returncode == 0 and f"{len(rules)} rules" in done.stdout, done.stdout + done.stderr


def test_all_metrics_of_alerts_and_panels_are_served() -> None:
    with listening(metrics=True) as (url, _):
        httpx.get(f"{url}/v1/models")
        served = httpx.get(f"{url}/metrics").text
    names = set(re.findall(r"^([a-zA-Z_:][\w:]*)", served, re.MULTILINE))
    wanted = {
        name for text in expressions().values() for name in re.findall(r"(?:llamacpp:|process_|llamado_)\w+", text)
    }
    assert len(wanted) > 10 and wanted <= names
    assert WAITING in names
    assert 'status="200"' in served


def test_error_alerts_exclude_servers_that_were_loading() -> None:
    """Within the window of their rate."""
    errors = [text for text in expressions().values() if "status=~'5" in text]
    assert errors
    for text in errors:
        (window,) = set(re.findall(r"\[\w+\]", text))
        assert f"max_over_time(llamado_is_loading{{job='llamado'}}{window}) == 1" in text.partition(" unless ")[2]


def test_grafana(deployment: Deployment) -> None:
    content = json.loads(files_for("grafana", deployment)["llamado-dashboard.json"])
    panels = content["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(monitoring.PANELS)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) and all(
        panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels
    )
    known = {choice["name"] for choice in content["templating"]["list"]}
    text = json.dumps(content)
    assert set(re.findall(r"\$\{?(?!__)(\w+)", text)) <= known


@pytest.fixture
def two() -> Iterator[tuple[str, str, Any, Any]]:
    with listening(metrics=True) as (a, first), listening(metrics=True) as (b, second):
        yield a.removeprefix("http://"), b.removeprefix("http://"), first, second


@pytest.mark.slow
def test_nginx_as_proxy_of_two_servers(two: tuple[str, str, Any, Any], tmp_path: Path) -> None:
    """Requests succeed while one of two servers loads; streams are not buffered, and monitoring is hidden."""
    nginx = program("nginx")
    from ports import free_port

    from llamado.cluster.deploy.nginx import nginx as nginx_files

    *addresses, first, _ = two
    port = free_port()
    text = nginx_files(Deployment(replicas=2), addresses)["nginx.conf"].replace(
        "listen 80;", f"listen 127.0.0.1:{port};"
    )
    # llamado's responses ask nginx not to buffer, llama.cpp's do not
    text = text.replace("proxy_cache off;", "proxy_cache off; proxy_ignore_headers X-Accel-Buffering;")
    (tmp_path / "nginx.conf").write_text(text)
    command = [nginx, "-c", str(tmp_path / "nginx.conf"), "-g", f"daemon off; pid {tmp_path}/pid;"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            transport = httpx.HTTPTransport(retries=20)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60) as client:
                body = {"prompt": "hi", "stream": True}
                served, first.served = first.served, None
                for _ in range(6):
                    assert client.post("/completion", json={"prompt": "hi"}).status_code == 200
                first.served = served
                first.served.engine.delay = two[3].served.engine.delay = 0.02
                with client.stream("POST", "/completion", json=body) as response:
                    chunks = [chunk for chunk in response.iter_raw() if chunk]
                assert response.status_code == 200 and len(chunks) > 5, "the stream was buffered"
                assert client.get("/metrics").status_code == client.get("/slots").status_code == 403
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
def test_prometheus_scrapes_two_servers(two: tuple[str, str, Any, Any], tmp_path: Path) -> None:
    import time

    from ports import free_port

    prometheus = program("prometheus")
    files = files_for("prometheus", Deployment(replicas=2))
    content = read_yaml(files["prometheus.yml"])
    content["scrape_configs"][0]["static_configs"][0]["targets"] = list(two[:2])
    content["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    folder = written(tmp_path / "p", {**files, "prometheus.yml": yaml.safe_dump(content)})
    port = free_port()
    command = [prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline, found = time.monotonic() + 120, []
            while len(found) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
                try:
                    response = httpx.get(f"http://127.0.0.1:{port}/api/v1/query",
                                         params={"query": "llamacpp:requests_deferred{job='llamado'}"})  # fmt: skip
                    found = response.json()["data"]["result"] if response.status_code == 200 else []
                except (httpx.HTTPError, ValueError):
                    assert process.poll() is None, (tmp_path / "log").read_text()
            assert {one["metric"]["instance"] for one in found} == set(two[:2]), (tmp_path / "log").read_text()
            rules = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules").json()["data"]["groups"][0]["rules"]
            assert len(rules) == len(monitoring.ALERTS)
        finally:
            process.terminate()
            process.wait(60)


# --- kubernetes -------------------------------------------------------------------------------------------------------


def manifests(deployment: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in files_for("kubernetes", deployment).values():
        for one in yaml.load_all(str(text), Loader=LOADER):
            found[f"{one['kind']} {one['metadata']['name']}"] = one
    return found


@pytest.mark.full
def test_kubernetes_accepts_the_manifests(deployment: Deployment) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[full]': it has the schemas")
    found = manifests(deployment)
    for one in found.values():
        validate.validate(one, KUBERNETES, strict=True)
    broken = json.loads(json.dumps(next(one for one in found.values() if one["kind"] == "Deployment")))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGett"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, KUBERNETES, strict=True)


def container(manifest: Any) -> Any:
    (one,) = manifest["spec"]["template"]["spec"]["containers"]
    return one


def gateway_service(found: dict[str, Any]) -> Any:
    return container(found["Deployment llamado-gateway"])


def test_kubernetes(deployment: Deployment) -> None:
    found = manifests(deployment)
    servers = found[f"{'Deployment' if deployment.gateway is None else 'StatefulSet'} llamado-server"]
    server = container(servers)
    scheme = "tls://" if deployment.tls else ""
    rpc = [f"{scheme}llamado-worker-{i}.llamado-worker:50052" for i in range(deployment.workers)]
    flags = check_serve_command(server["args"], deployment, host="0.0.0.0", rpc=rpc)
    assert bool(flags.rpc_ca) == bool(flags.rpc_cert) == bool(deployment.workers and deployment.tls)
    probes = {kind: server[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {one["path"] for one in (probes["startup"], probes["liveness"])} == {f"{deployment.prefix}/livez"}
    assert probes["readiness"]["path"] == f"{deployment.prefix}/readyz"
    assert {one.get("scheme") for one in probes.values()} == {"HTTPS" if deployment.server_https else None}
    notes = servers["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/path"] == f"{deployment.prefix}/metrics"
    assert notes.get("prometheus.io/scheme") == ("https" if deployment.server_https else None)
    if deployment.workers:  # shared workers allow only a fixed number of servers
        assert "HorizontalPodAutoscaler llamado-server" not in found
        assert servers["spec"]["replicas"] == deployment.replicas
    else:
        assert found["HorizontalPodAutoscaler llamado-server"]["spec"]["minReplicas"] == deployment.replicas
        assert "replicas" not in servers["spec"]
    environment = {one["name"]: one.get("value") for one in server["env"]}
    hosts = AccessRules(allowed_hosts=tuple(environment[variable("serve", "allowed_hosts")].split(",")))
    for name in ("llamado-server", "llamado-server-0.llamado-server", "llamado-server.default.svc.cluster.local"):
        assert hosts.allows_host(f"{name}:8080")
    assert not hosts.allows_host("llamado-server.evil.com")
    for part, one in (
        ("server", server),
        ("gateway", (deployment.gateway is not None and gateway_service(found)) or {}),
    ):
        kept = found.get(f"Secret llamado-{part}-keys", {}).get("stringData", {})
        assert kept == deployment.secrets(part)
        assert one.get("envFrom", []) == [{"secretRef": {"name": f"llamado-{part}-keys"}}] * bool(kept)
    assert ("Secret llamado-tls" in found) == deployment.https
    assert ("Secret llamado-files" in found) == bool(flags.api_key_file)
    assert {key: bool(one) for key, one in (("cert", flags.ssl_cert_file), ("key", flags.ssl_key_file))} == {
        "cert": deployment.server_https,
        "key": deployment.server_https,
    }
    pods = [one["spec"]["template"]["spec"] for one in found.values() if "template" in one.get("spec", {})]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert all(volume["secret"]["defaultMode"] == 0o440 for volume in pod["volumes"] if "secret" in volume)
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for one in found.values()
                    for claim in one.get("spec", {}).get("volumeClaimTemplates", [])}  # fmt: skip
        for one in pod["containers"] + pod.get("initContainers", []):
            assert one["securityContext"]["readOnlyRootFilesystem"]
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
    assert ("StatefulSet llamado-worker" in found) == (deployment.workers > 0)
    assert ("PodDisruptionBudget llamado-worker" in found) == (deployment.workers > 0)
    if deployment.workers:
        worker = container(found["StatefulSet llamado-worker"])
        name, flags = read(worker["args"])
        assert name == "worker" and flags.host == "0.0.0.0" and bool(flags.tls_client_ca) == deployment.tls
        policy = found["NetworkPolicy llamado-worker"]["spec"]
        (rule,) = policy["ingress"]
        workers = found["StatefulSet llamado-worker"]["spec"]["selector"]
        assert rule["from"] == [{"podSelector": servers["spec"]["selector"]}, {"podSelector": workers}]
        probes = [worker[kind] for kind in worker if kind.endswith("Probe")]
        assert len(probes) == 2 and all(read(probe["exec"]["command"][1:])[0] == "wait" for probe in probes)
        assert rule["ports"][0]["port"] == worker["ports"][0]["containerPort"]
        assert policy["podSelector"] == found["StatefulSet llamado-worker"]["spec"]["selector"]
        assert found["Service llamado-worker"]["spec"]["publishNotReadyAddresses"]
    if deployment.memory:
        assert server["resources"]["limits"] == {"memory": "16Gi", "cpu": "2.5"}
    assert ("Deployment llamado-gateway" in found) == (deployment.gateway is not None)
    if deployment.gateway is not None:
        gateway = gateway_service(found)
        name, flags = read(gateway["args"])
        scaler = found.get("HorizontalPodAutoscaler llamado-server", {}).get(
            "spec", {"maxReplicas": deployment.replicas}
        )
        names = [
            f"http://llamado-server-{i}.llamado-server:8080{deployment.prefix}" for i in range(scaler["maxReplicas"])
        ]
        assert name == "gateway" and flags.replica == [",".join(names)]
        assert (
            bool(flags.ssl_cert_file) == deployment.https and gateway["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
        )
        assert gateway["livenessProbe"]["httpGet"]["path"] == "/livez"
        service = found["Service llamado-server"]["spec"]
        assert service["clusterIP"] == "None" and servers["spec"]["serviceName"] == "llamado-server"
        assert variable("gateway", "replica_key") in deployment.secrets("gateway")
        assert found["NetworkPolicy llamado-gateway"] and found["PodDisruptionBudget llamado-gateway"]


def test_the_autoscaler_gets_its_metric() -> None:
    (rule,) = read_yaml(files_for("prometheus", Deployment())["adapter-values.yaml"])["rules"]["custom"]
    scaler = manifests(Deployment(serve=SERVE))["HorizontalPodAutoscaler llamado-server"]
    (metric,) = scaler["spec"]["metrics"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"] and f'"{WAITING}"' in rule["seriesQuery"]


def test_kubernetes_groups() -> None:
    deployment = Deployment(serve=SERVE, workers=2, replicas=3, leader_worker_set=True)
    found = manifests(deployment)
    assert not {"Deployment llamado-server", "StatefulSet llamado-worker"} & set(found)
    group = found["LeaderWorkerSet llamado-group"]["spec"]
    assert group["replicas"] == 3 and group["leaderWorkerTemplate"]["size"] == 3
    (leader,) = group["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    (worker,) = group["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    spelled_out = [word.replace("$(LWS_GROUP)", "llamado-group-1") for word in leader["args"]]
    names = [f"llamado-group-1-{i}.llamado-group:50052" for i in (1, 2)]
    check_serve_command(spelled_out, deployment, host="0.0.0.0", rpc=names)
    assert read(worker["args"])[0] == "worker" and leader["env"][0]["name"] == "LWS_GROUP"
    assert found["HorizontalPodAutoscaler llamado-server"]["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    group = manifests(replace(deployment, tls=True))["LeaderWorkerSet llamado-group"]["spec"]["leaderWorkerTemplate"]
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    flags = read(leader["args"])[1]
    assert flags.rpc == [",".join(f"tls://$(LWS_GROUP)-{i}.llamado-group:50052" for i in (1, 2))]
    assert (flags.rpc_ca, flags.rpc_cert, flags.rpc_key) == ("/tls/ca.crt", "/tls/tls.crt", "/tls/tls.key")


def test_servers_with_shared_workers_are_updated_one_by_one() -> None:
    """Workers have no memory for an additional server; servers without workers are updated without a pause."""
    for workers, expected in ((2, {"maxUnavailable": 1, "maxSurge": 0}), (0, {"maxUnavailable": 0, "maxSurge": 1})):
        found = manifests(Deployment(serve=SERVE, workers=workers))["Deployment llamado-server"]["spec"]
        assert found["strategy"]["rollingUpdate"] == expected


@pytest.mark.parametrize(
    ("given", "host"),
    [({}, "127.0.0.1"), ({"key": True}, "0.0.0.0"), ({"key": True, "replicas": 2}, "127.0.0.1")],
)
def test_a_unit_listens_on_all_addresses_only_with_a_key(given: dict[str, Any], host: str) -> None:
    """Several servers listen on loopback, behind nginx or a gateway."""
    unit = entries(files_for("systemd", Deployment(serve=SERVE, **given))["llamado-server@.service"])
    assert read(command_of(unit["ExecStart"][0], 8080))[1].host == host
    units = files_for("systemd", Deployment(serve=SERVE, gateway=(), **given))
    gateway = read(command_of(entries(units["llamado-gateway.service"])["ExecStart"][0], 0))[1]
    assert gateway.host == ("0.0.0.0" if given else "127.0.0.1")


def test_folders_of_flags_are_writable() -> None:
    deployment = Deployment(serve=(*SERVE, "--slot-save-path", "/srv/slots", "--log-file", "/var/log/x/a.log"))
    unit = entries(files_for("systemd", deployment)["llamado-server@.service"])
    assert unit["ReadWritePaths"] == ["/srv/slots /var/log/x"]
    service = read_yaml(files_for("compose", deployment)["compose.yaml"])["services"]["server"]
    assert service["volumes"][1:3] == ["/srv/slots:/srv/slots", "/var/log/x:/var/log/x"]
    places = {
        mount["mountPath"] for mount in container(manifests(deployment)["Deployment llamado-server"])["volumeMounts"]
    }
    assert {"/srv/slots", "/var/log/x"} <= places


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_the_command(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["deploy", target, "--replicas", "2", "--name", "mine"]
    serve = ["--", "-m", "/models/m.gguf"]
    assert cli.main([*words, *serve]) == 0
    printed = capsys.readouterr().out
    assert cli.main([*words, "--out", str(tmp_path / "out"), *serve]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    expected = files_for(target, Deployment(serve=tuple(serve[1:]), replicas=2, name="mine"))
    assert {str(path.relative_to(tmp_path / "out")): path.read_text() for path in paths} == expected
    assert all(text in printed for text in expected.values())
    assert cli.main([*words, "--out", str(tmp_path / "out"), *serve]) == 0  # the same again
    paths[0].write_text("something else")
    assert cli.main([*words, "--out", str(tmp_path / "out"), *serve]) == 1
    assert paths[0].name in capsys.readouterr().err and paths[0].read_text() == "something else"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"serve": ("-m", "m", "--no-such-flag")}, "--no-such-flag"),
        ({"serve": ("-m", "m", "-c", "many")}, "-c"),
        ({"serve": ()}, "no model given"),
        ({"serve": ("-m", "m", "--port", "1")}, "before --"),
        ({"serve": ("-m", "m", "--rpc", "h:1"), "workers": 1}, "--rpc"),
        ({"replicas": 0}, "--replicas"),
        ({"workers": -1}, "--workers"),
        ({"port": 70000}, "--port"),
        ({"memory": "lots"}, "--memory"),
        ({"cpus": 0.0}, "--cpus"),
        ({"name": "Big Name"}, "--name"),
        ({"domain": "a; drop"}, "'a; drop'"),
        ({"serve": ("-m", "m", "--ssl-cert-file", "c.pem")}, "give both or none"),
        ({"serve": ("-m", "m", "--api-prefix", "/a b")}, "--api-prefix"),
    ],
)
def test_invalid_deployments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((DeploymentError, FlagError), match=re.escape(message)):
        files_for("systemd", Deployment(**{"serve": ("-m", "m"), **given}))


def test_flag_names_exist() -> None:
    for command, key in (("serve", "metrics"), ("worker", "cache"), ("serve", "api_key_file")):
        (flag,) = [f for f in FLAGS if f.key == key and command in f.commands and f.kind is Kind.USED]
        assert flag_name(command, key) in flag.names
    with pytest.raises(KeyError):
        flag_name("serve", "no_such_key")
