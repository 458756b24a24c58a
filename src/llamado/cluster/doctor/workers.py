"""Workers: whether each answers, in which version and with or without TLS, and how the way to it and it compare."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from llamado.cluster.doctor.machine import stopped
from llamado.cluster.doctor.probes import How, Reached, hello, reach, speaks_tls
from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.devices.device import Device
from llamado.devices.registry import DeviceOptions, Unreachable, backend
from llamado.devices.split.measure import measure_all
from llamado.devices.split.placement import DeviceFigures, SplitOptions
from llamado.errors import LlamadoError
from llamado.rpc.endpoint import Endpoint, client_tls
from llamado.rpc.wire import LATEST, SPOKEN, spoken

_LEAST_MEMORY = 64 << 20
_TIMES = 4.0
"""So many times worse than the others' median is slow."""
_ROUND_TRIP, _FAR = 2e-3, 50e-3
"""Seconds of a round trip that are never slow, and those that always are."""
_BANDWIDTH, _NARROW = 100e6, 10e6
"""Bytes a second that are never slow, and those that always are (a line of 100 Mbit/s)."""


def examine_workers(split: SplitOptions, *, timeout: float = 5.0, measure: bool = True) -> list[Finding]:
    """All that ails the workers, each by itself and then against the others.

    `measure`: whether the ways to them and their speeds are measured, which takes a few seconds. Raises EndpointError.
    """
    endpoints = [Endpoint.parse(text) for text in split.rpc]
    with ThreadPoolExecutor(max(1, len(endpoints)), "llamado-doctor") as pool:
        looked = list(pool.map(lambda endpoint: _look(endpoint, split, timeout), endpoints))
    findings = [one for one in looked if one is not None]
    findings += _same(endpoints)
    sound = [endpoint for endpoint, one in zip(endpoints, looked, strict=True) if one is None]
    options = DeviceOptions(ca=split.ca, cert=split.cert, key=split.key)
    devices: list[Device] = []
    try:
        if sound:
            connected = backend("rpc", [str(endpoint) for endpoint in sound], options).connect(timeout)
            for endpoint, place in zip(sound, connected, strict=True):
                if isinstance(place, Unreachable):
                    held = stopped(endpoint.host, endpoint.port, str(endpoint))
                    findings.append(held or finding("worker-silent", str(endpoint), place.why, port=endpoint.port))
                else:
                    devices += place
        findings += _memory(devices)
        if measure and devices:
            figures = measure_all(devices)
            findings += compare(figures, split.rpc)
    except LlamadoError as error:
        findings.append(finding("worker-lost", ", ".join(split.rpc), f"while it was measured: {error}"))
    finally:
        for device in devices:
            device.close()
    return findings


def _look(endpoint: Endpoint, split: SplitOptions, timeout: float) -> Finding | None:
    """What is wrong with one worker, None for one that greets."""
    where = str(endpoint)
    facts: dict[str, Any] = {"host": endpoint.host, "port": endpoint.port}
    outcome, why = reach(endpoint.host, endpoint.port, timeout)
    symptom = {Reached.UNKNOWN: "unknown-host", Reached.TIMEOUT: "unreachable", Reached.REFUSED: "worker-refused"}
    if outcome is not Reached.OPEN:
        return finding(symptom[outcome], where, why, **facts)
    tls = (lambda: client_tls(split.ca, split.cert, split.key)) if endpoint.tls else None
    greeting = hello(endpoint.host, endpoint.port, timeout, tls)
    if greeting.how is How.GREETED:
        return _version(where, greeting.version or LATEST.version)
    if greeting.how is How.SILENT:
        held = stopped(endpoint.host, endpoint.port, where)
        return held or finding("worker-silent", where, f"no greeting within {timeout:g} s", **facts)
    if greeting.how is How.CERTIFICATE:
        return finding("worker-certificate", where, greeting.detail, **facts)
    if greeting.how is How.HTTP:
        return finding("not-a-worker", where, "it speaks HTTP: the address of a server, not of a worker", **facts)
    if endpoint.tls:
        plain = hello(endpoint.host, endpoint.port, timeout)
        if plain.how is How.GREETED:
            return finding("worker-no-tls", where, "it greets without TLS alone", **facts)
        if speaks_tls(endpoint.host, endpoint.port, timeout):
            text = f"the handshake is refused: {greeting.detail or 'the connection is closed'}"
            return finding("worker-certificate", where, text, **facts)
    elif greeting.how is How.TLS or speaks_tls(endpoint.host, endpoint.port, timeout):
        return finding("worker-wants-tls", where, "it closes plain connections, and answers a TLS handshake", **facts)
    text = greeting.detail or "it ends the connection instead of greeting"
    return finding("not-a-worker", where, text, **facts)


def _version(where: str, theirs: tuple[int, int, int]) -> Finding | None:
    if spoken(theirs) is not None:
        return None
    their = ".".join(map(str, theirs))
    return finding("worker-version", where, f"the worker speaks RPC {their}, this program {SPOKEN}")


def _same(endpoints: Sequence[Endpoint]) -> Iterator[Finding]:
    """Endpoints whose addresses are one."""
    names: dict[tuple[str, int], list[Endpoint]] = {}
    for endpoint in endpoints:
        with suppress(OSError):
            found = socket.getaddrinfo(endpoint.host, endpoint.port, socket.AF_INET, socket.SOCK_STREAM)
            names.setdefault((str(found[0][4][0]), endpoint.port), []).append(endpoint)
    for (address, port), alike in names.items():
        if len(alike) > 1:
            kept = [str(one) for one in endpoints if one not in alike[1:]]
            text = f"{' and '.join(map(str, alike))} are both {address}:{port}"
            yield finding("same-worker", ", ".join(map(str, alike)), text, all=",".join(kept))


def _memory(devices: Sequence[Device]) -> Iterator[Finding]:
    for device in devices:
        free, total = device.memory()
        if total and free < _LEAST_MEMORY:
            text = f"{free / 1e6:.0f} MB are free of {total / 1e6:.0f}"
            yield finding("worker-without-memory", device.name, text)


def compare(figures: Sequence[DeviceFigures], rpc: Sequence[str] = ()) -> list[Finding]:
    """Which links and which nodes are slow, against the median of the others, and by themselves."""
    return [*_links(figures, ",".join(rpc)), *_nodes(figures, ",".join(rpc))]


def _links(figures: Sequence[DeviceFigures], all_: str) -> Iterator[Finding]:
    far = [one for one in figures if not one.local]
    for one in far:
        others = [other for other in far if other is not one]
        trips = [other.round_trip for other in others]
        usual = statistics.median(trips) if trips else None
        said = []
        if one.round_trip > _FAR or (usual is not None and one.round_trip > max(_ROUND_TRIP, _TIMES * usual)):
            said.append(f"a round trip of {1e3 * one.round_trip:.1f} ms" + (
                "" if usual is None else f" (the others {1e3 * usual:.1f} ms)"))  # fmt: skip
        rates = [other.bandwidth for other in others if other.bandwidth]
        rate = statistics.median(rates) if rates else None
        if one.bandwidth and (
            one.bandwidth < _NARROW or (rate is not None and one.bandwidth < min(_BANDWIDTH, rate / _TIMES))
        ):
            said.append(f"{one.bandwidth / 1e6:.1f} MB/s" + ("" if rate is None else f" (the others {rate / 1e6:.0f})"))
        if said:
            yield finding("slow-link", one.name, "; ".join(said), all=all_, host=_host(one.name))


def _nodes(figures: Sequence[DeviceFigures], all_: str) -> Iterator[Finding]:
    for one in figures:
        rates = [other.decode for other in figures if other is not one and other.decode]
        if not rates or not one.decode:
            continue
        usual = statistics.median(rates)
        if one.decode < usual / _TIMES:
            text = f"it reads weights at {one.decode / 1e9:.1f} GB/s, the others at {usual / 1e9:.1f}"
            yield finding("slow-node", one.name, text, all=all_, host=_host(one.name))


def endpoint_of(name: str) -> Endpoint | None:
    """Return the endpoint in a device's name, `RPC0[host:port]`; None if there is none."""
    with suppress(LlamadoError):
        return Endpoint.parse(name.partition("[")[2].rpartition("]")[0])
    return None


def _host(name: str) -> str | None:
    endpoint = endpoint_of(name)
    return None if endpoint is None else endpoint.host
