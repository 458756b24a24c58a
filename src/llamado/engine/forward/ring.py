"""Links between consecutive devices, so that results go straight to the next one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from llamado.devices.device import Device, LinkLost, TensorLink
from llamado.devices.split.partition import GraphPart
from llamado.errors import LlamadoError

log = logging.getLogger(__name__)

_REFUSED_SECONDS = 300.0
"""Seconds until two devices whose link failed are linked again."""

Pair = tuple[int, int]
"""Numbers of a device and of the next one."""


class _LinkedPair(NamedTuple):
    source: Device
    target: Device
    link: TensorLink


class Ring:
    """The links between `devices` (a list whose members may be replaced).

    Links form no cycle: two devices that send to each other might both wait until the other one receives.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._links: dict[Pair, _LinkedPair] = {}
        self._refused: dict[tuple[Device, Device], float] = {}  # until when (time.monotonic())

    def form(self, parts: Sequence[GraphPart]) -> None:
        """Link devices for these parts; existing links stay. May take seconds."""
        now = time.monotonic()
        self._refused = {
            pair: until
            for pair, until in self._refused.items()
            if until > now and all(device in self._devices for device in pair)
        }
        kept: dict[Pair, _LinkedPair] = {}
        lacking: list[Pair] = []
        for pair in _acyclic([(a.device, b.device) for a, b in pairwise(parts)]):
            source, target = (self._devices[number] for number in pair)
            linked = self._links.pop(pair, None)
            if linked is not None and (linked.source, linked.target) == (source, target) and linked.link.lost is None:
                kept[pair] = linked
            elif source.links and target.links and (source, target) not in self._refused:
                lacking.append(pair)
        self._end([linked.link for linked in self._links.values()])
        self._links = kept
        if not lacking:
            return
        with ThreadPoolExecutor(len(lacking), "llamado-link") as pool:
            for pair, made in zip(lacking, pool.map(self._open, lacking), strict=True):
                if made is None:
                    self._refused[self._devices[pair[0]], self._devices[pair[1]]] = now + _REFUSED_SECONDS
                else:
                    self._links[pair] = made

    def _open(self, pair: Pair) -> _LinkedPair | None:
        source, target = (self._devices[number] for number in pair)
        try:
            link = source.link(target)
        except LlamadoError as error:  # a lost device is detected by its own watcher
            log.debug("%s and %s are not linked: %s", source.name, target.name, error)
            return None
        return None if link is None else _LinkedPair(source, target, link)

    def link(self, source: int, target: int) -> TensorLink | None:
        """Return the link between two devices, if there is one."""
        linked = self._links.get((source, target))
        return None if linked is None else linked.link

    @property
    def pairs(self) -> list[Pair]:
        """The pairs of linked devices."""
        return sorted(self._links)

    @property
    def lost(self) -> LinkLost | None:
        """The loss of a link, if one is lost."""
        return next((lost for linked in [*self._links.values()] if (lost := linked.link.lost) is not None), None)

    def break_up(self) -> None:
        """Close all links, so that no device waits for another; broken ones are not opened again for some time."""
        now = time.monotonic()
        for source, target, link in self._links.values():
            if link.lost is not None:
                self._refused[source, target] = now + _REFUSED_SECONDS
        self._end([linked.link for linked in self._links.values()])
        self._links = {}

    @staticmethod
    def _end(links: Sequence[TensorLink]) -> None:
        if links:
            with ThreadPoolExecutor(len(links), "llamado-unlink") as pool:
                list(pool.map(lambda link: link.close(), links))


def _acyclic(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs of different devices, without those that would close a cycle."""
    found: list[Pair] = []

    def leads(start: int, end: int) -> bool:
        return start == end or any(leads(b, end) for a, b in found if a == start)

    for source, target in dict.fromkeys(pairs):
        if not leads(target, source):
            found.append((source, target))
    return found
