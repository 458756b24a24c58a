"""Files that others run servers and workers with: the programs they are for accept them, and the flags are ours."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml
from doctor_stand_ins import listening

from llamado.cluster.deploy import monitoring
from llamado.cluster.deploy.deployment import Deployment, DeploymentError, spelled, variable
from llamado.cluster.deploy.kubernetes import WAITING
from llamado.cluster.deploy.targets import TARGETS, files_for
from llamado.commands import cli
from llamado.flags import FLAGS, FlagError, Kind, Parsed, parse
from llamado.http.access import AccessRules

SERVE = ("-m", "/models/m.gguf", "-c", "8192", "-np", "4", "--alias", "a $b")
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "many": {"replicas": 3, "workers": 2, "memory": "16G", "cpus": 2.5},
    "closed": {"replicas": 2, "workers": 2, "tls": True, "key": True, "domain": "llm.example"},
    "locked": {"serve": (*SERVE, "--mlock", "--metrics")},
    "behind a gateway": {"replicas": 2, "workers": 1, "gateway": ("--patience", "20"), "tls": True, "key": True},
}
KUBERNETES = "1.31.0"


@pytest.fixture(params=KINDS)
def what(request: pytest.FixtureRequest) -> Deployment:
    return Deployment(**{"serve": SERVE, **KINDS[request.param]})


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install nginx prometheus systemd")
    return found


def accepted(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, check=False)


def written(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def read(command: list[str]) -> tuple[str, Parsed]:
    """A command line of llamado as its own parser reads it: the sub-command, and its flags."""
    return command[0], parse(cli._parser(command[0]), command[0], command[1:], {})[0]


def is_as_asked(command: list[str], what: Deployment, *, host: str, rpc: list[str]) -> Parsed:
    name, flags = read(command)
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
    """As systemd reads a command: quotes, %i, variables, and doubled signs."""
    words = [word.replace("%i", str(instance)).replace("%%", "%") for word in shlex.split(line)]
    return [expanded(word) for word in words][1:]


def expanded(text: str) -> str:
    """With variables put in, of which none but those of credentials are set; two `$` are one."""
    return re.sub(
        r"\$(\$|\w+|\{[^}]*\})",
        lambda found: "$" if found[1] == "$" else found[0] if "CREDENTIALS" in found[1] else "",
        text,
    )


def test_systemd(what: Deployment) -> None:
    files = files_for("systemd", what)
    server = entries(files["llamado-server@.service"])
    rpc = [f"127.0.0.1:{50052 + i}" for i in range(what.workers)]
    flags = is_as_asked(command_of(server["ExecStart"][0], 8081), what, host="127.0.0.1", rpc=rpc)
    assert flags.port == 8081 and server["Restart"] == ["always"] and "Requires" not in server
    assert ("LimitMEMLOCK" in server) == what.mlock and server.get("MemoryMax") == (what.memory and [what.memory])
    behind = what.gateway is not None
    assert len(server.get("LoadCredential", [])) == what.key + 2 * (what.tls and not behind)
    assert bool(flags.api_key_file) == what.key and bool(flags.ssl_cert_file) == (what.tls and not behind)
    wants = entries(files["llamado.target"])["Wants"][0].split()
    assert len(wants) == what.replicas + what.workers + behind
    assert f"llamado-server@{8080 + behind}.service" in wants
    if behind:
        gateway = entries(files["llamado-gateway.service"])
        name, flags = read(command_of(gateway["ExecStart"][0], 0))
        assert name == "gateway" and flags.port == 8080 and flags.patience == 20 and flags.ssl_cert_file
        assert flags.replica == ["http://127.0.0.1:8081,http://127.0.0.1:8082"] and len(gateway["LoadCredential"]) == 2
    if what.workers:
        name, worker = read(command_of(entries(files["llamado-worker@.service"])["ExecStart"][0], 50053))
        assert name == "worker" and worker.port == 50053 and worker.cache and worker.host == "127.0.0.1"


def test_systemd_takes_the_units(what: Deployment, tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    from dataclasses import replace

    folder = written(tmp_path / "units", files_for("systemd", replace(what, program=sys.executable)))
    units = [*sorted(folder.glob("*.service")), folder / "llamado.target"]
    done = accepted(analyze, "verify", "--man=no", *units)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    broken = folder / "llamado-server@.service"
    broken.write_text(broken.read_text().replace("ExecStart=", "ExecStrat="))
    assert accepted(analyze, "verify", "--man=no", broken).stderr.strip()


# --- containers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose_schema() -> Any:
    package = pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema: it has compose's schema")
    path = Path(package.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    return jsonschema_rs.validator_for(json.loads(path.read_text()))


def plain(value: Any) -> Any:
    """As compose reads a file: variables put in."""
    return json.loads(expanded(json.dumps(value)))


@pytest.mark.slow
def test_compose(what: Deployment, compose_schema: Any) -> None:
    files = files_for("compose", what)
    content = yaml.safe_load(files["compose.yaml"])
    assert [error.message for error in compose_schema.iter_errors(content)] == []
    assert list(compose_schema.iter_errors({**content, "services": {"a": {"imgae": "x"}}}))
    services = plain(content["services"])
    servers = [name for name in services if name.startswith("server")]
    workers = [name for name in services if name.startswith("worker")]
    assert (len(servers), len(workers)) == (what.replicas, what.workers)
    for name in servers:
        service = services[name]
        flags = is_as_asked(service["command"], what, host="0.0.0.0", rpc=[f"{worker}:50052" for worker in workers])
        assert set(service.get("depends_on", {})) == set(workers)
        assert service["environment"] == what.allowed_hosts(name)
        assert flags.port == 8080 and ("memlock" in service["ulimits"]) == what.mlock
        secrets = [path for path in (flags.api_key_file, flags.ssl_key_file, flags.ssl_cert_file) if path]
        assert [Path(path).name for path in secrets] == service.get("secrets", [])
        if what.gateway is None:
            assert set(service.get("secrets", [])) == set(content.get("secrets", {}))
        assert service.get("deploy", {}).get("resources", {}).get("limits") == (
            {"memory": "16G", "cpus": "2.5"} if what.memory else None
        )
    for name in workers:
        assert read(services[name]["command"])[1].host == "0.0.0.0"
        probe = services[name]["healthcheck"]["test"]
        assert probe[:2] == ["CMD", "llamado"] and read(probe[2:])[0] == "wait"
    assert ("nginx" in services) == (what.replicas > 1 and what.gateway is None) == ("nginx.conf" in files)
    published = [name for name, service in services.items() if "ports" in service]
    front = "gateway" if what.gateway is not None else "nginx" if what.replicas > 1 else "server"
    assert published == [front]
    if what.gateway is not None:
        name, flags = read(services["gateway"]["command"])
        assert name == "gateway" and flags.replica == [",".join(f"http://{server}:8080" for server in servers)]
        assert flags.patience == 20 and set(services["gateway"]["secrets"]) == {"ssl_key_file", "ssl_cert_file"}
        assert set(services["gateway"]["depends_on"]) == set(servers)


@pytest.mark.slow
def test_the_probe_of_a_server_finds_out() -> None:
    content = yaml.safe_load(files_for("compose", Deployment(serve=SERVE))["compose.yaml"])
    _, _, *rest = content["services"]["server"]["healthcheck"]["test"]
    with listening() as (url, state):
        probe = [sys.executable, *(word.replace("http://127.0.0.1:8080", url) for word in rest)]
        assert accepted(*probe).returncode == 0
        state.served = None
        assert accepted(*probe).returncode != 0


def test_docker(what: Deployment) -> None:
    files = files_for("docker", what)
    text = files["Dockerfile"].replace("\\\n", " ")
    lines = [line.partition(" ")[::2] for line in text.splitlines() if line and not line.startswith("#")]
    order = [name for name, _ in lines]
    said = dict(lines)
    version = re.search(r"python:3\.(\d+)-slim", text)
    assert version is not None and int(version[1]) >= 11 and ">=3.11" in project_file()
    assert said["USER"] == "10001:10001" and order.index("USER") < len(order) - 1 - order[::-1].index("RUN")
    assert json.loads(said["ENTRYPOINT"]) == ["llamado"]
    links = re.findall(r"ln -s llamado /opt/llamado/bin/(\S+)", text)
    assert set(links) < set(cli.PROGRAMS) and {cli.PROGRAMS[link] for link in links} == {"serve", "worker"}
    assert "install -y --no-install-recommends curl netcat-openbsd" in text
    is_as_asked(json.loads(said["CMD"]), what, host="0.0.0.0", rpc=[])
    warm = re.search(r"llamado (bench .*?) &&", text)
    assert warm is not None and read(shlex.split(warm[1]))[0] == "bench"
    probe = re.search(r"CMD (\[.*\])$", said["HEALTHCHECK"])
    assert probe is not None and read(json.loads(probe[1])[1:])[0] == "wait"


def project_file() -> str:
    return (Path(__file__).parents[2] / "pyproject.toml").read_text()


# --- nginx and prometheus ---------------------------------------------------------------------------------------------


def test_nginx_takes_the_file(what: Deployment, tmp_path: Path) -> None:
    nginx = program("nginx")
    text = files_for("nginx", what)["nginx.conf"]
    if what.tls:
        from doctor_stand_ins import Certificates

        made = Certificates(tmp_path)
        text = text.replace("/etc/llamado/cert.pem", str(made.cert)).replace("/etc/llamado/key.pem", str(made.key))
    assert "proxy_buffering off;" in text and "proxy_read_timeout 3600s;" in text
    assert (
        text.count("max_fails") == (what.replicas if what.gateway is None else 1)
        and f"server_name {what.domain};" in text
    )
    (tmp_path / "nginx.conf").write_text(text)
    done = accepted(nginx, "-t", "-c", tmp_path / "nginx.conf", "-g", f"pid {tmp_path}/pid;")
    assert done.returncode == 0 and "[warn]" not in done.stderr, done.stderr
    (tmp_path / "nginx.conf").write_text(text.replace("least_conn;", "least_con;"))
    assert accepted(nginx, "-t", "-c", tmp_path / "nginx.conf", "-g", f"pid {tmp_path}/pid;").returncode != 0


def test_promtool_takes_the_files(what: Deployment, tmp_path: Path) -> None:
    promtool = program("promtool")
    folder = written(tmp_path / "prometheus", files_for("prometheus", what))
    done = accepted(promtool, "check", "config", "--syntax-only", folder / "prometheus.yml")
    assert done.returncode == 0, done.stderr
    done = accepted(promtool, "check", "rules", folder / "llamado.rules.yml")
    assert done.returncode == 0 and f"{len(monitoring.ALERTS)} rules" in done.stdout, done.stderr
    rules = folder / "llamado.rules.yml"
    rules.write_text(rules.read_text().replace("min_over_time(", "min_over_tme("))
    assert accepted(promtool, "check", "rules", rules).returncode != 0


def expressions() -> dict[str, str]:
    """All expressions of alerts and drawings."""
    what = Deployment()
    groups = yaml.safe_load(files_for("prometheus", what)["llamado.rules.yml"])["groups"]
    found = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    for panel in json.loads(files_for("grafana", what)["llamado-dashboard.json"])["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_promtool_takes_what_grafana_asks(tmp_path: Path) -> None:
    promtool = program("promtool")
    rules = [
        {"record": f"drawn:{i}", "expr": text.replace("$__rate_interval", "5m")}
        for i, text in enumerate(expressions().values())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    done = accepted(promtool, "check", "rules", path)
    assert done.returncode == 0 and f"{len(rules)} rules" in done.stdout, done.stdout + done.stderr


def test_all_metrics_are_there() -> None:
    """Those that alerts and drawings name are served, with the labels that they ask for."""
    with listening(metrics=True) as (url, _):
        httpx.get(f"{url}/v1/models")
        served = httpx.get(f"{url}/metrics").text
    names = set(re.findall(r"^([a-zA-Z_:][\w:]*)", served, re.MULTILINE))
    wanted = {name for text in expressions().values() for name in re.findall(r"(?:llamacpp:|process_)\w+", text)}
    assert len(wanted) > 10 and wanted <= names
    assert WAITING in names
    assert 'status="200"' in served


def test_grafana(what: Deployment) -> None:
    content = json.loads(files_for("grafana", what)["llamado-dashboard.json"])
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
def test_nginx_before_two_servers(two: tuple[str, str, Any, Any], tmp_path: Path) -> None:
    """Answers come through while one of two is loading; streams pass as they come, and monitoring is not shown."""
    nginx = program("nginx")
    from ports import free_port

    from llamado.cluster.deploy.nginx import nginx as nginx_files

    *addresses, first, _ = two
    port = free_port()
    text = nginx_files(Deployment(replicas=2), addresses)["nginx.conf"].replace(
        "listen 80;", f"listen 127.0.0.1:{port};"
    )
    # our servers ask for it in each answer, llama.cpp's do not
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
                assert response.status_code == 200 and len(chunks) > 5, "the stream was held back"
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
    content = yaml.safe_load(files["prometheus.yml"])
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
                    asked = httpx.get(f"http://127.0.0.1:{port}/api/v1/query",
                                      params={"query": "llamacpp:requests_deferred{job='llamado'}"})  # fmt: skip
                    found = asked.json()["data"]["result"] if asked.status_code == 200 else []
                except (httpx.HTTPError, ValueError):
                    assert process.poll() is None, (tmp_path / "log").read_text()
            assert {one["metric"]["instance"] for one in found} == set(two[:2]), (tmp_path / "log").read_text()
            rules = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules").json()["data"]["groups"][0]["rules"]
            assert len(rules) == len(monitoring.ALERTS)
        finally:
            process.terminate()
            process.wait(60)


# --- kubernetes -------------------------------------------------------------------------------------------------------


def manifests(what: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in files_for("kubernetes", what).values():
        for one in yaml.safe_load_all(text):
            found[f"{one['kind']} {one['metadata']['name']}"] = one
    return found


@pytest.mark.full
def test_kubernetes_takes_the_manifests(what: Deployment) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[full]': it has the schemas")
    found = manifests(what)
    for one in found.values():
        validate.validate(one, KUBERNETES, strict=True)
    broken = json.loads(json.dumps(next(one for one in found.values() if one["kind"] == "Deployment")))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGett"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, KUBERNETES, strict=True)


def container(manifest: Any) -> Any:
    (one,) = manifest["spec"]["template"]["spec"]["containers"]
    return one


def test_kubernetes(what: Deployment) -> None:
    found = manifests(what)
    servers = found[f"{'Deployment' if what.gateway is None else 'StatefulSet'} llamado-server"]
    server = container(servers)
    scheme = "tls://" if what.tls else ""
    rpc = [f"{scheme}llamado-worker-{i}.llamado-worker:50052" for i in range(what.workers)]
    flags = is_as_asked(server["args"], what, host="0.0.0.0", rpc=rpc)
    assert bool(flags.rpc_ca) == bool(flags.rpc_cert) == bool(what.workers and what.tls)
    assert server["startupProbe"]["httpGet"]["path"] == server["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert found["HorizontalPodAutoscaler llamado-server"]["spec"]["minReplicas"] == what.replicas
    environment = {one["name"]: one.get("value") for one in server["env"]}
    hosts = AccessRules(allowed_hosts=tuple(environment[variable("serve", "allowed_hosts")].split(",")))
    for name in ("llamado-server", "llamado-server-0.llamado-server", "llamado-server.default.svc.cluster.local"):
        assert hosts.allows_host(f"{name}:8080")
    assert not hosts.allows_host("llamado-server.evil.com")
    assert ("Secret llamado-keys" in found) == what.key == (variable("serve", "api_key") in environment)
    assert ("Secret llamado-tls" in found) == what.tls
    pods = [one["spec"]["template"]["spec"] for one in found.values() if "template" in one.get("spec", {})]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for one in found.values()
                    for claim in one.get("spec", {}).get("volumeClaimTemplates", [])}  # fmt: skip
        for one in pod["containers"] + pod.get("initContainers", []):
            assert one["securityContext"]["readOnlyRootFilesystem"]
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
    assert ("StatefulSet llamado-worker" in found) == (what.workers > 0)
    assert ("PodDisruptionBudget llamado-worker" in found) == (what.workers > 0)
    if what.workers:
        worker = container(found["StatefulSet llamado-worker"])
        name, flags = read(worker["args"])
        assert name == "worker" and flags.host == "0.0.0.0" and bool(flags.tls_client_ca) == what.tls
        policy = found["NetworkPolicy llamado-worker"]["spec"]
        (rule,) = policy["ingress"]
        assert rule["from"] == [{"podSelector": servers["spec"]["selector"]}]
        assert rule["ports"][0]["port"] == worker["ports"][0]["containerPort"]
        assert policy["podSelector"] == found["StatefulSet llamado-worker"]["spec"]["selector"]
        assert found["Service llamado-worker"]["spec"]["publishNotReadyAddresses"]
    if what.memory:
        assert server["resources"]["limits"] == {"memory": "16Gi", "cpu": "2.5"}
    assert ("Deployment llamado-gateway" in found) == (what.gateway is not None)
    if what.gateway is not None:
        gateway = container(found["Deployment llamado-gateway"])
        name, flags = read(gateway["args"])
        most = found["HorizontalPodAutoscaler llamado-server"]["spec"]
        assert most["scaleTargetRef"]["kind"] == "StatefulSet" and servers["spec"]["serviceName"] == "llamado-server"
        names = [f"http://llamado-server-{i}.llamado-server:8080" for i in range(most["maxReplicas"])]
        assert name == "gateway" and flags.replica == [",".join(names)] and flags.patience == 20
        assert bool(flags.ssl_cert_file) == what.tls and gateway["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
        assert (
            found["Service llamado-server"]["spec"]["clusterIP"] == "None" and not read(server["args"])[1].ssl_cert_file
        )
        names = [one["name"] for one in gateway["env"]]
        assert names == [variable("gateway", "allowed_hosts"), variable("gateway", "replica_key")]
        assert found["NetworkPolicy llamado-gateway"] and found["PodDisruptionBudget llamado-gateway"]


def test_the_autoscaler_gets_its_metric() -> None:
    (rule,) = yaml.safe_load(files_for("prometheus", Deployment())["adapter-values.yaml"])["rules"]["custom"]
    scaler = manifests(Deployment(serve=SERVE))["HorizontalPodAutoscaler llamado-server"]
    (metric,) = scaler["spec"]["metrics"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"] and f'"{WAITING}"' in rule["seriesQuery"]


def test_kubernetes_groups() -> None:
    what = Deployment(serve=SERVE, workers=2, replicas=3, leader_worker_set=True)
    found = manifests(what)
    assert not {"Deployment llamado-server", "StatefulSet llamado-worker"} & set(found)
    group = found["LeaderWorkerSet llamado-group"]["spec"]
    assert group["replicas"] == 3 and group["leaderWorkerTemplate"]["size"] == 3
    (leader,) = group["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    (worker,) = group["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    spelled_out = [word.replace("$(LWS_GROUP)", "llamado-group-1") for word in leader["args"]]
    names = [f"llamado-group-1-{i}.llamado-group:50052" for i in (1, 2)]
    is_as_asked(spelled_out, what, host="0.0.0.0", rpc=names)
    assert read(worker["args"])[0] == "worker" and leader["env"][0]["name"] == "LWS_GROUP"
    assert found["HorizontalPodAutoscaler llamado-server"]["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


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
    ("given", "says"),
    [
        ({"serve": ("-m", "m", "--no-such-flag")}, "--no-such-flag"),
        ({"serve": ("-m", "m", "-c", "many")}, "-c"),
        ({"serve": ()}, "which model"),
        ({"serve": ("-m", "m", "--port", "1")}, "before --"),
        ({"serve": ("-m", "m", "--rpc", "h:1"), "workers": 1}, "--rpc"),
        ({"replicas": 0}, "--replicas"),
        ({"workers": -1}, "--workers"),
        ({"port": 70000}, "--port"),
        ({"memory": "lots"}, "--memory"),
        ({"cpus": 0.0}, "--cpus"),
        ({"name": "Big Name"}, "--name"),
        ({"domain": "a; drop"}, "'a; drop'"),
    ],
)
def test_what_cannot_be_deployed(given: dict[str, Any], says: str) -> None:
    with pytest.raises((DeploymentError, FlagError), match=re.escape(says)):
        files_for("systemd", Deployment(**{"serve": ("-m", "m"), **given}))


def test_flags_are_those_of_the_table() -> None:
    for command, key in (("serve", "metrics"), ("worker", "cache"), ("serve", "api_key_file")):
        (flag,) = [f for f in FLAGS if f.key == key and command in f.commands and f.kind is Kind.USED]
        assert spelled(command, key) in flag.names
    with pytest.raises(KeyError):
        spelled("serve", "no_such_key")
