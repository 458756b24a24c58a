"""An image, and a compose file of servers and workers made of it."""

from __future__ import annotations

from typing import Any

from llamado.cluster.deploy.deployment import Deployment, environment_file, spelled, yaml_text
from llamado.cluster.deploy.nginx import nginx

USER = 10001
MODELS, CACHE, SECRETS = "/models", "/cache", "/run/secrets"
PROBE = ["llamado", "wait", spelled("wait", "timeout"), "5"]
"""Command that succeeds if the server, gateway or worker of this container answers: requests, or HELLO."""


def dockerfile(what: Deployment) -> dict[str, str]:
    """Return the Dockerfile of a slim image without root, with kernels compiled at build, and its secrets."""
    words = what.serve_command(*_file_flags(what, "server", certificate=what.https), host="0.0.0.0")
    command = ", ".join(f'"{_escaped(word)}"' for word in words)
    probe = ", ".join(f'"{word}"' for word in PROBE)
    secrets = environment_file("server.env", what.secrets("server"))
    run = ["docker run"]
    run += [f"--env-file {name.removesuffix('.example')}" for name in secrets]
    run += [f"-v {_source(what, name)}:{SECRETS}/{name}:ro" for name in _files(what, "server", certificate=what.https)]
    publish = f"{_published(what)}{what.port}:{what.port}"
    return {
        "Dockerfile": f"""\
# syntax=docker/dockerfile:1
# Built in a clone of llamado: docker build -t {what.image} .
# {" ".join(run)} -p {publish} -v {what.models}:{MODELS}:ro {what.image}
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
# Of whatever runs in the container, server, router, gateway or worker, at the address that its command line names.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 CMD [{probe}]
ENTRYPOINT ["llamado"]
CMD [{command}]
""",
        ".dockerignore": ".git\n.venv\n**/__pycache__\n*.gguf\ntests\nbenchmarks\nsecrets\n**/*.env\n**/*.pem\n",
        **secrets,
    }


def compose(what: Deployment) -> dict[str, str]:
    """A compose file; before several servers stands the gateway, if there is to be one, or else nginx."""
    services: dict[str, Any] = {}
    workers = [f"worker-{i + 1}" for i in range(what.workers)]
    for name in workers:
        services[name] = _service(what, "worker", what.worker_command(host="0.0.0.0"), start="30s")
    rpc = [f"{name}:{what.worker_port}" for name in workers]
    servers = ["server" if what.replicas == 1 else f"server-{i + 1}" for i in range(what.replicas)]
    front = "gateway" if what.gateway is not None else "server" if what.replicas == 1 else "nginx"
    secure = front == "server"
    more = _file_flags(what, "server", certificate=secure)
    for name in servers:
        services[name] = {
            **_service(what, "server", what.serve_command(*more, rpc=rpc, host="0.0.0.0"), start="30m"),
            **({"depends_on": {worker: {"condition": "service_healthy"} for worker in workers}} if workers else {}),
            **_secrets(what, "server", certificate=secure),
            "environment": what.allowed_hosts(name),
        }
        if what.mlock:
            services[name]["ulimits"]["memlock"] = -1
    ready = {name: {"condition": "service_healthy"} for name in servers}
    files: dict[str, str] = {}
    inside = what.port
    if front == "gateway":
        addresses = [f"{name}:{what.port}" for name in servers]
        more = _file_flags(what, "gateway", certificate=True)
        services["gateway"] = {
            **_service(what, "gateway", what.gateway_command(*more, servers=addresses, host="0.0.0.0"), start="1m"),
            "depends_on": ready,
            **_secrets(what, "gateway", certificate=True),
            "environment": what.allowed_hosts("gateway"),
        }
        if not what.written_folders("gateway"):
            services["gateway"].pop("volumes")
    elif front == "nginx":
        files |= nginx(what, [f"{name}:{what.port}" for name in servers])
        (configuration,) = files
        inside = 443 if what.https else 80
        services["nginx"] = {
            "image": "nginx:stable-alpine",
            "volumes": [f"./{configuration}:/etc/nginx/nginx.conf:ro"],
            "depends_on": ready,
            **({"secrets": ["ssl_key_file", "ssl_cert_file"]} if what.https else {}),
            "restart": "unless-stopped",
        }
    services["server" if secure else front]["ports"] = [f"{_published(what)}{what.port}:{inside}"]
    content: dict[str, Any] = {
        "name": what.name,
        "services": services,
        "volumes": {f"cache-{name}": {} for name in (*workers, *servers)},
    }
    names = dict.fromkeys(name for service in services.values() for name in service.get("secrets", []))
    if names:
        content["secrets"] = {name: {"file": _source(what, name)} for name in names}
    for name in (*workers, *servers):
        services[name]["volumes"].append(f"cache-{name}:{CACHE}")
    for part in ("server", "gateway"):
        files |= environment_file(f"secrets/{part}.env", what.secrets(part))
    about = (
        f"# Files of secrets must be readable by user {USER}: chown {USER} FILE && chmod 400 FILE\n" if names else ""
    )
    return {"compose.yaml": about + yaml_text(_literal(content)), **files}


def _published(what: Deployment) -> str:
    """Address of the host that is published, as it stands before the port: without a key that of loopback."""
    return "" if what.has_key else "127.0.0.1:"


def _files(what: Deployment, part: str, *, certificate: bool) -> list[str]:
    return [*dict.fromkeys(what.files(part, certificate=certificate).values())]


def _source(what: Deployment, name: str) -> str:
    places = {"ssl_key_file": "./secrets/key.pem", "ssl_cert_file": "./secrets/cert.pem"}
    return what.source(name) or places[name]


def _file_flags(what: Deployment, part: str, *, certificate: bool) -> list[str]:
    """Flags of a part that name files with secrets."""
    command = "serve" if part == "server" else part
    names = what.files(part, certificate=certificate)
    return [word for key, name in names.items() for word in (spelled(command, key), f"{SECRETS}/{name}")]


def _secrets(what: Deployment, part: str, *, certificate: bool) -> dict[str, Any]:
    """Files and variables with secrets of a service."""
    files = _files(what, part, certificate=certificate)
    return {
        **({"secrets": files} if files else {}),
        **({"env_file": [f"./secrets/{part}.env"]} if what.secrets(part) else {}),
    }


def _service(what: Deployment, part: str, command: list[str], *, start: str) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": what.image,
        "build": {"context": "."},
        "command": command,
        "volumes": [
            *([f"{what.models}:{MODELS}:ro"] if part != "gateway" else []),
            *(f"{path}:{path}" for path in what.written_folders(part)),
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
    memory = {"server": what.memory, "worker": what.worker_memory or what.memory}.get(part)
    if memory is not None:  # a gateway holds no model
        limits["memory"] = memory
    if what.cpus is not None and part != "gateway":
        limits["cpus"] = f"{what.cpus:g}"
    if limits:
        service["deploy"] = {"resources": {"limits": limits}}
    return service


def _literal(value: Any) -> Any:
    """With `$` doubled: compose would put variables of its environment in."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')
