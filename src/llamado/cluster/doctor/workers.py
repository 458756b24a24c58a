"""Checks of workers: reachability, RPC version, TLS, memory, and slow links or machines compared with the others."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from llamado.cluster.doctor.machine import stopped_finding
from llamado.cluster.doctor.probes import ConnectResult, probe_connection, speaks_tls
from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.cluster.greeting import HelloResult, probe_hello
from llamado.devices.device import Device
from llamado.devices.registry import DeviceOptions, Unreachable, backend
from llamado.devices.split.measure import measure_all
from llamado.devices.split.placement import DeviceFigures, SplitOptions
from llamado.errors import LlamadoError
from llamado.rpc.endpoint import Endpoint, client_tls
from llamado.rpc.wire import LATEST, SUPPORTED_VERSIONS, negotiate

_LEAST_MEMORY = 64 << 20
_TIMES = 4.0
"""A value this many times worse than the median of the others counts as slow."""
_ROUND_TRIP, _FAR = 2e-3, 50e-3
"""Round trips in seconds: up to the first never slow, above the second always slow."""
_BANDWIDTH, _NARROW = 100e6, 10e6
"""Bytes per second: from the first up never slow, below the second always slow (a line of 100 Mbit/s)."""


def examine_workers(split: SplitOptions, *, timeout: float = 5.0, measure: bool = True) -> list[Finding]:
    """Return the findings of workers, first of each one, then in comparison.

    `measure`: measure links and speeds, which takes a few seconds. Raises EndpointError.
    """
    endpoints = [Endpoint.parse(text) for text in split.rpc]
    with ThreadPoolExecutor(max(1, len(endpoints)), "llamado-doctor") as pool:
        results = list(pool.map(lambda endpoint: _check_worker(endpoint, split, timeout), endpoints))
    findings = [one for one in results if one is not None]
    findings += _duplicates(endpoints)
    sound = [endpoint for endpoint, one in zip(endpoints, results, strict=True) if one is None]
    options = DeviceOptions(ca=split.ca, cert=split.cert, key=split.key)
    devices: list[Device] = []
    try:
        if sound:
            connected = backend("rpc", [str(endpoint) for endpoint in sound], options).connect(timeout)
            for endpoint, place in zip(sound, connected, strict=True):
                if isinstance(place, Unreachable):
                    held = stopped_finding(endpoint.host, endpoint.port, str(endpoint))
                    findings.append(held or finding("worker-silent", str(endpoint), place.why, port=endpoint.port))
                else:
                    devices += place
        findings += _memory(devices)
        if measure and devices:
            figures = measure_all(devices)
            findings += compare(figures, split.rpc)
    except LlamadoError as error:
        findings.append(finding("worker-lost", ", ".join(split.rpc), f"during measurement: {error}"))
    finally:
        for device in devices:
            device.close()
    return findings


def _check_worker(endpoint: Endpoint, split: SplitOptions, timeout: float) -> Finding | None:
    """Return the finding of one worker, None if it greets."""
    where = str(endpoint)
    facts: dict[str, Any] = {"host": endpoint.host, "port": endpoint.port}
    outcome, why = probe_connection(endpoint.host, endpoint.port, timeout)
    symptom = {
        ConnectResult.UNKNOWN: "unknown-host",
        ConnectResult.TIMEOUT: "unreachable",
        ConnectResult.REFUSED: "worker-refused",
    }
    if outcome is not ConnectResult.OPEN:
        return finding(symptom[outcome], where, why, **facts)
    tls = (lambda: client_tls(split.ca, split.cert, split.key)) if endpoint.tls else None
    greeting = probe_hello(endpoint.host, endpoint.port, timeout, tls)
    if greeting.result is HelloResult.GREETED:
        return _version(where, greeting.version or LATEST.version)
    if greeting.result in (HelloResult.UNREACHED, HelloResult.SILENT):
        held = stopped_finding(endpoint.host, endpoint.port, where)
        return held or finding("worker-silent", where, f"no greeting within {timeout:g} s", **facts)
    if greeting.result is HelloResult.CERTIFICATE:
        return finding("worker-certificate", where, greeting.detail, **facts)
    if greeting.result is HelloResult.HTTP:
        return finding("not-a-worker", where, "it speaks HTTP, so it is a server, not a worker", **facts)
    if endpoint.tls:
        plain = probe_hello(endpoint.host, endpoint.port, timeout)
        if plain.result is HelloResult.GREETED:
            return finding("worker-no-tls", where, "it responds to HELLO only without TLS", **facts)
        if speaks_tls(endpoint.host, endpoint.port, timeout):
            text = f"TLS handshake refused: {greeting.detail or 'connection closed'}"
            return finding("worker-certificate", where, text, **facts)
    elif greeting.result is HelloResult.TLS or speaks_tls(endpoint.host, endpoint.port, timeout):
        return finding("worker-wants-tls", where, "it closes plain connections; a TLS handshake succeeds", **facts)
    text = greeting.detail or "it closes the connection instead of greeting"
    return finding("not-a-worker", where, text, **facts)


def _version(where: str, theirs: tuple[int, int, int]) -> Finding | None:
    if negotiate(theirs) is not None:
        return None
    their = ".".join(map(str, theirs))
    return finding("worker-version", where, f"the worker speaks RPC {their}, this program {SUPPORTED_VERSIONS}")


def _duplicates(endpoints: Sequence[Endpoint]) -> Iterator[Finding]:
    """Yield a finding for endpoints with the same address and port."""
    names: dict[tuple[str, int], list[Endpoint]] = {}
    for endpoint in endpoints:
        with suppress(OSError):
            found = socket.getaddrinfo(endpoint.host, endpoint.port, socket.AF_INET, socket.SOCK_STREAM)
            names.setdefault((str(found[0][4][0]), endpoint.port), []).append(endpoint)
    for (address, port), duplicates in names.items():
        if len(duplicates) > 1:
            kept = [str(one) for one in endpoints if one not in duplicates[1:]]
            text = f"{' and '.join(map(str, duplicates))} are both {address}:{port}"
            yield finding("same-worker", ", ".join(map(str, duplicates)), text, all=",".join(kept))


def _memory(devices: Sequence[Device]) -> Iterator[Finding]:
    for device in devices:
        free, total = device.memory()
        if total and free < _LEAST_MEMORY:
            text = f"{free / 1e6:.0f} MB are free of {total / 1e6:.0f}"
            yield finding("worker-without-memory", device.name, text)


def compare(figures: Sequence[DeviceFigures], rpc: Sequence[str] = ()) -> list[Finding]:
    """Return findings of slow links and machines, compared with the median of the others and with fixed limits."""
    return [*_links(figures, ",".join(rpc)), *_nodes(figures, ",".join(rpc))]


def _links(figures: Sequence[DeviceFigures], all_: str) -> Iterator[Finding]:
    far = [one for one in figures if not one.local]
    for one in far:
        others = [other for other in far if other is not one]
        trips = [other.round_trip for other in others]
        usual = statistics.median(trips) if trips else None
        parts = []
        if one.round_trip > _FAR or (usual is not None and one.round_trip > max(_ROUND_TRIP, _TIMES * usual)):
            parts.append(f"a round trip of {1e3 * one.round_trip:.1f} ms" + (
                "" if usual is None else f" (the others {1e3 * usual:.1f} ms)"))  # fmt: skip
        rates = [other.bandwidth for other in others if other.bandwidth]
        rate = statistics.median(rates) if rates else None
        if one.bandwidth and (
            one.bandwidth < _NARROW or (rate is not None and one.bandwidth < min(_BANDWIDTH, rate / _TIMES))
        ):
            parts.append(
                f"{one.bandwidth / 1e6:.1f} MB/s" + ("" if rate is None else f" (the others {rate / 1e6:.0f})")
            )
        if parts:
            yield finding("slow-link", one.name, "; ".join(parts), all=all_, host=_host(one.name))


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
