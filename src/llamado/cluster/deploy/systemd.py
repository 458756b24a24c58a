"""Units of systemd: a server for each port, a worker for each port, and a target for all."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.cluster.deploy.deployment import Deployment, spelled

Entries = dict[str, str | list[str]]
"""Of a section; a list is several lines of one name."""

_START_SECONDS = 1800
"""A large model takes minutes to be read or sent."""
_STOP_SECONDS = 90
"""Streams that have begun may end."""


def systemd(what: Deployment) -> dict[str, str]:
    """Unit files by their names. Raises FlagError."""
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
    return files


def _server(what: Deployment, rpc: list[str], workers: list[str]) -> str:
    port = spelled("serve", "port")
    words = _instance(what.serve_command(rpc=rpc, host="127.0.0.1"), port)
    if what.key:
        words += [spelled("serve", "api_key_file"), "${CREDENTIALS_DIRECTORY}/keys"]
    if what.server_tls:
        words += _https("serve")
    wait = [what.program, "wait", "http://127.0.0.1:%i", spelled("wait", "timeout"), str(_START_SECONDS)]
    service = _service(what, [what.program, *words])
    if not what.server_tls:  # whose authority only the clients know
        service["ExecStartPost"] = _line(wait)
    service["TimeoutStartSec"] = str(_START_SECONDS + 60)
    credentials = [f"keys:/etc/{what.name}/keys"] if what.key else []
    service["LoadCredential"] = [*credentials, *(_certificate(what) if what.server_tls else [])]
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


def _https(command: str) -> list[str]:
    """Flags of a command that is reached by TLS."""
    keys = ("ssl_key_file", "ssl_cert_file")
    return [word for key in keys for word in (spelled(command, key), f"${{CREDENTIALS_DIRECTORY}}/{key}")]


def _certificate(what: Deployment) -> list[str]:
    return [f"ssl_key_file:/etc/{what.name}/key.pem", f"ssl_cert_file:/etc/{what.name}/cert.pem"]


def _gateway(what: Deployment, servers: list[str]) -> str:
    addresses = [f"127.0.0.1:{what.server_port + i}" for i in range(what.replicas)]
    more = _https("gateway") if what.tls else []
    words = what.gateway_command(*more, servers=addresses, host="0.0.0.0")
    service = _service(what, [what.program, *words])
    for limit in ("MemoryMax", "CPUQuota"):  # those are what a model takes
        service.pop(limit, None)
    if what.tls:
        service["LoadCredential"] = _certificate(what)
    return _unit(
        Unit={
            "Description": "llamado gateway",
            "After": " ".join(["network-online.target", *servers]),
            "Wants": "network-online.target",
            "PartOf": f"{what.name}.target",
        },
        Service=service,
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
        Service=_service(what, [what.program, *words]),
        Install={"WantedBy": f"{what.name}.target"},
    )


def _instance(words: list[str], port: str) -> list[str]:
    """The command with the instance's name as its port."""
    found = list(words)
    found[found.index(port) + 1] = "%i"
    return found


def _service(what: Deployment, command: list[str]) -> Entries:
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
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    }
    if what.memory is not None:
        service["MemoryMax"] = what.memory
    if what.cpus is not None:
        service["CPUQuota"] = f"{100 * what.cpus:.0f}%"
    return service


def _line(words: Iterable[str]) -> str:
    """A command as a unit has it: words with blanks in quotes."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    word = word if word == "%i" or word.endswith(":%i") else word.replace("%", "%%")
    word = word if word.startswith("${CREDENTIALS_DIRECTORY}") else word.replace("$", "$$")
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
