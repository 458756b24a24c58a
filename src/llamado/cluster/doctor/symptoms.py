"""Table of symptoms: title, check, likely cause and fix of everything that `llamado doctor` can find.

Checks and log patterns report rows of this table. `python -m llamado.cluster.doctor.symptoms > docs/doctor.md` writes
the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple


class Symptom(NamedTuple):
    """One row of the table. `check`: the input it applies to, and the check.

    `remedies` may have fields in braces: a finding uses the first one whose fields are all given. The last one has no
    fields, unless every finding of the symptom gives them.
    """

    title: str
    check: str
    cause: str
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A symptom that was found: its place, the observation, the likely cause, and the command that fixes it."""

    symptom: str
    where: str
    found: str
    cause: str
    command: str

    @property
    def title(self) -> str:
        return SYMPTOMS[self.symptom].title


def finding(symptom: str, where: str, found: str, *, cause: str = "", remedy: str = "", **fields: object) -> Finding:
    """Return a finding of this symptom; `fields` fill in its remedy, `cause` and `remedy` replace the usual ones.

    Raises LookupError if no remedy can be filled in.
    """
    row = SYMPTOMS[symptom]
    known = {name: value for name, value in fields.items() if value not in (None, "")}
    possible = [one for one in row.remedies if fields_of(one) <= known.keys()]
    if not (remedy or possible):
        raise LookupError(f"{symptom}: no remedy can be written with {sorted(known)} alone")
    return Finding(symptom, where, found, cause or row.cause, remedy or possible[0].format(**known))


def fields_of(remedy: str) -> set[str]:
    """Return the names of a remedy's fields."""
    return {name for _, name, _, _ in Formatter().parse(remedy) if name}


SYMPTOMS: dict[str, Symptom] = {
    # --- servers
    "refused": Symptom(
        "Connection refused",
        "URL: open a TCP connection",
        "no server runs there, it has ended, or it listens on another port",
        ("ss -ltnp | grep ':{port} '   # if it lists nothing: start the server with --port {port}",),
    ),
    "unknown-host": Symptom(
        "Unknown host name",
        "URL, --rpc: resolve the name",
        "the name is misspelled, or exists only on another network",
        (
            "getent hosts {host}   # if it prints nothing: use the address instead of the name",
            "use the host's address instead of its name   # getent hosts prints the address of a name",
        ),
    ),
    "unreachable": Symptom(
        "Connection timed out",
        "URL, --rpc: open a TCP connection",
        "a firewall drops the packets, the machine is off, or the address is wrong",
        ("sudo ufw allow {port}/tcp   # on {host}; then test with nc -zv {host} {port} from here",),
    ),
    "silent": Symptom(
        "The server accepts connections but does not respond",
        "URL: GET /health",
        "the process is stopped or hangs; the operating system still accepts connections for it",
        ("kill -CONT $(lsof -ti :{port} -sTCP:LISTEN)   # on {host}; if that does not help: restart the server",),
    ),
    "stopped": Symptom(
        "The process is stopped",
        "URL, --rpc on this machine: state of the process that has the port",
        "it received SIGSTOP, or Ctrl-Z in its terminal; the operating system still accepts connections for it",
        ("kill -CONT {pid}",),
    ),
    "ended": Symptom(
        "The server ended during the check",
        "URL: repeated GET /health, and other requests",
        "it was shut down, or it crashed",
        ("read the end of its log, then start it again   # llamado doctor with the log's name explains the log",),
    ),
    "slow-health": Symptom(
        "/health responds slowly",
        "URL: duration of GET /health",
        "the machine is overloaded, or the server computes large batches between two responses",
        ("restart the server with -ub 256   # smaller batches; and set the timeout of health probes to 10 s",),
    ),
    "not-a-server": Symptom(
        "Another program responds",
        "URL: response of /health",
        "another program uses the port, or the server has a path prefix (--api-prefix) that the URL lacks",
        ("lsof -i :{port} -sTCP:LISTEN   # prints the program that uses the port",),
    ),
    "worker-address": Symptom(
        "The URL is the address of a worker, not of a server",
        "URL: RPC HELLO, if it does not speak HTTP",
        "workers (port 50052 and up) speak RPC; clients connect to the server that lists them in --rpc",
        ("restart the server with --rpc {host}:{port}   # and use the server's URL, not the worker's address",),
    ),
    "wants-tls": Symptom(
        "The server uses TLS, the URL does not",
        "URL: TLS handshake, if http:// fails",
        "the server was started with --ssl-key-file and --ssl-cert-file",
        ("use https://{host}:{port} instead",),
    ),
    "no-tls": Symptom(
        "The URL uses TLS, the server does not",
        "URL: plain HTTP, if https:// fails",
        "the server was started without a certificate, or a proxy in front of it ends TLS",
        ("use http://{host}:{port} instead   # or restart the server with --ssl-key-file and --ssl-cert-file",),
    ),
    "certificate": Symptom(
        "The server's certificate is not trusted",
        "URL: TLS handshake with the certificate authorities of this machine",
        "it is self-signed, expired, or issued for another name",
        (
            "openssl s_client -connect {host}:{port} </dev/null | openssl x509 -noout -subject -dates -ext "
            "subjectAltName",
        ),
    ),
    "loading": Symptom(
        "The server is still loading the model (503 is normal until then)",
        "URL: /health returns 503 Loading model, and its progress grows",
        "it was started recently; large models and slow links take minutes",
        ("llamado wait {url}",),
    ),
    "stuck-loading": Symptom(
        "Loading makes no progress",
        "URL: /health returns 503 Loading model, and its progress does not grow",
        "memory is exhausted and the machine swaps, a worker hangs, or the disk does not respond",
        (
            "vmstat 1 5   # on {host}: if si and so are not 0, memory is short: start with a smaller -c, or -ctk "
            "q8_0 -ctv q8_0; otherwise the server's log names the step that it waits for",
        ),
    ),
    "failed-to-load": Symptom(
        "The model could not be loaded; every request gets 503",
        "URL: the error in /health",
        "the model's file, its size, or a worker; the message has the details",
        ("read the lines of the server's log before this one: they have the reason",),
    ),
    "unready": Symptom(
        "The server returns 503 with a reason",
        "URL: the error in /health",
        "see the message",
        ("read the server's log: it has the reason with more details",),
    ),
    "proxy-error": Symptom(
        "502, 503 or 504 without a reason",
        "URL: an error that is not a llama server's",
        "a proxy whose server is away, or whose timeouts are too short for long responses",
        ("use the URL of the server behind the proxy   # llamado deploy nginx writes a proxy with suitable timeouts",),
    ),
    "worker-lost": Symptom(
        "A worker is lost; the server returns 503",
        "URL: the worker in /health's error",
        "the worker's process or machine has ended, or the network between them is down",
        (
            "llamado worker -p {port}   # on {host}; with --rpc-failover 30 the server continues without it",
            "start the worker again   # with --rpc-failover 30 the server continues without it",
        ),
    ),
    "degraded": Symptom(
        "A worker is lost; other devices have taken its layers",
        "URL: degraded in /health",
        "the worker's process or machine has ended; the server continues, slower",
        (
            "llamado worker -p {port}   # on {host}: it gets its layers back",
            "start the worker again: it gets its layers back",
        ),
    ),
    "replica-missing": Symptom(
        "A replica of the gateway is not ready",
        "URL of a gateway: /gateway/status, and the replica states in /health's error",
        "the replica's server has ended, still loads, or cannot be reached from the gateway",
        (
            "llamado doctor {url}",
            "read the gateway's log: it has the reason   # llamado doctor with the replica's address checks it",
        ),
    ),
    "no-slots": Symptom(
        "Requests wait for a free slot",
        "URL: requests_deferred in /metrics, /slots, /health?fail_on_no_slot=1",
        "there are more concurrent requests than slots",
        (
            "restart the server with -np {more}   # or put more replicas behind a gateway",
            "restart the server with a larger -np   # or put more replicas behind a gateway",
        ),
    ),
    "wrong-key": Symptom(
        "401: the API key is missing or wrong",
        "URL: GET /props with --api-key",
        "the server was started with --api-key and does not accept this key",
        ("send one of the keys that the server was started with   # llamado's commands accept it as --api-key",),
    ),
    "no-key": Symptom(
        "The server is reachable from other machines without a key",
        "URL that is not loopback: GET /props without a key",
        "--host 0.0.0.0 without --api-key: anyone on the network can use the server and read the requests of others",
        ("restart the server with --api-key $(openssl rand -hex 16)",),
    ),
    "bind-address": Symptom(
        "The server listens on another address of this machine",
        "URL on this machine: try 127.0.0.1 and ::1",
        "the server listens on one address only (--host, default 127.0.0.1)",
        ("restart the server with --host {listen}   # or use {url}",),
    ),
    "clock": Symptom(
        "The clocks differ",
        "URL: the Date header compared with this machine's clock",
        "a clock is not synchronized, which breaks certificates, created timestamps and rate limits",
        ("sudo timedatectl set-ntp true   # on the machine whose clock is wrong",),
    ),
    "builds-differ": Symptom(
        "Replicas run different builds",
        "several URLs: build_info of /props",
        "only some replicas were updated; responses to the same seed may differ",
        ("llamado --version   # on every machine: install the same version everywhere, then restart",),
    ),
    "models-differ": Symptom(
        "Replicas serve different models",
        "several URLs: size, parameters and context in /v1/models",
        "one was started with another file or another -c",
        ("restart them with the same -m and the same -c",),
    ),
    # --- workers
    "worker-refused": Symptom(
        "A worker refuses the connection",
        "--rpc: open a TCP connection",
        "no worker runs there, or it listens on 127.0.0.1 only",
        (
            "llamado worker -H 0.0.0.0 -p {port}   # on {host}; rpc-server -H 0.0.0.0 -p {port} works too",
            "start the worker   # with -H 0.0.0.0 if the server is on another machine",
        ),
    ),
    "worker-silent": Symptom(
        "A worker accepts the connection but does not respond",
        "--rpc: RPC HELLO",
        "llama.cpp's rpc-server serves one client at a time and has one already, or the worker is stopped",
        ("ss -tnp | grep ':{port} '   # lists the connected clients; llamado worker -p {port} serves many",),
    ),
    "worker-version": Symptom(
        "RPC versions differ",
        "--rpc: the version in HELLO",
        "server and worker come from different llama.cpp builds",
        (
            "install the same build of llama.cpp on both sides   # rpc-server prints its version at start. After a "
            "client hangs up, a llamado worker greets it in the other version: start that server again, or the worker "
            "with --protocol 8",
        ),
    ),
    "not-a-worker": Symptom(
        "Another program responds instead of a worker",
        "--rpc: RPC HELLO",
        "another program uses the port, or it is the address of an HTTP server",
        (
            "lsof -i :{port} -sTCP:LISTEN   # on {host}: prints the program that uses the port",
            "check the ports in --rpc   # on the worker's machine, lsof -i -sTCP:LISTEN lists all listening programs",
        ),
    ),
    "worker-wants-tls": Symptom(
        "The worker uses TLS, --rpc does not",
        "--rpc: TLS handshake, if plain HELLO fails",
        "the worker was started with --tls-cert",
        ("restart the server with --rpc tls://{host}:{port}   # and --rpc-ca with the file of its authority",),
    ),
    "worker-no-tls": Symptom(
        "--rpc uses TLS, the worker does not",
        "--rpc tls://: plain HELLO, if the handshake fails",
        "the worker was started without --tls-cert; llama.cpp's rpc-server has no TLS",
        ("restart the server with --rpc {host}:{port}   # or the worker with --tls-cert and --tls-key",),
    ),
    "worker-certificate": Symptom(
        "The worker's certificate is not trusted, or the worker rejects the server's",
        "--rpc tls://: handshake with --rpc-ca, --rpc-cert and --rpc-key",
        "the authority is missing, the name is not in the certificate, or the worker requires a client certificate "
        "(--tls-client-ca)",
        (
            "restart the server with --rpc-ca   # and with --rpc-cert and --rpc-key if the worker has "
            "--tls-client-ca",
        ),
    ),
    "worker-without-memory": Symptom(
        "A worker has no free memory",
        "--rpc: free memory of its devices",
        "other clients use it, its container has a small limit, or -m/--mem is small",
        ("restart the worker with a larger -m   # or end other programs that use the memory of its machine",),
    ),
    "slow-link": Symptom(
        "Slow link to a worker",
        "--rpc: round trip of a graph and MB/s, compared with the other workers",
        "Wi-Fi, a VPN, another site, or a saturated line; every token crosses the link",
        (
            "ping -c 20 {host}   # from the server; llamado plan shows the link's share of the time per token",
            "measure the link from the server   # llamado plan shows its share of the time per token",
        ),
    ),
    "slow-node": Symptom(
        "Slow worker machine",
        "--rpc: rate at which it reads weights, compared with the others",
        "fewer cores or memory channels, a container limit, or other programs on it",
        (
            "restart the server with -ts auto   # it gets fewer layers; top on {host} shows other programs",
            "restart the server with -ts auto   # it gets fewer layers",
        ),
    ),
    "same-worker": Symptom(
        "One worker is listed under two names",
        "--rpc: resolve the names to addresses",
        "its memory is counted twice, and layers are sent twice",
        ("restart the server with --rpc {all}",),
    ),
    # --- model files
    "no-file": Symptom(
        "The model file does not exist",
        "-m: the path",
        "the path is misspelled, or not mounted in the container",
        (
            "ls -la {folder}   # llamado list shows the models on this machine",
            "check the path   # llamado list shows the models on this machine",
        ),
    ),
    "not-readable": Symptom(
        "No permission to read the model file",
        "-m: open the file",
        "it belongs to another user, as files of Ollama's service do",
        ("sudo chmod a+r {path}   # or sudo chown $USER {path}",),
    ),
    "not-gguf": Symptom(
        "The file is not GGUF",
        "-m: its first bytes",
        "an error page or a Git LFS pointer was saved instead, or the file has another format",
        ("download the file again from the hub's /resolve/ URL   # not /blob/; in a clone: git lfs pull",),
    ),
    "truncated": Symptom(
        "The model file is incomplete",
        "-m: the sizes in its header",
        "the download was interrupted, or the disk was full",
        ("rm {path}   # then download it again", "download the file again"),
    ),
    "missing-part": Symptom(
        "Parts of a split model are missing",
        "-m: the other parts beside the first",
        "only some of NAME-0000i-of-0000N.gguf were downloaded, or -m is not the first part",
        (
            "download all of {pattern} into {folder}, and pass the first to -m",
            "download all parts into one folder, and pass the first to -m",
        ),
    ),
    "damaged": Symptom(
        "The file's header is damaged",
        "-m: every field and range of its header",
        "a bad download or disk, or a faulty GGUF writer",
        (
            "sha256sum {path}   # compare with the hub's; download it again if it differs",
            "compare the file's sha256sum with the hub's, and download it again if it differs",
        ),
    ),
    "architecture": Symptom(
        "Unknown model architecture",
        "-m: general.architecture",
        "the file is newer than this program, or Ollama renamed the architecture",
        (
            "update llamado, or use another file of the model   # {instead}",
            "update llamado, or use another file of the model   # instead of Ollama's, the one on Hugging Face",
        ),
    ),
    "weight-type": Symptom(
        "Unsupported weight type",
        "-m: the types of its tensors",
        "llamado has no kernel for this quantization",
        (
            "llama-quantize --allow-requantize {path} {path}.q4_k_m.gguf Q4_K_M   # or download a Q4_K_M of the model",
            "download a Q4_K_M of the model",
        ),
    ),
    "no-model": Symptom(
        "The file is not a language model",
        "-m: general.type and the architecture",
        "it is an adapter or a projector (mmproj) of a model",
        ("pass {flag} {path} together with -m and the model that it belongs to",),
    ),
    "invalid-model": Symptom(
        "The file does not match its architecture",
        "-m: hyper-parameters and weights",
        "another version converted it, or its name is misleading",
        (
            "llamado inspect {path}",
            "download another file of the model   # llamado inspect shows the contents of this one",
        ),
    ),
    "too-large": Symptom(
        "The model does not fit in memory",
        "-m: weights, context and cache compared with free memory here and on the workers of --rpc",
        "weights, context and KV cache need more than is free",
        (
            "{fits}",
            "start with a smaller -c, or -ctk q8_0 -ctv q8_0   # llamado plan with the same flags shows what fits",
        ),
    ),
    "ollama-model": Symptom(
        "Ollama does not have this model",
        "-m ollama:NAME: its manifest",
        "it was never pulled, has another tag, or Ollama uses another folder ($OLLAMA_MODELS)",
        ("ollama pull {name}   # ollama list shows the models",),
    ),
    "ollama-blob": Symptom(
        "A file of the Ollama model is missing",
        "-m ollama:NAME: the blob that its manifest refers to",
        "the store was cleaned up or copied in part",
        ("ollama pull {name}", "ollama pull the model again"),
    ),
    # --- this machine
    "port-taken": Symptom(
        "The port is in use",
        "--port: listen on it",
        "another program uses it, or an earlier server still runs",
        (
            "kill {pid}   # {program}; or --port {free}",
            "ss -ltnp 'sport = :{port}'   # prints the program that uses it; or use another --port",
            "use another --port   # ss -ltnp lists all listening programs",
        ),
    ),
    "port-forbidden": Symptom(
        "No permission to use the port",
        "--port: listen on it",
        "only the administrator may use ports below 1024",
        ("use --port 8080   # with a proxy in front of it: llamado deploy nginx",),
    ),
    "not-this-machine": Symptom(
        "The address does not belong to this machine",
        "--host: listen on it",
        "--host is the address to listen on: one of this machine, or 0.0.0.0 for all of them",
        ("ip -brief address   # then use one of these for --host, or 0.0.0.0 with --api-key",),
    ),
    "container-memory": Symptom(
        "The container's memory limit is too small for the model",
        "control group limits compared with the machine's memory",
        "the container or unit is limited to less memory than the machine has",
        ("docker run --memory {needed}   # compose: deploy.resources.limits.memory; systemd: MemoryMax={needed}",),
    ),
    "too-many-threads": Symptom(
        "More threads than cores",
        "-t compared with CPU affinity, cores and the CPU limit of control groups",
        "threads share cores and wait for each other; every step is as slow as the last thread",
        ("use -t {cores}   # or leave -t out",),
    ),
    "lock-limit": Symptom(
        "--mlock cannot lock the model in RAM",
        "--mlock: RLIMIT_MEMLOCK and the container's memory compared with the file",
        "the limit for locked memory is too small",
        ("ulimit -l unlimited   # systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1",),
    ),
    "disk-full": Symptom(
        "The disk is full",
        "free space in the cache folder",
        "models and worker caches fill it",
        (
            "du -sh {folder}/*   # delete what you do not need, or set LLAMADO_CACHE to a folder on another disk",
            "df -h   # delete what you do not need, or set LLAMADO_CACHE to a folder on another disk",
        ),
    ),
    "cache-not-writable": Symptom(
        "The cache folder is not writable",
        "the cache folder: create a file",
        "it belongs to another user, or is mounted read-only",
        (
            "sudo chown -R $(id -u) {folder}   # or set LLAMADO_CACHE to another folder",
            "set LLAMADO_CACHE, for llama.cpp LLAMA_CACHE, to a writable folder",
        ),
    ),
    "open-files": Symptom(
        "The limit for open files is small",
        "RLIMIT_NOFILE",
        "each connection is an open file",
        ("ulimit -n 65536   # systemd: LimitNOFILE=65536",),
    ),
    # --- graphics cards
    "card-no-driver": Symptom(
        "A graphics card has no driver",
        "PCI devices: an NVIDIA card without its kernel module",
        "the NVIDIA driver is not installed, or another driver (nouveau) has the card",
        ("sudo ubuntu-drivers install   # or your distribution's NVIDIA driver package; then restart the machine",),
    ),
    "card-old-driver": Symptom(
        "The driver of a graphics card is too old",
        "the driver's version",
        "the installed NVIDIA driver lacks what llamado's kernels need",
        ("nvidia-smi   # prints the version; install a newer driver, then restart the machine",),
    ),
    "card-forbidden": Symptom(
        "No permission to use a graphics card",
        "device files below /dev: open for reading and writing",
        "the files belong to a group that this user is not in, or a container does not have them",
        ("sudo usermod -aG video,render $(whoami)   # then log in again; containers: docker run --gpus all",),
    ),
    "cards-hidden": Symptom(
        "CUDA_VISIBLE_DEVICES hides all graphics cards",
        "the environment of this process",
        "the variable is empty, -1, or names cards that this machine does not have",
        ("unset CUDA_VISIBLE_DEVICES   # in the environment of the server: its unit, container or shell",),
    ),
    "card-unusable": Symptom(
        "A graphics card cannot be used",
        "open every card",
        "see the message; the kernel's log has details",
        ("sudo dmesg | grep -iE 'nvrm|xid'   # until it works, --device none uses the CPU without this message",),
    ),
    "card-in-use": Symptom(
        "Other processes hold the memory of a graphics card",
        "free memory of every card",
        "another server or a desktop program uses the card; layers that do not fit stay with the CPU",
        ("nvidia-smi   # lists the processes; end those that you do not need, or choose cards with --device CUDA1",),
    ),
    "card-lost": Symptom(
        "A graphics card was lost during work",
        "URL: a device of the server's own machine in /health; LOGFILE",
        "the card failed (overheating, power, a bus error), or its memory ran out; other devices have its layers",
        ("sudo dmesg | grep -i xid   # on the server's machine; restart the server once the card works again",),
    ),
    # --- logs
    "crash": Symptom(
        "The process crashed",
        "LOGFILE: segmentation fault, abort, GGML_ASSERT",
        "during loading often the memory fit; with mixed back ends often flash attention",
        ("start it with -fit off   # if it still crashes: with -fa off too",),
    ),
    "killed": Symptom(
        "The system killed the process because memory ran out",
        "LOGFILE: Killed, oom-kill",
        "model, context and cache need more than the machine or container has",
        ("start with a smaller -c, or -ctk q8_0 -ctv q8_0   # llamado plan with the same flags shows what fits",),
    ),
    "out-of-memory": Symptom(
        "Out of memory",
        "LOGFILE: a failed buffer allocation",
        "weights, KV cache or batches do not fit in the memory of a device",
        ("start with a smaller -c, or -ctk q8_0 -ctv q8_0   # llamado plan with the same flags shows what fits",),
    ),
    "context-full": Symptom(
        "The prompt is longer than the context",
        "LOGFILE",
        "the context of a slot is -c divided by -np",
        ("start with a larger -c, or a smaller -np",),
    ),
    "wrong-flag": Symptom(
        "Unknown flag, or invalid value",
        "LOGFILE",
        "flags differ between versions",
        ("llamado serve --help   # older spellings work too",),
    ),
    "no-template": Symptom(
        "The chat template cannot be used",
        "LOGFILE",
        "the model has no chat template, or its template uses unsupported features",
        ("start with --chat-template chatml",),
    ),
    "device-same": Symptom(
        "Two workers share a device that cannot be shared",
        "LOGFILE: an unsupported operation in rpc-server",
        "rpc-server without -d uses all devices, including BLAS",
        ("rpc-server -d CPU   # start each with a different -d",),
    ),
}  # fmt: skip

_SECTIONS = {
    "refused": "Servers",
    "worker-refused": "Workers",
    "no-file": "Model files",
    "port-taken": "This machine",
    "card-no-driver": "Graphics cards",
    "crash": "Logs",
}
"""Headings of the page, by the first symptom below each."""


def page() -> str:
    """Return the table as a Markdown page."""
    lines = [
        "# Symptoms and fixes",
        "",
        "For people whose server, worker or model does not work. [`llamado doctor`](operations.md#diagnose-a-problem)",
        "prints the symptoms that it finds, each with its likely cause and the command that fixes it. This page lists",
        "all symptoms. *Check* names the input and the check; doctor fills in the fields in braces.",
        "",
        "`python -m llamado.cluster.doctor.symptoms` generates this page.",
    ]
    for symptom, row in SYMPTOMS.items():
        if symptom in _SECTIONS:
            lines += ["", f"## {_SECTIONS[symptom]}", ""]
            lines += ["| symptom | check | likely cause | fix |", "|---|---|---|---|"]
        cells = [row.title, row.check, row.cause, f"`{row.remedies[0]}`"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
