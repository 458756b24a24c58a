"""An image, and a compose file of servers and workers made of it."""

from __future__ import annotations

from typing import Any

from llamado.cluster.deploy.deployment import Deployment, spelled, yaml_text
from llamado.cluster.deploy.nginx import nginx

USER = 10001
MODELS, CACHE = "/models", "/cache"


def dockerfile(what: Deployment) -> dict[str, str]:
    """A Dockerfile of a slim image that runs as nobody in particular, with kernels compiled when it is built."""
    command = ", ".join(f'"{_escaped(word)}"' for word in what.serve_command(host="0.0.0.0"))
    wait = spelled("wait", "timeout")
    return {
        "Dockerfile": f"""\
# syntax=docker/dockerfile:1
# Built in a clone of llamado: docker build -t {what.image} .
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN python -m venv /opt/llamado && /opt/llamado/bin/pip install --no-cache-dir .

FROM python:3.12-slim
COPY --from=build /opt/llamado /opt/llamado
RUN groupadd --gid {USER} llamado && useradd --uid {USER} --gid llamado --no-create-home llamado \\
    && mkdir -p {CACHE} {MODELS} && chown llamado:llamado {CACHE} \\
    && ln -s llamado /opt/llamado/bin/llama-server && ln -s llamado /opt/llamado/bin/rpc-server
# curl and nc for probes in compose files that were written for llama.cpp's images; our own need neither.
RUN apt-get update && apt-get install -y --no-install-recommends curl netcat-openbsd && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/llamado/bin:$PATH LLAMADO_CACHE={CACHE} PYTHONUNBUFFERED=1
USER {USER}:{USER}
# Kernels for the processor of the machine that builds; another kind compiles its own at its first start.
ARG WARM=smollm2
RUN llamado bench -m "$WARM" -p 32 -n 4 -r 1 && rm -rf {CACHE}/models
VOLUME {CACHE}
EXPOSE {what.port} {what.worker_port}
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \\
    CMD ["llamado", "wait", "http://127.0.0.1:{what.port}", "{wait}", "3"]
ENTRYPOINT ["llamado"]
CMD [{command}]
""",
        ".dockerignore": ".git\n.venv\n**/__pycache__\n*.gguf\ntests\nbenchmarks\n",
    }


def compose(what: Deployment) -> dict[str, str]:
    """A compose file; before several servers stands the gateway, if there is to be one, or else nginx."""
    services: dict[str, Any] = {}
    workers = [f"worker-{i + 1}" for i in range(what.workers)]
    for name in workers:
        probe = ["CMD", "llamado", "wait", f"tcp://127.0.0.1:{what.worker_port}", spelled("wait", "timeout"), "3"]
        services[name] = {
            **_service(what, what.worker_command(host="0.0.0.0")),
            "healthcheck": {"test": probe, "interval": "5s", "timeout": "10s", "retries": 5, "start_period": "30s"},
        }
    rpc = [f"{name}:{what.worker_port}" for name in workers]
    servers = ["server" if what.replicas == 1 else f"server-{i + 1}" for i in range(what.replicas)]
    more: list[str] = []
    secrets: dict[str, Any] = {}
    if what.key:
        more += [spelled("serve", "api_key_file"), "/run/secrets/keys"]
        secrets["keys"] = {"file": "./secrets/keys"}
    https: list[str] = []
    if what.tls:
        for key, file in (("ssl_key_file", "key.pem"), ("ssl_cert_file", "cert.pem")):
            https += [spelled("serve", key), f"/run/secrets/{key}"]
            secrets[key] = {"file": f"./secrets/{file}"}
    if what.server_tls:
        more += https
    scheme = "https" if what.server_tls else "http"
    for name in servers:
        probe = _http_probe(f"{scheme}://127.0.0.1:{what.port}/health")
        services[name] = {
            **_service(what, what.serve_command(*more, rpc=rpc, host="0.0.0.0")),
            "healthcheck": {"test": probe, "interval": "10s", "timeout": "10s", "retries": 3, "start_period": "30m"},
            **({"depends_on": {worker: {"condition": "service_healthy"} for worker in workers}} if workers else {}),
            **({"secrets": _named(secrets, more)} if _named(secrets, more) else {}),
            "environment": what.allowed_hosts(name),
        }
        if what.mlock:
            services[name]["ulimits"]["memlock"] = -1
    files: dict[str, str] = {}
    if what.gateway is not None:
        addresses = [f"{name}:{what.port}" for name in servers]
        services["gateway"] = {
            **_service(what, what.gateway_command(*https, servers=addresses, host="0.0.0.0")),
            "ports": [f"{what.port}:{what.port}"],
            "healthcheck": {
                "test": _http_probe(f"{'https' if what.tls else 'http'}://127.0.0.1:{what.port}/livez"),
                "interval": "10s",
                "timeout": "10s",
                "retries": 3,
            },
            "depends_on": {name: {"condition": "service_healthy"} for name in servers},
            **({"secrets": _named(secrets, https)} if https else {}),
            "environment": what.allowed_hosts("gateway"),
        }
        services["gateway"].pop("deploy", None)  # those limits are what a model takes
        services["gateway"].pop("volumes")
    elif what.replicas == 1:
        services["server"]["ports"] = [f"{what.port}:{what.port}"]
    else:
        files |= nginx(what, [f"{name}:{what.port}" for name in servers])
        (configuration,) = files
        services["nginx"] = {
            "image": "nginx:stable-alpine",
            "ports": [f"{what.port}:80"],
            "volumes": [f"./{configuration}:/etc/nginx/nginx.conf:ro"],
            "depends_on": {name: {"condition": "service_healthy"} for name in servers},
            "restart": "unless-stopped",
        }
    content: dict[str, Any] = {
        "name": what.name,
        "services": services,
        "volumes": {f"cache-{name}": {} for name in (*workers, *servers)},
    }
    if secrets:
        content["secrets"] = secrets
    for name in (*workers, *servers):
        services[name]["volumes"].append(f"cache-{name}:{CACHE}")
    return {"compose.yaml": yaml_text(_literal(content)), **files}


def _named(secrets: dict[str, Any], flags: list[str]) -> list[str]:
    """The secrets that flags name."""
    return [name for name in secrets if f"/run/secrets/{name}" in flags]


def _service(what: Deployment, command: list[str]) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": what.image,
        "build": {"context": "."},
        "command": command,
        "volumes": [f"{what.models}:{MODELS}:ro"],
        "restart": "unless-stopped",
        "stop_grace_period": "90s",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "ulimits": {"nofile": 65536},
    }
    limits: dict[str, str] = {}
    if what.memory is not None:
        limits["memory"] = what.memory
    if what.cpus is not None:
        limits["cpus"] = f"{what.cpus:g}"
    if limits:
        service["deploy"] = {"resources": {"limits": limits}}
    return service


def _http_probe(url: str) -> list[str]:
    """A command that succeeds where a server answers 200, whoever vouches for its certificate."""
    code = f"import ssl,urllib.request as r;r.urlopen({url!r},timeout=5,context=ssl._create_unverified_context())"
    return ["CMD", "/opt/llamado/bin/python", "-c", code]


def _literal(value: Any) -> Any:
    """With `$` doubled: compose would put variables of its environment in."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')
