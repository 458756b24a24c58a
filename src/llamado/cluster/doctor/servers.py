"""HTTP servers: whether one answers, whether it is ready, and who may use it."""

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
from llamado.cluster.doctor.machine import stopped
from llamado.cluster.doctor.probes import How, Reached, hello, is_here, is_loopback, reach, speaks_tls
from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.cluster.doctor.workers import endpoint_of
from llamado.outgoing import Maybe, fit, open_client, read_json

_LATE = 2.0
"""Seconds of /health that are too many: probes commonly allow 1 to 5."""
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
    """What was found of one server. `build` and `model`: what it says of itself."""

    url: str
    findings: list[Finding] = field(default_factory=list)
    build: str = ""
    model: dict[str, Any] = field(default_factory=dict)


class _Asked(NamedTuple):
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
    """All that ails the servers, each by itself and then side by side.

    `timeout`: seconds one answer may take, `patience`: for how long a server that loads is watched. Raises
    ServerUnavailable for an address that is none.
    """
    seen = [examine_server(url, key=key, timeout=timeout, patience=patience) for url in urls]
    return [one for examination in seen for one in examination.findings] + list(_compare(seen))


def examine_server(url: str, *, key: str | None, timeout: float, patience: float) -> ServerExamination:
    """All that ails one server."""
    parsed = httpx.URL(base(url))
    tls = parsed.scheme == "https"
    port = parsed.port or (443 if tls else 80)
    server = _Asked(str(parsed).rstrip("/"), parsed.host, port, tls, key, timeout, patience)
    result = ServerExamination(server.url)
    result.findings += _examine(server, result)
    return result


def _examine(server: _Asked, result: ServerExamination) -> Iterator[Finding]:
    outcome, why = reach(server.host, server.port, server.timeout)
    if outcome is not Reached.OPEN:
        yield _unreached(server, outcome, why)
        return
    with open_client(base_url=server.url, timeout=server.timeout, trust_env=False) as client:
        began = time.monotonic()
        try:
            response = client.get("/health")
        except httpx.HTTPError as error:
            yield _no_answer(server, error)
            return
        took = time.monotonic() - began
        if took > _LATE:
            yield finding("slow-health", server.url, f"/health took {took:.1f} s")
        unready = _unready(server, client, response)
        if unready is not None:
            yield unready
            return
        yield from _degraded(server, response)
        yield from _ready(server, client, result)


def _unreached(server: _Asked, outcome: Reached, why: str) -> Finding:
    where = server.url
    facts: dict[str, Any] = {"host": server.host, "port": server.port}
    if outcome is Reached.UNKNOWN:
        return finding("unknown-host", where, f"{server.host}: {why}", **facts)
    if outcome is Reached.TIMEOUT:
        return finding("unreachable", where, why, **facts)
    if is_here(server.host):
        for other in ("127.0.0.1", "::1"):
            if other != server.host and reach(other, server.port, server.timeout)[0] is Reached.OPEN:
                shown = f"[{other}]" if ":" in other else other
                url = f"{'https' if server.tls else 'http'}://{shown}:{server.port}"
                text = f"nobody listens on {server.host}, port {server.port}, but {other} answers"
                return finding("bind-address", where, text, listen=server.host, port=server.port, url=url)
    return finding("refused", where, f"nobody listens on {server.host}, port {server.port}", **facts)


def _no_answer(server: _Asked, error: httpx.HTTPError) -> Finding:
    where = server.url
    facts: dict[str, Any] = {"host": server.host, "port": server.port}
    said = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        if (found := stopped(server.host, server.port, where)) is not None:
            return found
        return finding("silent", where, f"no answer to /health within {server.timeout:g} s", **facts)
    if server.tls:
        if "CERTIFICATE_VERIFY_FAILED" in said:
            return finding("certificate", where, said, **facts)
        return finding("no-tls", where, f"no TLS handshake: {said}", **facts)
    if speaks_tls(server.host, server.port, server.timeout):
        return finding("wants-tls", where, "plain HTTP is not answered, a TLS handshake is", **facts)
    if hello(server.host, server.port, server.timeout).how is How.GREETED:
        return finding("worker-address", where, "it greets as an RPC worker, and speaks no HTTP", **facts)
    return finding("not-a-server", where, f"it does not speak HTTP: {said}", **facts)


def _unready(server: _Asked, client: httpx.Client, response: httpx.Response) -> Finding | None:
    """Why a server does not answer requests, None where it does. One that loads is watched for a while."""
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
            stands = f"{state.message}{percent}: no progress for {waited:.0f} s"
            if state.progress is None:
                return finding("loading", server.url, f"{state.message}, for {waited:.0f} s at least; it does not say "
                               "how far it is", url=server.url)  # fmt: skip
            return finding("stuck-loading", server.url, stands, host=server.host)
        time.sleep(min(_PAUSE, server.patience))
        try:
            response = client.get("/health")
        except httpx.HTTPError as error:
            return _gone(server, f"it was loading, and then did not answer any more ({error or type(error).__name__})")


def _gone(server: _Asked, found: str) -> Finding:
    """Return what became of a server that answered a moment ago."""
    if reach(server.host, server.port, server.timeout)[0] is not Reached.OPEN:
        return finding("ended", server.url, found)
    return stopped(server.host, server.port, server.url) or finding(
        "silent", server.url, found, host=server.host, port=server.port
    )


def _worker_lost(server: _Asked, symptom: str, worker: str, found: str) -> Finding:
    """Return the finding of a worker that a server names, `RPC0[host:port]`."""
    endpoint = endpoint_of(worker)
    if endpoint is None:
        return finding(symptom, server.url, found)
    # A loopback address is one of the server's machine.
    here = is_here(server.host) if is_loopback(endpoint.host) else True
    held = stopped(endpoint.host, endpoint.port, worker) if here else None
    host = server.host if is_loopback(endpoint.host) else endpoint.host
    return held or finding(symptom, server.url, found, host=host, port=endpoint.port)


def _unhealthy(server: _Asked, response: httpx.Response, message: str) -> Finding:
    where = server.url
    said = _read(response, _HEALTH)
    error, worker = said["error"], said["worker"]
    status = response.status_code
    if said["status"] == "no slot available":
        return finding("no-slots", where, "all slots are at work")
    if status == 401:
        return finding("wrong-key", where, "/health itself asks for a key: a proxy before the server", url=where)
    if error is not None and status == 503:
        lost = worker if error["worker"] is None else error["worker"]
        if lost is not None:
            return _worker_lost(server, "worker-lost", lost, message)
        if message.endswith("is shutting down"):
            return finding("ended", where, message)
        if replicas := _named_replicas(response):
            return _missing(where, replicas)
        reason = message.removeprefix("Failed to load model: ")
        if reason == message:
            return finding("unready", where, message)
        explained = explain_lines([reason], where)
        if explained and explained[0].symptom != "failed-to-load":
            return finding("failed-to-load", where, message, cause=explained[0].cause, remedy=explained[0].command)
        return finding("failed-to-load", where, message)
    if status == 400 and not server.tls and speaks_tls(server.host, server.port, server.timeout):
        facts: dict[str, Any] = {"host": server.host, "port": server.port}
        return finding("wants-tls", where, "plain HTTP is answered by 400, a TLS handshake comes about", **facts)
    if status in (502, 503, 504):
        return finding("proxy-error", where, f"/health answers {status} without a reason")
    return finding("not-a-server", where, message, port=server.port)


def _degraded(server: _Asked, response: httpx.Response) -> Iterator[Finding]:
    for away in _read(response, _HEALTH)["degraded"]:
        worker = away["device"]
        text = f"{worker} is away ({away['why']}); others have what it held: {away['layers']}"
        yield _worker_lost(server, "degraded", worker, text)
    date = response.headers.get("date")
    if date is not None:
        try:
            skew = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
        except (ValueError, OverflowError):
            return
        if abs(skew) > _SKEW:
            yield finding("clock", server.url, f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}")


def _ready(server: _Asked, client: httpx.Client, result: ServerExamination) -> Iterator[Finding]:
    """What ails a server that is ready."""
    props = _get(client, "/props", None)
    if props is None:
        yield _gone(server, f"/health was answered, /props was not within {server.timeout:g} s")
        return
    asks = props.status_code == 401
    if asks:
        if server.key is not None:
            props = _get(client, "/props", server.key) or props
        if props.status_code == 401:
            given = "this key is refused" if server.key is not None else "no key was given"
            yield finding("wrong-key", server.url, f"it asks for a key, {given}", url=server.url)
            return
    elif props.status_code == 200 and not is_loopback(server.host):
        yield finding("no-key", server.url, f"/props answers on {server.host} without a key")
    key = server.key if asks else None
    yield from _replicas(server, client, key)
    result.build = _read(props, {"build_info": ""})["build_info"]
    data = _read(_get(client, "/v1/models", key), _MODELS)["data"]
    if len(data) == 1:
        result.model = {"id": data[0]["id"], **data[0]["meta"]}
    yield from _busy(server, client, key)


def _replicas(server: _Asked, client: httpx.Client, key: str | None) -> Iterator[Finding]:
    """Yield a finding if replicas of a gateway are not ready."""
    response = _get(client, "/gateway/status", key)
    if response is None or response.status_code != 200:
        return
    listed = _read(response, _REPLICAS)["replicas"]
    away = {
        one["name"]: one["message"] or one["state"] for one in listed if not one["ready"] and one["state"] != "draining"
    }
    if away:
        yield _missing(server.url, away)


def _named_replicas(response: httpx.Response) -> dict[str, str]:
    """Return the states of a gateway's replicas by name, from the error of its /health."""
    try:
        replicas = read_json(response)["error"]["replicas"]
    except (ValueError, LookupError, TypeError):
        return {}
    return fit(replicas, dict.fromkeys(replicas, "?")) if isinstance(replicas, dict) else {}


def _missing(where: str, away: Mapping[str, str]) -> Finding:
    """Return the finding of a gateway's replicas that are not ready, by name."""
    text = "; ".join(f"replica {name}: {state}" for name, state in away.items())
    # A replica without a name of its own is called by its address.
    urls = [f"http://{name}" if "://" not in name else name for name in away if _ADDRESS.fullmatch(name)]
    return finding("replica-missing", where, text, url=" ".join(urls))


def _busy(server: _Asked, client: httpx.Client, key: str | None) -> Iterator[Finding]:
    """Yield a finding if requests wait for a slot. Slots at work alone are no fault, and a moment's queue is none."""
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
    text = f"all {n} slots are at work" if n else "all slots are at work"
    yield finding("no-slots", server.url, f"{text}, {waiting:.0f} requests wait", more=2 * n or "")


def _compare(seen: Sequence[ServerExamination]) -> Iterator[Finding]:
    """What differs among servers that should be equal."""
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
    """Return the JSON of a response in the form of an example (`fit`); the example's defaults if it is no JSON."""
    try:
        value = None if response is None else read_json(response)
    except ValueError:
        value = None
    return fit(value, form)
