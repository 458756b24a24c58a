"""Discovery of workers on the local network with mDNS (DNS-SD): workers announce themselves, servers browse."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llamado.errors import LlamadoError
from llamado.installation import install_command
from llamado.loglines import LineLimit
from llamado.rpc.endpoint import Endpoint

if TYPE_CHECKING:
    from zeroconf import Zeroconf

log = logging.getLogger("llamado.rpc.discovery")
log.addFilter(LineLimit())

SERVICE = "_llamado-rpc._tcp.local."
_LEAVE_SECONDS = 600.0
"""Most seconds that a leaving worker waits for servers to move its layers."""
_MOST_WORKERS = 64
"""Workers tracked at a time: any host on the network can announce thousands."""
_MOST_SHARE = 1e15
"""As MAX_SHARE of devices/split/placement.py."""


class DiscoveryError(LlamadoError):
    """The announcement failed, or the network cannot be browsed."""


class Announcement:
    """A worker's announcement, until `end`. `interfaces`: addresses to announce on, all if empty."""

    def __init__(self, endpoint: Endpoint, share: float = 1.0, interfaces: Sequence[str] = ()) -> None:
        """Raises DiscoveryError."""
        self._zeroconf = _open(interfaces)
        from zeroconf import ServiceInfo

        addresses = _addresses(endpoint.host, interfaces)
        if all(ipaddress.ip_address(one).is_loopback for one in addresses):
            log.warning("--announce: %s is reached from this machine alone; -H 0.0.0.0 listens to others", addresses[0])
        name = f"{socket.gethostname().partition('.')[0]}-{endpoint.port}"
        properties: dict[str | bytes, str | bytes | None] = {"tls": str(int(endpoint.tls)), "share": f"{share:g}"}
        self._info = ServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            port=endpoint.port,
            parsed_addresses=addresses,
            properties=properties,
            server=f"{name}.local.",
        )
        try:
            self._zeroconf.register_service(self._info, allow_name_change=True)
        except Exception as error:
            self._zeroconf.close()
            raise DiscoveryError(f"--announce: cannot announce this worker: {error}") from None

    def end(self, is_released: Callable[[], bool]) -> None:
        """Withdraw the announcement and wait until `is_released` returns True, or for ten minutes."""
        self._zeroconf.unregister_service(self._info)
        until = time.monotonic() + _LEAVE_SECONDS
        while not is_released() and time.monotonic() < until:
            time.sleep(0.1)
        self._zeroconf.close()


class Discovery:
    """Calls `found` (endpoint, share) and `gone` (endpoint) for workers that appear and leave.

    The calls about one worker are in order, each on its own thread. `found` returns True if the worker was accepted; a
    rejected one is dropped.
    """

    def __init__(
        self, found: Callable[[str, float], bool], gone: Callable[[str], None], interfaces: Sequence[str] = ()
    ) -> None:
        """Raises DiscoveryError."""
        self._zeroconf = _open(interfaces)
        from zeroconf import ServiceBrowser

        self._found, self._gone = found, gone
        self._known: dict[str, str] = {}
        """Endpoints by service name, "" while one is resolved."""
        self._lock = threading.Lock()
        self._browser = ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._changed])

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        from zeroconf import ServiceStateChange

        leaves = state_change is ServiceStateChange.Removed
        with self._lock:
            if leaves:
                if not self._known.get(name):
                    return
            elif self._known.get(name) == "":
                return
            elif name not in self._known and len(self._known) >= _MOST_WORKERS:
                log.warning("%d workers have announced themselves: %s is ignored", _MOST_WORKERS, name)
                return
            else:
                self._known.setdefault(name, "")
        # Resolving takes a while and the callback longer: not on the thread that listens.
        work = self._leave if leaves else self._resolve
        threading.Thread(target=work, args=(name,), name="llamado-discovered", daemon=True).start()

    def _resolve(self, name: str) -> None:
        taken = False
        try:
            info = self._zeroconf.get_service_info(SERVICE, name, timeout=5000)
            if info is not None and info.port and (addresses := info.parsed_scoped_addresses()):
                properties = info.decoded_properties
                endpoint = str(Endpoint(addresses[0], info.port, properties.get("tls") == "1"))
                self._known[name] = endpoint
                taken = self._found(endpoint, read_share(properties.get("share")))
        finally:
            if not taken:
                self._known.pop(name, None)

    def _leave(self, name: str) -> None:
        endpoint = self._known.pop(name, None)
        if endpoint:
            self._gone(endpoint)

    def close(self) -> None:
        """Stop browsing."""
        self._browser.cancel()
        self._zeroconf.close()


def read_share(text: str | None) -> float:
    """Return the share that a worker announces, 1 for text that is no proportion."""
    try:
        share = float(text or 1.0)
    except ValueError:
        return 1.0
    return share if 0.0 <= share <= _MOST_SHARE else 1.0


def _open(interfaces: Sequence[str]) -> Zeroconf:
    try:
        from zeroconf import InterfaceChoice, Zeroconf
    except ImportError:
        raise DiscoveryError(
            f"--announce and --discover need the package zeroconf: {install_command('discovery')}"
        ) from None
    try:
        return Zeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
    except OSError as error:
        raise DiscoveryError(f"cannot browse this network: {error.strerror or error}") from None


def _addresses(host: str, interfaces: Sequence[str]) -> list[str]:
    """Return the addresses that reach a worker."""
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return [host]
    except ValueError:
        return [socket.gethostbyname(host)]
    if interfaces:
        return list(interfaces)
    import ifaddr  # zeroconf's own dependency

    found = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips if isinstance(ip.ip, str)]
    return [ip for ip in found if not ipaddress.ip_address(ip).is_loopback] or found
