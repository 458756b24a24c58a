"""`llamado worker`: serves the devices of this machine over ggml RPC."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import select
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamado.devices import limits
from llamado.devices.accelerators import Accelerators, kind_of
from llamado.devices.device import Device, DeviceLost
from llamado.devices.registry import DeviceOptions, open_device
from llamado.errors import LlamadoError
from llamado.gguf.sources.stored import model_folders
from llamado.loglines import LineLimit
from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint, client_tls, server_tls
from llamado.rpc.request_log import is_debugging
from llamado.rpc.worker.activity import WorkDone, WorkLog
from llamado.rpc.worker.client import WorkerState
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.greetings import Greetings
from llamado.rpc.worker.identity import address, identity
from llamado.rpc.worker.join import ServerMembership, join_body, server_url
from llamado.rpc.worker.links import Dialer
from llamado.rpc.worker.memory import SharedDevice
from llamado.rpc.worker.session import Session
from llamado.rpc.worker.weights.own_files import OwnFiles
from llamado.rpc.worker.weights.tensor_cache import TensorCache, cache_folder

log = logging.getLogger("llamado.rpc.worker.server")

MAX_CONNECTIONS = 128
"""llama.cpp's server opens a dozen short connections before the one it keeps."""
MAX_OF_A_NETWORK = 32
"""Connections that clients of one network always get; more only while a quarter of all places is free."""
_IDLE_SECONDS = 5.0
"""Seconds without a request after which a client without buffers loses its place to a new client.

At once if its network has more than its share of places.
"""
_GONE_AFTER = 15
"""Seconds after which a client whose machine does not respond is gone."""
_CHECK_INTERVAL = 5.0
"""Seconds between two checks for overdue greetings."""
_ABANDON_INTERVAL = 0.05
"""Seconds between two attempts to abandon the graph of a client that has hung up."""
_REST_SECONDS = 30.0
"""Seconds after which unused working memory is returned to the system."""
_HUNG_UP = getattr(select, "POLLRDHUP", 0)
"""The client has hung up, even with unread data. Other systems than Linux report POLLHUP, which is always polled."""
_END_SECONDS = 60.0
"""Most seconds that a running graph delays the worker's end."""
_CPU = "CPU"
_GGML_DEVICE = re.compile(r"(CUDA|ROCm|MUSA|MTL|Metal|Vulkan|SYCL|CANN|GPUOpenCL)\d*", re.IGNORECASE)
"""GPU names of ggml's back ends (`ggml-rpc-server -d MTL0`)."""


class WorkerError(LlamadoError):
    """The worker cannot start: an unknown device, a port in use, an invalid network."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options of `llamado worker`. Port 0: any free one.

    `threads` of the CPU device, None: one per core this process may use. `devices` by name, empty: the accelerators, or
    the CPU. `mem`: most bytes that all clients together get of a device, None: its free memory. `allow`: networks that
    may connect (CIDR), empty: all. `join`: servers to join, with their `token` and the requested `share` of layers.
    `announce`: announce the worker on the local network. `ring`: connect to other workers to send tensors to them, if a
    client asks for it. `own_files`: map weights from `models` and the download folder, so that clients need not send
    them. `protocol`: major version of the greeting for unknown clients. `clients`: file that stores which clients need
    the other one.
    """

    host: str = "127.0.0.1"
    port: int = 50052
    threads: int | None = None
    devices: tuple[str, ...] = ()
    cache: bool = False
    mem: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    allow: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    token: str = ""
    share: float = 1.0
    announce: bool = False
    ring: bool = True
    own_files: bool = False
    models: tuple[str, ...] = ()
    protocol: int = wire.DEFAULT_GREETING.major
    clients: Path | None = None


class Worker:
    """Serves devices on a port. Listens from the start; `serve` runs until `stop`."""

    def __init__(self, devices: Sequence[Device], options: WorkerOptions | None = None) -> None:
        """Raises WorkerError, EndpointError or CacheError."""
        self.options = options = options or WorkerOptions(port=0)
        self._allowed = [_network(text) for text in options.allow]
        self._tls: ssl.SSLContext | None = None
        if options.tls_cert and options.tls_key:
            self._tls = server_tls(options.tls_cert, options.tls_key, options.tls_client_ca)
        elif options.tls_cert or options.tls_key or options.tls_client_ca:
            raise WorkerError("TLS needs --tls-cert and --tls-key")
        cache = TensorCache(cache_folder()) if options.cache else None
        self.state = WorkerState([SharedDevice(d, options.mem) for d in devices], cache, is_debugging())
        self.state.dialer = Dialer(options.ring, self._allowed)
        self.state.may_connect = self._may_connect
        if options.own_files:
            self.state.files = OwnFiles([*map(Path, options.models), *model_folders()])
        self.state.greetings = Greetings(wire.PROTOCOLS[options.protocol], options.clients)
        if options.tls_cert and options.tls_key:
            # As a client of other workers. One authority signs all certificates of a cluster.
            self.state.dialer.tls = client_tls(options.tls_client_ca, options.tls_cert, options.tls_key)
        self._listener = _listen(options.host, options.port)
        self._sessions: dict[Session, threading.Thread] = {}
        self._evicted: set[Session] = set()
        self._done = WorkDone()  # of clients that have left
        self._work_log = WorkLog()
        self._line_limit = LineLimit()
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    @property
    def endpoint(self) -> Endpoint:
        """The address for clients."""
        return Endpoint(self.options.host, self.port, self._tls is not None)

    @property
    def clients(self) -> int:
        """Number of open connections."""
        return len(self._sessions)

    def describe(self) -> str:
        """Return address, devices, cache and models, one per line."""
        lines = [f"llamado worker on {self.endpoint}"]
        for i, shared in enumerate(self.state.devices):
            free, total = shared.memory()
            details = shared.device.details
            lines.append(
                f"  device {i}: {shared.device.name}, {free / 1e9:.1f} GB free of {total / 1e9:.1f}"
                + (f", {details}" if details else "")
            )
        cache = self.state.cache
        lines.append(f"  cache: {cache.folder if cache else 'none (-c keeps weights on disk)'}")
        if self.state.files is not None:
            lines.append(f"  models: {', '.join(map(str, self.state.files.folders))}")
        return "\n".join(lines)

    def serve(self) -> None:
        """Serve clients until `stop`; then wait for running graphs and close everything."""
        if not self.state.is_debugging:
            log.addFilter(self._line_limit)
        try:
            while not self.state.is_stopping:
                self._wait()
                self._accept()
                for session in [*self._sessions]:
                    if session.is_gone:
                        session.hang_up()
                    if session.is_overdue:
                        session.shut()
                for shared in self.state.devices:
                    shared.trim_memory(_REST_SECONDS)
                self._log_work()
        finally:
            self._end()

    def close(self) -> None:
        """Close a worker that does not serve."""
        self._end()

    def _wait(self) -> None:
        """Wait until a client connects or hangs up, or a check is due."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        present: dict[int, Session] = {}
        seconds = _CHECK_INTERVAL
        for session in [*self._sessions]:
            if session.is_gone:
                seconds = _ABANDON_INTERVAL
            elif (number := session.fileno()) >= 0:
                poll.register(number, _HUNG_UP)
                present[number] = session
        for number, _ in poll.poll(1000 * seconds):
            if number in present:
                present[number].hang_up()

    def stop(self) -> None:
        """Make `serve` return, from any thread or signal handler."""
        self.state.is_stopping = True
        try:
            self._wake.send(b"\0")
        except OSError:
            pass

    def _log_work(self) -> None:
        with self._lock:
            works = [self._done, *(session.work for session in self._sessions)]
            held = [size for session in self._sessions if (size := session.held_bytes)]
        line = self._work_log.next_line(works, len(held), sum(held))
        if line is not None:
            log.info("%s", line)
        for kind, n in self._line_limit.overdue().items():
            log.warning("%d lines like this one were left out: %s", n, kind)

    def _accept(self) -> None:
        while not self.state.is_stopping:
            try:
                sock, (host, port, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client is gone already, or no descriptors are left
                log.warning("cannot accept a connection: %s", error.strerror or error)
                time.sleep(0.1)
                return
            name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if not self._may_connect(host):
                log.warning("%s: refused, not in a network of --allow", name)
                sock.close()
            elif not self._has_room(identity(host)):
                log.warning("%s: refused, too many connections (open=%d)", name, len(self._sessions))
                sock.close()
            else:
                self._begin(sock, host, name)

    def _has_room(self, network: str) -> bool:
        """Return True if one more client of a network gets a place, perhaps that of an idle client without buffers."""
        present = [session for session in [*self._sessions] if session not in self._evicted]
        of_network = Counter(session.network for session in present)
        crowded = of_network[network] >= MAX_OF_A_NETWORK and len(present) >= MAX_CONNECTIONS * 3 // 4
        if not crowded and len(present) < MAX_CONNECTIONS:
            return True
        before = time.monotonic() - _IDLE_SECONDS
        idle = [
            (-of_network[session.network], since, session)
            for session in present
            if (since := session.idle_since) is not None
            if since < before or of_network[session.network] > MAX_OF_A_NETWORK
            if session.network == network or not crowded
        ]
        if not idle:
            return False
        *_, one = min(idle, key=lambda entry: entry[:2])
        log.info("%s: closed to make room for another client (idle, holds nothing)", one.name)
        self._evicted.add(one)
        one.shut()
        return True

    def _may_connect(self, host: str) -> bool:
        if not self._allowed:
            return True
        found = address(host)
        return found is not None and any(found in network for network in self._allowed)

    def _begin(self, sock: socket.socket, host: str, name: str) -> None:
        try:
            sock.setblocking(True)
            _set_options(sock)
        except OSError:
            sock.close()
            return
        connection = ClientConnection(sock, host, name, self.state.greetings.of(host))
        session = Session(connection, self.state)
        thread = threading.Thread(target=self._run, args=(session,), name=f"llamado-{name}", daemon=True)
        with self._lock:
            self._sessions[session] = thread
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("%s: cannot be served: %s", name, error)
            with self._lock:
                del self._sessions[session]
            sock.close()

    def _run(self, session: Session) -> None:
        try:
            session.serve(self._tls)
        finally:
            with self._lock:
                self._sessions.pop(session, None)
                self._evicted.discard(session)
                self._done = self._done.plus(session.work)

    def _end(self) -> None:
        self.state.is_stopping = True
        log.removeFilter(self._line_limit)
        self._listener.close()
        with self._lock:
            sessions = dict(self._sessions)
        for session in sessions:
            session.shut()
        for session, thread in sessions.items():
            thread.join(_END_SECONDS)
            if thread.is_alive():
                log.warning("%s: graph still runs; ending without it", session.name)
        if self.state.cache is not None:
            self.state.cache.close()
        if self.state.files is not None:
            self.state.files.close()
        self._wake.close()
        self._woken.close()


def run_worker(options: WorkerOptions) -> int:
    """Run the command until SIGINT or SIGTERM. Raises WorkerError, EndpointError or CacheError."""
    devices = _open(options)
    try:
        worker = Worker(devices, options)
    except LlamadoError:
        for device in devices:
            device.close()
        raise

    try:
        body = join_body(worker.endpoint, devices, options.share) if options.join else {}
        memberships = [
            ServerMembership(server_url(s), options.token, body, options.tls_client_ca) for s in options.join
        ]
        announcement = None
        if options.announce:
            from llamado.rpc.discovery import Announcement

            announcement = Announcement(worker.endpoint, options.share)
    except BaseException:
        worker.close()
        for device in devices:
            device.close()
        raise

    def leave() -> None:
        for membership in memberships:
            membership.leave()
        if announcement is not None:
            announcement.end(lambda: worker.clients == 0)
        worker.stop()

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        if memberships or announcement is not None:
            log.info("leaving: waiting until the servers have moved its layers; interrupt again to end at once")
            threading.Thread(target=leave, name="llamado-leave", daemon=True).start()
        else:
            worker.stop()

    losses: list[DeviceLost] = []

    def lose(loss: DeviceLost) -> None:
        losses.append(loss)
        worker.stop()

    for device in devices:
        device.on_lost(lose)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    for membership in memberships:
        membership.start()
    if not _is_local(options.host):
        log.warning("%s", _exposure_warning(options))
    most = limits.memory().total
    if options.mem is not None and options.mem > most and any(device.local for device in devices):
        log.warning(
            "-m/--mem allows clients %.1f GB, but this process may use only %.1f GB: the system may kill it when they "
            "use more", options.mem / 1e9, most / 1e9,
        )  # fmt: skip
    for line in worker.describe().splitlines():
        log.info("%s", line)
    worker.serve()
    for device in devices:
        device.close()
    if losses:
        raise WorkerError(f"{losses[0]}; start the worker again: a new process can use the device if it works")
    log.info("ended")
    return 0


def _open(options: WorkerOptions) -> list[Device]:
    """Open the devices to serve, in the order in which they are named. By default the accelerators, as in llama.cpp, or
    the CPU if there are none. Raises WorkerError.
    """
    given = DeviceOptions(n_threads=options.threads)
    names = [name.upper() for name in options.devices]
    accelerators = Accelerators(given, names or None)
    devices = {device.name.upper(): device for device in accelerators.take()}
    missing = [name for name in names if name != _CPU and name not in devices]
    problem = next((str(error) for error in accelerators.problems.values()), "")
    for name in missing:
        if not _GGML_DEVICE.fullmatch(name):
            for device in devices.values():
                device.close()
            known = ", ".join((_CPU, *devices))
            raise WorkerError(f"-d/--device {name}: unknown device; this machine has {known}")
        log.warning(
            "-d/--device %s: not available%s; serving CPU instead (a ggml-rpc-server built for it works with llamado, "
            "too)", name, f" ({problem})" if problem and kind_of(name) else "",
        )  # fmt: skip
    wanted = dict.fromkeys(name if name in devices else _CPU for name in names or devices or (_CPU,))
    if _CPU in wanted:
        devices[_CPU] = open_device(_CPU, given)
    return [devices[name] for name in wanted]


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _exposure_warning(options: WorkerOptions) -> str:
    """Return the warning for a worker that other machines can reach."""
    text = (
        f"WARNING: {options.host} can be reached from other machines. Every client can use this machine's memory and "
        "processors, and the protocol has no authentication: never expose it to an open network."
    )
    if not options.tls_client_ca:
        text += " --tls-cert, --tls-key and --tls-client-ca admit only clients with a certificate"
        text += "." if options.allow else ", --allow only clients of given networks."
    return text


def _listen(host: str, port: int) -> socket.socket:
    where = Endpoint(host, port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # IPv4 first for a name with both kinds of address, as in ggml's clients
        family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise WorkerError(f"cannot listen on {where}: {reason}; choose another -p/--port or -H/--host") from None
    sock.setblocking(False)
    return sock


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise WorkerError(f"--allow {text}: expected a network as 10.0.0.0/8 or fd00::/8") from None


def _set_options(sock: socket.socket) -> None:
    """Send responses at once, and detect clients that vanish without closing the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _GONE_AFTER // 3,
        "TCP_KEEPINTVL": _GONE_AFTER // 3,
        "TCP_KEEPCNT": 2,
        "TCP_USER_TIMEOUT": 1000 * _GONE_AFTER,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
