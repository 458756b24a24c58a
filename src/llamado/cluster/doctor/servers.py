"""Checks of HTTP servers: reachability, readiness, API keys, load, and differences between replicas."""

from __future__ import annotations

import email.utils
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from llamado.client.health import Phase, judge
from llamado.client.requests import RequestFailed, base, metrics
from llamado.cluster.doctor.logs import explain_lines
from llamado.cluster.doctor.machine import stopped_finding
from llamado.cluster.doctor.probes import (
    ConnectResult,
    is_local,
    is_loopback,
    probe_connection,
    speaks_tls,
)
from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.cluster.doctor.workers import endpoint_of
from llamado.cluster.greeting import HelloResult, probe_hello
from llamado.devices.accelerators import kind_of
from llamado.outgoing import Maybe, fit, open_client, read_json

_LATE = 2.0
"""Seconds after which /health counts as slow. Probes commonly have timeouts of 1 to 5."""
_SKEW = 60.0
_PAUSE = 0.25
_ADDRESS = re.compile(r"(?:https?://)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d+")
_HEALTH = {
    "status": "",
    "worker": Maybe(""),
    "error": Maybe({"worker": Maybe("")}),
    "degraded": [dict.fromkeys(("device", "why", "layers"), "?")],
}
_MODELS = {"data": [{"id": "", "meta": dict.fromkeys(("size", "n_params", "n_ctx"), Maybe(0))}]}
_REPLICAS = {"replicas": [{"name": "", "message": "", "state": "?", "ready": False}]}


@dataclass
class ServerExamination:
    """Findings of one server, and the build and model that it reports."""

    url: str
    findings: list[Finding] = field(default_factory=list)
    build: str = ""
    model: dict[str, Any] = field(default_factory=dict)


class _Server(NamedTuple):
    url: str
    host: str
    port: int
    tls: bool
    key: str | None
    timeout: float
    patience: float


def examine_servers(
    urls: Sequence[str], *, key: str | None = None, timeout: float = 5.0, patience: float = 10.0
) -> list[Finding]:
    """Return the findings of servers, first of each one, then differences between them.

    `timeout`: seconds per response. `patience`: seconds to watch a server that loads. Raises ServerUnavailable for an
    invalid address.
    """
    seen = [examine_server(url, key=key, timeout=timeout, patience=patience) for url in urls]
    return [one for examination in seen for one in examination.findings] + list(_compare(seen))


def examine_server(url: str, *, key: str | None, timeout: float, patience: float) -> ServerExamination:
    """Return the findings of one server."""
    parsed = httpx.URL(base(url))
    tls = parsed.scheme == "https"
    port = parsed.port or (443 if tls else 80)
    server = _Server(str(parsed).rstrip("/"), parsed.host, port, tls, key, timeout, patience)
    result = ServerExamination(server.url)
    result.findings += _examine(server, result)
    return result


def _examine(server: _Server, result: ServerExamination) -> Iterator[Finding]:
    outcome, why = probe_connection(server.host, server.port, server.timeout)
    if outcome is not ConnectResult.OPEN:
        yield _unreachable(server, outcome, why)
        return
    with open_client(base_url=server.url, timeout=server.timeout, trust_env=False) as client:
        began = time.monotonic()
        try:
            response = client.get("/health")
        except httpx.HTTPError as error:
            yield _no_answer(server, error)
            return
        duration = time.monotonic() - began
        if duration > _LATE:
            yield finding("slow-health", server.url, f"/health took {duration:.1f} s")
        unready = _unready(server, client, response)
        if unready is not None:
            yield unready
            return
        yield from _degraded(server, response)
        yield from _ready(server, client, result)


def _unreachable(server: _Server, outcome: ConnectResult, why: str) -> Finding:
    where = server.url
    facts: dict[str, Any] = {"host": server.host, "port": server.port}
    if outcome is ConnectResult.UNKNOWN:
        return finding("unknown-host", where, f"{server.host}: {why}", **facts)
    if outcome is ConnectResult.TIMEOUT:
        return finding("unreachable", where, why, **facts)
    if is_local(server.host):
        for other in ("127.0.0.1", "::1"):
            if other != server.host and probe_connection(other, server.port, server.timeout)[0] is ConnectResult.OPEN:
                shown = f"[{other}]" if ":" in other else other
                url = f"{'https' if server.tls else 'http'}://{shown}:{server.port}"
                text = f"connection refused on {server.host}, port {server.port}, but {other} accepts connections"
                return finding("bind-address", where, text, listen=server.host, port=server.port, url=url)
    return finding("refused", where, f"no program listens on {server.host}, port {server.port}", **facts)


def _no_answer(server: _Server, error: httpx.HTTPError) -> Finding:
    where = server.url
    facts: dict[str, Any] = {"host": server.host, "port": server.port}
    text = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        if (found := stopped_finding(server.host, server.port, where)) is not None:
            return found
        return finding("silent", where, f"no response to /health within {server.timeout:g} s", **facts)
    if server.tls:
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return finding("certificate", where, text, **facts)
        return finding("no-tls", where, f"no TLS handshake: {text}", **facts)
    if speaks_tls(server.host, server.port, server.timeout):
        return finding("wants-tls", where, "no response to plain HTTP; a TLS handshake succeeds", **facts)
    if probe_hello(server.host, server.port, server.timeout).result is HelloResult.GREETED:
        return finding("worker-address", where, "it responds to RPC HELLO, but not to HTTP", **facts)
    return finding("not-a-server", where, f"it does not speak HTTP: {text}", **facts)


def _unready(server: _Server, client: httpx.Client, response: httpx.Response) -> Finding | None:
    """Return the finding of a server that is not ready, None if it is ready.

    A server that loads is watched until its progress changes or `patience` ends.
    """
    first: tuple[str, float | None] | None = None
    began = time.monotonic()
    while True:
        state = judge(response.status_code, response.headers, response.content)
        if state.phase is Phase.READY:
            return None
        if state.phase is not Phase.LOADING:
            return _unhealthy(server, response, state.message)
        now = (state.message, state.progress)
        first = first or now
        waited = time.monotonic() - began
        percent = "" if state.progress is None else f", {100 * state.progress:.0f}%"
        if now != first:
            return finding("loading", server.url, f"{state.message}{percent}", url=server.url)
        if waited >= server.patience:
            if state.progress is None:
                found = f"{state.message} for at least {waited:.0f} s; it reports no progress"
                return finding("loading", server.url, found, url=server.url)
            found = f"{state.message}{percent}: no progress for {waited:.0f} s"
            return finding("stuck-loading", server.url, found, host=server.host)
        time.sleep(min(_PAUSE, server.patience))
        try:
            response = client.get("/health")
        except httpx.HTTPError as error:
            found = f"it was loading, then stopped responding ({error or type(error).__name__})"
            return _stopped_answering(server, found)


def _stopped_answering(server: _Server, found: str) -> Finding:
    """Return the finding of a server that stopped responding during the examination."""
    if probe_connection(server.host, server.port, server.timeout)[0] is not ConnectResult.OPEN:
        return finding("ended", server.url, found)
    return stopped_finding(server.host, server.port, server.url) or finding(
        "silent", server.url, found, host=server.host, port=server.port
    )


def _worker_lost(server: _Server, symptom: str, worker: str, found: str) -> Finding:
    """Return the finding of a lost worker that a server reports as `RPC0[host:port]`, or of a lost card of its machine
    (`CUDA0`).
    """
    endpoint = endpoint_of(worker)
    if kind_of(worker) is not None:
        return finding("card-lost", server.url, found)
    if endpoint is None:
        return finding(symptom, server.url, found)
    # A loopback address is relative to the server's machine.
    here = is_local(server.host) if is_loopback(endpoint.host) else True
    held = stopped_finding(endpoint.host, endpoint.port, worker) if here else None
    host = server.host if is_loopback(endpoint.host) else endpoint.host
    return held or finding(symptom, server.url, found, host=host, port=endpoint.port)


def _unhealthy(server: _Server, response: httpx.Response, message: str) -> Finding:
    where = server.url
    body = _read(response, _HEALTH)
    error, worker = body["error"], body["worker"]
    status = response.status_code
    if body["status"] == "no slot available":
        return finding("no-slots", where, "all slots are busy")
    if status == 401:
        return finding("wrong-key", where, "/health requires a key, so a proxy is in front of the server", url=where)
    if error is not None and status == 503:
        lost = worker if error["worker"] is None else error["worker"]
        if lost is not None:
            return _worker_lost(server, "worker-lost", lost, message)
        if "is shutting down" in message:
            return finding("ended", where, message)
        if replicas := _named_replicas(response):
            return _replicas_missing(where, replicas)
        reason = message.removeprefix("Failed to load model: ")
        if reason == message:
            return finding("unready", where, message)
        explained = explain_lines([reason], where)
        if explained and explained[0].symptom != "failed-to-load":
            return finding("failed-to-load", where, message, cause=explained[0].cause, remedy=explained[0].command)
        return finding("failed-to-load", where, message)
    if status == 400 and not server.tls and speaks_tls(server.host, server.port, server.timeout):
        facts: dict[str, Any] = {"host": server.host, "port": server.port}
        return finding("wants-tls", where, "400 for plain HTTP; a TLS handshake succeeds", **facts)
    if status in (502, 503, 504):
        return finding("proxy-error", where, f"/health returns {status} without a reason")
    return finding("not-a-server", where, message, port=server.port)


def _degraded(server: _Server, response: httpx.Response) -> Iterator[Finding]:
    for away in _read(response, _HEALTH)["degraded"]:
        worker = away["device"]
        text = f"{worker} is lost ({away['why']}); other devices have taken {away['layers']}"
        yield _worker_lost(server, "degraded", worker, text)
    date = response.headers.get("date")
    if date is not None:
        try:
            skew = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
        except (ValueError, OverflowError):
            return
        if abs(skew) > _SKEW:
            yield finding("clock", server.url, f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}")


def _ready(server: _Server, client: httpx.Client, result: ServerExamination) -> Iterator[Finding]:
    """Yield the findings of a server that is ready."""
    props = _get(client, "/props", None)
    if props is None:
        yield _stopped_answering(server, f"no response to /props within {server.timeout:g} s after one to /health")
        return
    requires_key = props.status_code == 401
    if requires_key:
        if server.key is not None:
            props = _get(client, "/props", server.key) or props
        if props.status_code == 401:
            given = "this one is wrong" if server.key is not None else "none was given"
            yield finding("wrong-key", server.url, f"it requires a key; {given}", url=server.url)
            return
    elif props.status_code == 200 and not is_loopback(server.host):
        yield finding("no-key", server.url, f"/props on {server.host} responds without a key")
    key = server.key if requires_key else None
    yield from _replicas(server, client, key)
    result.build = _read(props, {"build_info": ""})["build_info"]
    data = _read(_get(client, "/v1/models", key), _MODELS)["data"]
    if len(data) == 1:
        result.model = {"id": data[0]["id"], **data[0]["meta"]}
    yield from _busy(server, client, key)


def _replicas(server: _Server, client: httpx.Client, key: str | None) -> Iterator[Finding]:
    """Yield a finding if replicas of a gateway are not ready."""
    response = _get(client, "/gateway/status", key)
    if response is None or response.status_code != 200:
        return
    listed = _read(response, _REPLICAS)["replicas"]
    away = {
        one["name"]: one["message"] or one["state"] for one in listed if not one["ready"] and one["state"] != "draining"
    }
    if away:
        yield _replicas_missing(server.url, away)


def _named_replicas(response: httpx.Response) -> dict[str, str]:
    """Return the states of a gateway's replicas by name, from the error of its /health."""
    try:
        replicas = read_json(response)["error"]["replicas"]
    except (ValueError, LookupError, TypeError):
        return {}
    return fit(replicas, dict.fromkeys(replicas, "?")) if isinstance(replicas, dict) else {}


def _replicas_missing(where: str, away: Mapping[str, str]) -> Finding:
    """Return the finding of a gateway's replicas that are not ready, by name."""
    text = "; ".join(f"replica {name}: {state}" for name, state in away.items())
    # Replicas without a configured name are named by their address.
    urls = [f"http://{name}" if "://" not in name else name for name in away if _ADDRESS.fullmatch(name)]
    return finding("replica-missing", where, text, url=" ".join(urls))


def _busy(server: _Server, client: httpx.Client, key: str | None) -> Iterator[Finding]:
    """Yield a finding if requests wait for a slot in two samples. Busy slots alone are normal."""
    for pause in (0.0, _PAUSE):
        time.sleep(pause)
        scraped = _get(client, "/metrics", key)
        if scraped is None or scraped.status_code != 200:
            return
        try:
            found = metrics(scraped.text)
        except RequestFailed:
            return
        waiting = sum(value for name, value in found.items() if name.startswith("llamacpp:requests_deferred"))
        if not 0 < waiting < math.inf:
            return
    response = _get(client, "/slots", key)
    answered = response is not None and response.status_code == 200
    n = len(_read(response, [{}])) if answered else 0
    text = f"all {n} slots are busy" if n else "all slots are busy"
    yield finding("no-slots", server.url, f"{text}, {waiting:.0f} requests wait", more=2 * n or "")


def _compare(seen: Sequence[ServerExamination]) -> Iterator[Finding]:
    """Yield findings for differences between servers that should be equal."""
    builds = {one.url: one.build for one in seen if one.build}
    where = ", ".join(one.url for one in seen)
    if len(set(builds.values())) > 1:
        yield finding("builds-differ", where, "; ".join(f"{url}: {build}" for url, build in builds.items()))
    keys = ("id", "size", "n_params", "n_ctx")
    models = {one.url: tuple(one.model.get(key) for key in keys) for one in seen if one.model}
    if len(set(models.values())) > 1:
        shown = (", ".join(f"{k} {v}" for k, v in zip(keys, values, strict=True)) for values in models.values())
        text = "; ".join(f"{url}: {line}" for url, line in zip(models, shown, strict=True))
        yield finding("models-differ", where, text)


def _get(client: httpx.Client, path: str, key: str | None) -> httpx.Response | None:
    try:
        return client.get(path, headers={"Authorization": f"Bearer {key}"} if key else {})
    except httpx.HTTPError:
        return None


def _read(response: httpx.Response | None, form: Any) -> Any:
    """Return the JSON of a response in the form of an example (`fit`); the example's defaults if it is not JSON."""
    try:
        value = None if response is None else read_json(response)
    except ValueError:
        value = None
    return fit(value, form)
