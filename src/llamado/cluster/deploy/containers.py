"""Container image, and a compose file of servers and workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamado.cluster.deploy.deployment import Deployment, environment_file, flag_name, path_flags, yaml_text
from llamado.cluster.deploy.nginx import nginx

USER = 10001
MODELS, CACHE, SECRETS = "/models", "/cache", "/run/secrets"
PROBE = ["llamado", "wait", flag_name("wait", "timeout"), "5"]
"""Command that succeeds if the server, gateway or worker of this container answers: requests, or HELLO."""


def dockerfile(deployment: Deployment) -> dict[str, str]:
    """Return the Dockerfile of a slim image (not root, kernels compiled at build), and the secrets of its server."""
    words = deployment.serve_command(*_file_flags(deployment, "server", certificate=deployment.https), host="0.0.0.0")
    command = ", ".join(f'"{_escape_json(word)}"' for word in words)
    probe = ", ".join(f'"{word}"' for word in PROBE)
    secrets = environment_file("server.env", deployment.secrets("server"))
    run = ["docker run"]
    run += [f"--env-file {name.removesuffix('.example')}" for name in secrets]
    run += [
        f"-v {_source(deployment, name)}:{SECRETS}/{name}:ro"
        for name in _files(deployment, "server", certificate=deployment.https)
    ]
    publish = f"{_published(deployment)}{deployment.port}:{deployment.port}"
    return {
        "Dockerfile": f"""\
# syntax=docker/dockerfile:1
# Built in a clone of llamado: docker build -t {deployment.image} .
# {" ".join(run)} -p {publish} -v {deployment.models}:{MODELS}:ro {deployment.image}
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN python -m venv /opt/llamado && /opt/llamado/bin/pip install --no-cache-dir .

FROM python:3.12-slim
COPY --from=build /opt/llamado /opt/llamado
RUN groupadd --gid {USER} llamado && useradd --uid {USER} --gid llamado --no-create-home llamado \\
    && mkdir -p {CACHE} {MODELS} && chown llamado:llamado {CACHE} \\
    && ln -s llamado /opt/llamado/bin/llama-server && ln -s llamado /opt/llamado/bin/rpc-server
# curl and nc: for health checks in compose files that were written for llama.cpp's images.
RUN apt-get update && apt-get install -y --no-install-recommends curl netcat-openbsd && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/llamado/bin:$PATH LLAMADO_CACHE={CACHE} PYTHONUNBUFFERED=1
USER {USER}:{USER}
# Compile kernels for the CPU of the build machine; on another CPU the first start compiles its own.
ARG WARM=smollm2
RUN llamado bench -m "$WARM" -p 32 -n 4 -r 1 && rm -rf {CACHE}/models
VOLUME {CACHE}
EXPOSE {deployment.port} {deployment.worker_port}
STOPSIGNAL SIGTERM
# Checks the program of the container (server, router, gateway or worker) at the address of its command line.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 CMD [{probe}]
ENTRYPOINT ["llamado"]
CMD [{command}]
""",
        ".dockerignore": ".git\n.venv\n**/__pycache__\n*.gguf\ntests\nbenchmarks\nsecrets\n**/*.env\n**/*.pem\n",
        **secrets,
    }


def compose(deployment: Deployment) -> dict[str, str]:
    """Return a compose file. Clients of several servers connect to the gateway if there is one, otherwise to nginx."""
    workers = [f"worker-{i + 1}" for i in range(deployment.workers)]
    servers = ["server" if deployment.replicas == 1 else f"server-{i + 1}" for i in range(deployment.replicas)]
    addresses = [f"{name}:{deployment.port}" for name in servers]
    front = "gateway" if deployment.gateway is not None else "server" if deployment.replicas == 1 else "nginx"
    services = {name: _worker(deployment) for name in workers}
    services |= {name: _server(deployment, name, workers, certificate=front == "server") for name in servers}
    for name in services:
        services[name]["volumes"].append(f"cache-{name}:{CACHE}")
    files: dict[str, str] = {}
    inside = deployment.port
    if front == "gateway":
        services[front] = {**_gateway(deployment, addresses), "depends_on": _healthy(servers)}
    elif front == "nginx":
        files |= nginx(deployment, addresses)
        services[front] = {**_nginx(deployment, *files), "depends_on": _healthy(servers)}
        inside = 443 if deployment.https else 80
    services[front]["ports"] = [f"{_published(deployment)}{deployment.port}:{inside}"]
    content: dict[str, Any] = {
        "name": deployment.name,
        "services": services,
        "volumes": {f"cache-{name}": {} for name in (*workers, *servers)},
    }
    about = ""
    if names := dict.fromkeys(name for service in services.values() for name in service.get("secrets", [])):
        content["secrets"] = {name: {"file": _source(deployment, name)} for name in names}
        about = f"# Files of secrets must be readable by user {USER}: chown {USER} FILE && chmod 400 FILE\n"
    for part in ("server", "gateway"):
        files |= environment_file(f"secrets/{part}.env", deployment.secrets(part))
    return {"compose.yaml": about + yaml_text(_escape(content)), **files}


def _worker(deployment: Deployment) -> dict[str, Any]:
    return _service(deployment, "worker", deployment.worker_command(host="0.0.0.0"), start="30s")


def _server(deployment: Deployment, name: str, workers: Sequence[str], *, certificate: bool) -> dict[str, Any]:
    flags = _file_flags(deployment, "server", certificate=certificate)
    rpc = [f"{worker}:{deployment.worker_port}" for worker in workers]
    service = {
        **_service(deployment, "server", deployment.serve_command(*flags, rpc=rpc, host="0.0.0.0"), start="30m"),
        **({"depends_on": _healthy(workers)} if workers else {}),
        **_secrets(deployment, "server", certificate=certificate),
        "environment": deployment.allowed_hosts(name),
    }
    if deployment.mlock:
        service["ulimits"]["memlock"] = -1
    return service


def _gateway(deployment: Deployment, servers: Sequence[str]) -> dict[str, Any]:
    flags = _file_flags(deployment, "gateway", certificate=True)
    command = deployment.gateway_command(*flags, servers=servers, host="0.0.0.0")
    service = {
        **_service(deployment, "gateway", command, start="1m"),
        **_secrets(deployment, "gateway", certificate=True),
        "environment": deployment.allowed_hosts("gateway"),
    }
    if not service["volumes"]:
        del service["volumes"]
    return service


def _nginx(deployment: Deployment, configuration: str) -> dict[str, Any]:
    return {
        "image": "nginx:stable-alpine",
        "volumes": [f"./{configuration}:/etc/nginx/nginx.conf:ro"],
        **({"secrets": ["ssl_key_file", "ssl_cert_file"]} if deployment.https else {}),
        "restart": "unless-stopped",
    }


def _healthy(names: Sequence[str]) -> dict[str, Any]:
    """Return `depends_on` of these services: wait until they are healthy."""
    return {name: {"condition": "service_healthy"} for name in names}


def _published(deployment: Deployment) -> str:
    """Return the host address of the published port, before the port: loopback only, unless clients need a key."""
    return "" if deployment.has_key else "127.0.0.1:"


def _files(deployment: Deployment, part: str, *, certificate: bool) -> list[str]:
    return [*dict.fromkeys(deployment.files(part, certificate=certificate).values())]


def _source(deployment: Deployment, name: str) -> str:
    places = {"ssl_key_file": "./secrets/key.pem", "ssl_cert_file": "./secrets/cert.pem"}
    return deployment.source(name) or places[name]


def _file_flags(deployment: Deployment, part: str, *, certificate: bool) -> list[str]:
    """Return the flags of a part with the paths of its secret files."""
    names = deployment.files(part, certificate=certificate)
    return path_flags(part, {key: f"{SECRETS}/{name}" for key, name in names.items()})


def _secrets(deployment: Deployment, part: str, *, certificate: bool) -> dict[str, Any]:
    """Return a service's entries for secret files and variables."""
    files = _files(deployment, part, certificate=certificate)
    return {
        **({"secrets": files} if files else {}),
        **({"env_file": [f"./secrets/{part}.env"]} if deployment.secrets(part) else {}),
    }


def _service(deployment: Deployment, part: str, command: list[str], *, start: str) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": deployment.image,
        "build": {"context": "."},
        "command": command,
        "volumes": [
            *([f"{deployment.models}:{MODELS}:ro"] if part != "gateway" else []),
            *(f"{path}:{path}" for path in deployment.written_folders(part)),
        ],
        "restart": "unless-stopped",
        "stop_grace_period": "90s",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "ulimits": {"nofile": 65536},
        "healthcheck": {
            "test": ["CMD", *PROBE],
            "interval": "10s",
            "timeout": "10s",
            "retries": 3,
            "start_period": start,
        },
    }
    limits: dict[str, str] = {}
    if memory := deployment.memory_limit(part):
        limits["memory"] = memory
    if deployment.cpus is not None and part != "gateway":
        limits["cpus"] = f"{deployment.cpus:g}"
    if limits:
        service["deploy"] = {"resources": {"limits": limits}}
    return service


def _escape(value: Any) -> Any:
    """Double every `$`, which compose would replace by variables of its environment."""
    if isinstance(value, dict):
        return {key: _escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escape(inner) for inner in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _escape_json(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')
