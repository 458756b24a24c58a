"""Addresses, access rules and logs of servers and gateways, from flags."""

from __future__ import annotations

import ipaddress
import re

from llamado.commands.options import read_file
from llamado.commands.split_options import listed
from llamado.flags import FlagError, ParsedFlags
from llamado.http.access import AccessRules
from llamado.http.monitoring import logs


def hosts_of(flags: ParsedFlags) -> tuple[str, ...]:
    """Return the addresses to listen on, and check the flags of TLS. Raises FlagError."""
    if bool(flags.ssl_key_file) != bool(flags.ssl_cert_file):
        raise FlagError("--ssl-key-file and --ssl-cert-file: give both or none")
    hosts = tuple(host.strip() for host in flags.host.split(",") if host.strip())
    if not hosts:
        raise FlagError("--host: expected an address, got an empty string")
    return hosts


def access_rules(flags: ParsedFlags) -> AccessRules:
    """Return the access rules: API keys, CORS and host names. Raises FlagError."""
    return AccessRules(
        api_keys=_keys(flags),
        cors_origins="*" if flags.cors and "cors_origins" not in flags.given else flags.cors_origins,
        cors_methods=flags.cors_methods,
        cors_headers=flags.cors_headers,
        cors_credentials=flags.cors_credentials,
        allowed_hosts=tuple(_allowed_hosts(flags)),
    )


_HOST_RULE = re.compile(r"\*|\.?[^\s:/*@?#\[\]]+")


def _allowed_hosts(flags: ParsedFlags) -> list[str]:
    """Return host names for requests without a key: those of `--allowed-hosts`, and names in `--host`."""
    found = listed(flags.allowed_hosts or [])
    for rule in found:
        if not _HOST_RULE.fullmatch(rule):
            raise FlagError(f"--allowed-hosts: expected host names without scheme or port, got {rule!r}")
    return [*found, *(host for host in hosts_of(flags) if _is_name(host))]


def _is_name(host: str) -> bool:
    """Return True if `host` is a host name, not an address or a Unix socket."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost" and not host.endswith(".sock")
    return False


def _keys(flags: ParsedFlags) -> tuple[bytes, ...]:
    keys = [key.strip() for given in flags.api_key or [] for key in given.split(",")]
    if flags.api_key_file:
        lines = read_file("--api-key-file", flags.api_key_file).splitlines()
        keys += [line.strip() for line in lines if not line.startswith("#")]
    found = tuple(key.encode() for key in keys if key)
    if not found and (flags.api_key or flags.api_key_file):
        # With an empty list the server would accept all requests.
        raise FlagError("--api-key: no key given; omit the flag for a server without keys")
    return found


_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = ("engine", "engine_version", "model_id")


def metrics_labels(text: str | None) -> tuple[tuple[str, str], ...] | None:
    """Return names and values of `--metrics-labels`, or None without the flag. Raises FlagError."""
    if text is None or text == "off":
        return None
    labels: dict[str, str] = {}
    for item in listed([] if text == "on" else [text]):
        name, equals, value = item.partition("=")
        if not equals or not _LABEL.fullmatch(name) or name.startswith("__") or name in (*_OWN_LABELS, "le"):
            raise FlagError(f"--metrics-labels: expected NAME=VALUE, comma-separated, got {item!r}")
        labels[name] = value
    return tuple(labels.items())


def configure_logs(flags: ParsedFlags) -> None:
    """Set up the log. Raises LogFileError."""
    logs.configure(
        verbosity=9 if flags.verbose else flags.log_verbosity,
        file=flags.log_file,
        as_json=flags.log_jsonl or flags.log_format == "json",
        prefix=flags.log_prefix,
        timestamps=flags.log_timestamps,
        disabled=flags.log_disable,
        colors=flags.log_colors,
    )
