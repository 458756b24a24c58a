"""Units of systemd: a server for each port, a worker for each port, and a target for all."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.cluster.deploy.deployment import Deployment, environment_file, spelled

Entries = dict[str, str | list[str]]
"""Of a section; a list is several lines of one name."""

_START_SECONDS = 1800
"""A large model takes minutes to be read or sent."""
_STOP_SECONDS = 90
"""Streams that have begun may end."""
_CREDENTIALS, _MAIN = "${CREDENTIALS_DIRECTORY}", "$MAINPID"


def systemd(what: Deployment) -> dict[str, str]:
    """Unit files, and files of variables that hold secrets, by their names. Raises FlagError and DeploymentError."""
    name = what.name
    servers = [f"{name}-server@{what.server_port + i}.service" for i in range(what.replicas)]
    gateway = [f"{name}-gateway.service"] if what.gateway is not None else []
    workers = [f"{name}-worker@{what.worker_port + i}.service" for i in range(what.workers)]
    rpc = [f"127.0.0.1:{what.worker_port + i}" for i in range(what.workers)]
    files = {
        f"{name}.target": _unit(
            Unit={"Description": "llamado: all servers and workers", "Wants": " ".join([*workers, *servers, *gateway])},
            Install={"WantedBy": "multi-user.target"},
        ),
        f"{name}-server@.service": _server(what, rpc, workers),
    }
    if what.workers:
        files[f"{name}-worker@.service"] = _worker(what)
    if what.gateway is not None:
        files[f"{name}-gateway.service"] = _gateway(what, servers)
    for part in ("server", "gateway"):
        files |= environment_file(f"{part}.env", what.secrets(part))
    first = f"{name}.target"
    files[first] = "".join(f"# {line}\n" for line in _instructions(what, files)) + files[first]
    return files


def _instructions(what: Deployment, files: Iterable[str]) -> list[str]:
    folder = f"/etc/{what.name}"
    lines = [
        f"useradd --system --home-dir /var/lib/{what.name} {what.name}",
        "cp *.target *.service /etc/systemd/system/",
    ]
    for file in files:
        if ".env" in file:
            written = file.removesuffix(".example")
            filled = f"   # with the keys of {file} filled in" if file != written else ""
            lines.append(f"install -D -m 600 {written} {folder}/{written}{filled}")
    places = {path for part in ("server", "gateway") for path in _sources(what, part).values()}
    if missing := sorted(path for path in places if path.startswith(f"{folder}/")):
        lines.append(f"put into place, for root alone (600): {', '.join(missing)}")
    return [*lines, f"systemctl daemon-reload && systemctl enable --now {what.name}.target"]


def _server(what: Deployment, rpc: list[str], workers: list[str]) -> str:
    alone = what.replicas == 1 and what.front == "server"
    host = "0.0.0.0" if alone and what.has_key else "127.0.0.1"
    words = _instance(what.serve_command(rpc=rpc, host=host), spelled("serve", "port"))
    service = _service(what, "server", [what.program, *words, *_file_flags(what, "server")])
    wait = [what.program, "wait", spelled("wait", "pid"), _MAIN, spelled("wait", "timeout"), str(_START_SECONDS)]
    service["ExecStartPost"] = _line(wait)
    service["TimeoutStartSec"] = str(_START_SECONDS + 60)
    if what.mlock:
        service["LimitMEMLOCK"] = "infinity"
    # A worker that is away is waited for by the server itself, which must not be restarted for that: no Requires=
    after = " ".join(["network-online.target", *workers])
    return _unit(
        Unit={
            "Description": "llamado server on port %i",
            "After": after,
            "Wants": "network-online.target",
            "PartOf": f"{what.name}.target",
        },
        Service=service,
        Install={"WantedBy": f"{what.name}.target"},
    )


def _sources(what: Deployment, part: str) -> dict[str, str]:
    """Paths of the files with secrets of a part, by the keys of its flags."""
    places = {"ssl_key_file": f"/etc/{what.name}/key.pem", "ssl_cert_file": f"/etc/{what.name}/cert.pem"}
    names = what.files(part, certificate=part == what.front)
    return {key: what.source(name) or places[key] for key, name in names.items()}


def _file_flags(what: Deployment, part: str) -> list[str]:
    """Flags of a part that name files with secrets, which systemd reads as root and hands to the part alone."""
    command = "serve" if part == "server" else part
    return [word for key in _sources(what, part) for word in (spelled(command, key), f"{_CREDENTIALS}/{key}")]


def _gateway(what: Deployment, servers: list[str]) -> str:
    addresses = [f"127.0.0.1:{what.server_port + i}" for i in range(what.replicas)]
    host = "0.0.0.0" if what.has_key else "127.0.0.1"
    words = what.gateway_command(*_file_flags(what, "gateway"), servers=addresses, host=host)
    return _unit(
        Unit={
            "Description": "llamado gateway",
            "After": " ".join(["network-online.target", *servers]),
            "Wants": "network-online.target",
            "PartOf": f"{what.name}.target",
        },
        Service=_service(what, "gateway", [what.program, *words]),
        Install={"WantedBy": f"{what.name}.target"},
    )


def _worker(what: Deployment) -> str:
    words = _instance(what.worker_command(host="127.0.0.1"), spelled("worker", "port"))
    return _unit(
        Unit={
            "Description": "llamado worker on port %i",
            "After": "network-online.target",
            "Wants": "network-online.target",
            "PartOf": f"{what.name}.target",
        },
        Service=_service(what, "worker", [what.program, *words]),
        Install={"WantedBy": f"{what.name}.target"},
    )


def _instance(words: list[str], port: str) -> list[str]:
    """The command with the instance's name as its port."""
    found = list(words)
    found[found.index(port) + 1] = "%i"
    return found


def _service(what: Deployment, part: str, command: list[str]) -> Entries:
    service: Entries = {
        "Type": "exec",
        "User": what.name,
        "Group": what.name,
        "ExecStart": _line(command),
        "Restart": "always",
        "RestartSec": "5",
        "TimeoutStopSec": str(_STOP_SECONDS),
        "LimitNOFILE": "65536",
        "StateDirectory": what.name,
        "CacheDirectory": what.name,
        "Environment": " ".join(
            [
                f"LLAMADO_CACHE=/var/cache/{what.name} HOME=/var/lib/{what.name}",
                *(f"{name}={hosts}" for name, hosts in what.allowed_hosts().items()),
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
    if what.secrets(part):
        service["EnvironmentFile"] = f"/etc/{what.name}/{part}.env"
    if sources := _sources(what, part):
        service["LoadCredential"] = [f"{key}:{path.replace('%', '%%')}" for key, path in sources.items()]
    if folders := what.written_folders(part):
        service["ReadWritePaths"] = _line(folders)
    memory = {"server": what.memory, "worker": what.worker_memory or what.memory}.get(part)
    if memory is not None:  # a gateway holds no model
        service["MemoryMax"] = memory
    if what.cpus is not None and part != "gateway":
        service["CPUQuota"] = f"{100 * what.cpus:.0f}%"
    return service


def _line(words: Iterable[str]) -> str:
    """A command as a unit has it: words with blanks in quotes."""
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
