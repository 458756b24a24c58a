"""systemd units: templates for servers and workers with the port as instance name, a gateway, and a target for all."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.cluster.deploy.deployment import Deployment, environment_file, flag_name, path_flags

Entries = dict[str, str | list[str]]
"""Entries of a section. A list stands for several lines with the same key."""

_START_SECONDS = 1800
"""Reading or sending a large model takes minutes."""
_STOP_SECONDS = 90
"""Time for running streams to finish."""
_CREDENTIALS, _MAIN = "${CREDENTIALS_DIRECTORY}", "$MAINPID"


def systemd(deployment: Deployment) -> dict[str, str]:
    """Return unit files and environment files with secrets, by their names. Raises FlagError and DeploymentError."""
    name = deployment.name
    servers = [f"{name}-server@{deployment.server_port + i}.service" for i in range(deployment.replicas)]
    gateway = [f"{name}-gateway.service"] if deployment.gateway is not None else []
    workers = [f"{name}-worker@{deployment.worker_port + i}.service" for i in range(deployment.workers)]
    rpc = [f"127.0.0.1:{deployment.worker_port + i}" for i in range(deployment.workers)]
    files = {
        f"{name}.target": _unit(
            Unit={"Description": "llamado: all servers and workers", "Wants": " ".join([*workers, *servers, *gateway])},
            Install={"WantedBy": "multi-user.target"},
        ),
        f"{name}-server@.service": _server(deployment, rpc, workers),
    }
    if deployment.workers:
        files[f"{name}-worker@.service"] = _worker(deployment)
    if deployment.gateway is not None:
        files[f"{name}-gateway.service"] = _gateway(deployment, servers)
    for part in ("server", "gateway"):
        files |= environment_file(f"{part}.env", deployment.secrets(part))
    first = f"{name}.target"
    files[first] = "".join(f"# {line}\n" for line in _instructions(deployment, files)) + files[first]
    return files


def _instructions(deployment: Deployment, files: Iterable[str]) -> list[str]:
    folder = f"/etc/{deployment.name}"
    lines = [
        f"useradd --system --home-dir /var/lib/{deployment.name} {deployment.name}",
        "cp *.target *.service /etc/systemd/system/",
    ]
    for file in files:
        if ".env" in file:
            written = file.removesuffix(".example")
            filled = f"   # {file} with the keys filled in" if file != written else ""
            lines.append(f"install -D -m 600 {written} {folder}/{written}{filled}")
    places = {path for part in ("server", "gateway") for path in _sources(deployment, part).values()}
    if missing := sorted(path for path in places if path.startswith(f"{folder}/")):
        lines.append(f"create these files, readable by root only (600): {', '.join(missing)}")
    return [*lines, f"systemctl daemon-reload && systemctl enable --now {deployment.name}.target"]


def _server(deployment: Deployment, rpc: list[str], workers: list[str]) -> str:
    alone = deployment.replicas == 1 and deployment.front == "server"
    host = "0.0.0.0" if alone and deployment.has_key else "127.0.0.1"
    words = _instance(deployment.serve_command(rpc=rpc, host=host), flag_name("serve", "port"))
    service = _service(deployment, "server", [deployment.program, *words, *_file_flags(deployment, "server")])
    wait = ["wait", flag_name("wait", "pid"), _MAIN, flag_name("wait", "timeout"), str(_START_SECONDS)]
    service["ExecStartPost"] = _line([deployment.program, *wait])
    service["TimeoutStartSec"] = str(_START_SECONDS + 60)
    if deployment.mlock:
        service["LimitMEMLOCK"] = "infinity"
    # No Requires=: the server itself waits for a lost worker and must not be restarted for it.
    return _service_unit(deployment, "llamado server on port %i", service, after=workers)


def _sources(deployment: Deployment, part: str) -> dict[str, str]:
    """Return the paths of a part's secret files, by the keys of its flags."""
    places = {"ssl_key_file": f"/etc/{deployment.name}/key.pem", "ssl_cert_file": f"/etc/{deployment.name}/cert.pem"}
    names = deployment.files(part, certificate=part == deployment.front)
    return {key: deployment.source(name) or places[key] for key, name in names.items()}


def _file_flags(deployment: Deployment, part: str) -> list[str]:
    """Return the flags of a part with its secret files, which systemd reads as root and passes to this part only."""
    return path_flags(part, {key: f"{_CREDENTIALS}/{key}" for key in _sources(deployment, part)})


def _gateway(deployment: Deployment, servers: list[str]) -> str:
    addresses = [f"127.0.0.1:{deployment.server_port + i}" for i in range(deployment.replicas)]
    host = "0.0.0.0" if deployment.has_key else "127.0.0.1"
    words = deployment.gateway_command(*_file_flags(deployment, "gateway"), servers=addresses, host=host)
    service = _service(deployment, "gateway", [deployment.program, *words])
    return _service_unit(deployment, "llamado gateway", service, after=servers)


def _worker(deployment: Deployment) -> str:
    words = _instance(deployment.worker_command(host="127.0.0.1"), flag_name("worker", "port"))
    service = _service(deployment, "worker", [deployment.program, *words])
    return _service_unit(deployment, "llamado worker on port %i", service)


def _service_unit(deployment: Deployment, description: str, service: Entries, after: Iterable[str] = ()) -> str:
    """Return a unit that starts after the network and the units in `after`."""
    network, target = "network-online.target", f"{deployment.name}.target"
    return _unit(
        Unit={"Description": description, "After": " ".join([network, *after]), "Wants": network, "PartOf": target},
        Service=service,
        Install={"WantedBy": target},
    )


def _instance(words: list[str], port: str) -> list[str]:
    """Return the command with the unit's instance name as port."""
    found = list(words)
    found[found.index(port) + 1] = "%i"
    return found


def _service(deployment: Deployment, part: str, command: list[str]) -> Entries:
    service: Entries = {
        "Type": "exec",
        "User": deployment.name,
        "Group": deployment.name,
        "ExecStart": _line(command),
        "Restart": "always",
        "RestartSec": "5",
        "TimeoutStopSec": str(_STOP_SECONDS),
        "LimitNOFILE": "65536",
        "StateDirectory": deployment.name,
        "CacheDirectory": deployment.name,
        "Environment": " ".join(
            [
                f"LLAMADO_CACHE=/var/cache/{deployment.name} HOME=/var/lib/{deployment.name}",
                *(f"{name}={hosts}" for name, hosts in deployment.allowed_hosts().items()),
            ]
        ),
        "NoNewPrivileges": "true",
        "PrivateTmp": "true",
        "ProtectSystem": "strict",
        "ProtectHome": "read-only",
        "ProtectKernelTunables": "true",
        "ProtectControlGroups": "true",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    }
    if deployment.secrets(part):
        service["EnvironmentFile"] = f"/etc/{deployment.name}/{part}.env"
    if sources := _sources(deployment, part):
        service["LoadCredential"] = [f"{key}:{path.replace('%', '%%')}" for key, path in sources.items()]
    if folders := deployment.written_folders(part):
        service["ReadWritePaths"] = _line(folders)
    if memory := deployment.memory_limit(part):
        service["MemoryMax"] = memory
    if deployment.cpus is not None and part != "gateway":
        service["CPUQuota"] = f"{100 * deployment.cpus:.0f}%"
    return service


def _line(words: Iterable[str]) -> str:
    """Return a command line in systemd's quoting."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    word = word if word == "%i" or word.endswith(":%i") else word.replace("%", "%%")
    word = word if word.startswith((f"{_CREDENTIALS}/", _MAIN)) else word.replace("$", "$$")
    if word and not any(c.isspace() or c in "\"'\\;" for c in word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unit(**sections: Entries) -> str:
    lines: list[str] = []
    for title, entries in sections.items():
        lines.append(f"[{title}]")
        for key, values in entries.items():
            lines += [f"{key}={value}" for value in ([values] if isinstance(values, str) else values)]
        lines.append("")
    return "\n".join(lines)
