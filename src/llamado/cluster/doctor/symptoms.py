"""The one table of symptoms: what each is called, how it is looked for, what is likely behind it, and what mends it.

Checks and explained logs report rows of this table; `docs/doctor.md` is made of it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple


class Symptom(NamedTuple):
    """One row. `remedies` may have fields in braces: a finding gets the first one whose fields are all known.

    The last one has no fields, unless all fields of it are known wherever the symptom is found.
    """

    title: str
    looked: str
    cause: str
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A symptom that was found: `where`, what exactly, what is likely behind it, and the command that mends it."""

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
    # --- an HTTP server
    "refused": Symptom(
        "Connection refused",
        "URL: a TCP connection",
        "no server runs there, it has ended, or it listens on another port",
        ("ss -ltnp | grep ':{port} '   # nothing listed: start the server, with --port {port}",),
    ),
    "unknown-host": Symptom(
        "A host that no name server knows",
        "URL, --rpc: the name is resolved",
        "the name is misspelled, or known on another network only",
        (
            "getent hosts {host}   # nothing printed: give the address instead of the name",
            "give the host's address instead of its name   # getent hosts prints what this machine makes of a name",
        ),
    ),
    "unreachable": Symptom(
        "No connection within the time",
        "URL, --rpc: a TCP connection",
        "a firewall drops the packets, the machine is off, or the address is wrong",
        ("sudo ufw allow {port}/tcp   # on {host}; then nc -zv {host} {port} from here",),
    ),
    "silent": Symptom(
        "Connections are accepted, and nothing is answered",
        "URL: GET /health",
        "the process is stopped or hangs: the system accepts connections for it",
        ("kill -CONT $(lsof -ti :{port} -sTCP:LISTEN)   # on {host}; still silent: restart the server",),
    ),
    "stopped": Symptom(
        "Stopped, not ended",
        "URL, --rpc of this machine: the state of the process behind the port",
        "it got SIGSTOP, or Ctrl-Z in its terminal: the system accepts connections for it, and nothing is answered",
        ("kill -CONT {pid}",),
    ),
    "ended": Symptom(
        "The server ended while it was watched",
        "URL: /health again and again, and its other answers",
        "it was told to end, or it failed",
        (
            "read the last lines of its log, then start it again   # llamado doctor with the log's name explains "
            "them",
        ),
    ),
    "slow-health": Symptom(
        "/health answers late",
        "URL: GET /health, timed",
        "the machine is overloaded, or the server answers /health between large batches",
        ("restart the server with -ub 256   # smaller batches; and give probes a timeout of 10 s",),
    ),
    "not-a-server": Symptom(
        "Something else answers",
        "URL: what /health says",
        "another program has the port, or the server has a path of its own before all paths (--api-prefix)",
        ("lsof -i :{port} -sTCP:LISTEN   # which program it is",),
    ),
    "worker-address": Symptom(
        "The address of a worker is used as that of a server",
        "URL: HELLO, where HTTP is not spoken",
        "workers (50052 and on) speak RPC; requests go to the server that has them in --rpc",
        ("restart the server with --rpc {host}:{port}   # and ask the server, not the worker",),
    ),
    "wants-tls": Symptom(
        "TLS on one side only: the server has it",
        "URL: a TLS handshake, where http:// fails",
        "the server was started with --ssl-key-file and --ssl-cert-file",
        ("use https://{host}:{port} instead",),
    ),
    "no-tls": Symptom(
        "TLS on one side only: the server does not have it",
        "URL: HTTP without TLS, where https:// fails",
        "the server was started without a certificate, or TLS ends at a proxy before it",
        ("use http://{host}:{port} instead   # or restart the server with --ssl-key-file and --ssl-cert-file",),
    ),
    "certificate": Symptom(
        "A certificate that is not trusted",
        "URL: a TLS handshake with the authorities this machine trusts",
        "it is self-signed, has run out, or is for another name",
        (
            "openssl s_client -connect {host}:{port} </dev/null | openssl x509 -noout -subject -dates -ext "
            "subjectAltName",
        ),
    ),
    "loading": Symptom(
        "Still loading the model (503 is right then)",
        "URL: /health says 503 Loading model, and its progress grows",
        "it has not been started long ago; large models and slow links take minutes",
        ("llamado wait {url}",),
    ),
    "stuck-loading": Symptom(
        "Loading stands still",
        "URL: /health says 503 Loading model, and its progress does not grow",
        "memory is exhausted and the machine swaps, a worker has frozen, or the disk does not deliver",
        (
            "vmstat 1 5   # on {host}: if si and so are not 0, memory is short: start with a smaller -c, or -ctk "
            "q8_0 -ctv q8_0; else the server's log names what it waits for",
        ),
    ),
    "failed-to-load": Symptom(
        "503 for ever: the model could not be loaded",
        "URL: /health says why",
        "the model's file, its size, or a worker; the message says which",
        ("read the lines of the server's log before this one: they say why",),
    ),
    "unready": Symptom(
        "503 with a reason",
        "URL: /health says why",
        "the message says it",
        ("read the server's log: the reason that /health gives is in it, with more",),
    ),
    "proxy-error": Symptom(
        "502, 503 or 504 without a reason",
        "URL: an error that is not a llama server's",
        "a proxy answers whose server is away, or which ends answers that take long",
        (
            "ask the server behind the proxy itself   # llamado deploy nginx writes a proxy with fitting time-outs",
        ),
    ),
    "worker-lost": Symptom(
        "503: a worker is away",
        "URL: /health names it",
        "its process or machine has ended, or the network between them",
        (
            "llamado worker -p {port}   # on {host}; --rpc-failover 30 lets the server do without it",
            "start the worker again   # --rpc-failover 30 lets the server do without it",
        ),
    ),
    "degraded": Symptom(
        "A worker is away, others have its layers",
        "URL: degraded in /health",
        "its process or machine has ended; answers go on, slower",
        (
            "llamado worker -p {port}   # on {host}: it gets its layers back",
            "start the worker again: it gets its layers back",
        ),
    ),
    "replica-missing": Symptom(
        "A gateway does without a replica",
        "URL of a gateway: /metrics, and the states that /health gives with 503",
        "its server has ended, still loads, or cannot be reached from the gateway",
        (
            "llamado doctor {url}",
            "read the gateway's log: it has the reason   # llamado doctor with the replica's address examines it",
        ),
    ),
    "no-slots": Symptom(
        "No slot is free",
        "URL: /slots, /health?fail_on_no_slot=1 and requests_deferred of /metrics",
        "more requests than slots; those behind them wait",
        (
            "restart the server with -np {more}   # or put more replicas behind one address",
            "restart the server with a larger -np   # or put more replicas behind one address",
        ),
    ),
    "wrong-key": Symptom(
        "401: a key is missing or wrong",
        "URL: GET /props with --api-key",
        "the server was started with --api-key, and this one is not among them",
        ("send one of the keys that the server was started with   # llamado's commands take it as --api-key",),
    ),
    "no-key": Symptom(
        "Open to others without a key",
        "URL that others can reach: GET /props and /slots without a key",
        "--host 0.0.0.0 without --api-key: whoever gets through uses the machine and sees what others ask",
        ("restart the server with --api-key $(openssl rand -hex 16)",),
    ),
    "bind-address": Symptom(
        "It listens on another address of this machine",
        "URL of this machine: 127.0.0.1 and ::1 as well",
        "the server listens on one address only (--host, 127.0.0.1 if none is given)",
        ("restart the server with --host {listen}   # or use {url}",),
    ),
    "clock": Symptom(
        "Clocks differ",
        "URL: the Date of answers against this machine's time",
        "a clock is not synchronised: certificates, created and rate limits are then wrong",
        ("sudo timedatectl set-ntp true   # on the machine whose clock is wrong",),
    ),
    "builds-differ": Symptom(
        "Replicas are of different builds",
        "several URLs: build_info of /props",
        "one was updated and not the other: answers to the same seed may differ",
        ("llamado --version   # on all of them: install the same one everywhere, then restart",),
    ),
    "models-differ": Symptom(
        "Replicas serve different models",
        "several URLs: size, parameters and context of /v1/models",
        "one was started with another file or another -c",
        ("restart them with the same -m and the same -c",),
    ),
    # --- workers
    "worker-refused": Symptom(
        "Connection refused by a worker",
        "--rpc: a TCP connection",
        "no worker runs there, or it listens on 127.0.0.1 only",
        (
            "llamado worker -H 0.0.0.0 -p {port}   # on {host}; rpc-server -H 0.0.0.0 -p {port} alike",
            "start the worker   # with -H 0.0.0.0 if the server is on another machine",
        ),
    ),
    "worker-silent": Symptom(
        "A worker accepts connections and does not greet",
        "--rpc: HELLO",
        "llama.cpp's rpc-server serves one client at a time and has one already; or it is stopped",
        ("ss -tnp | grep ':{port} '   # who is connected; llamado worker -p {port} serves many",),
    ),
    "worker-version": Symptom(
        "Versions of RPC differ",
        "--rpc: the version in HELLO",
        "server and worker are of different llama.cpp builds",
        (
            "install the same build of llama.cpp on both sides   # rpc-server prints its version when it starts. A "
            "llamado worker greets a client that hung up in the other version: start that server again, or the "
            "worker with --protocol 8",
        ),
    ),
    "not-a-worker": Symptom(
        "No worker, but something else answers",
        "--rpc: HELLO",
        "another program has the port, or it is the address of an HTTP server",
        (
            "lsof -i :{port} -sTCP:LISTEN   # on {host}: which program it is",
            "check the ports of --rpc   # lsof -i -sTCP:LISTEN on the worker's machine lists the programs that "
            "listen",
        ),
    ),
    "worker-wants-tls": Symptom(
        "TLS on one side only: the worker has it",
        "--rpc: a TLS handshake, where plain HELLO fails",
        "the worker was started with --tls-cert",
        ("restart the server with --rpc tls://{host}:{port}   # and --rpc-ca with the file of its authority",),
    ),
    "worker-no-tls": Symptom(
        "TLS on one side only: the worker does not have it",
        "--rpc tls://: plain HELLO, where the handshake fails",
        "the worker was started without --tls-cert; llama.cpp's never has TLS",
        ("restart the server with --rpc {host}:{port}   # or the worker with --tls-cert and --tls-key",),
    ),
    "worker-certificate": Symptom(
        "A worker's certificate is not trusted, or it refuses ours",
        "--rpc tls://: the handshake with --rpc-ca, --rpc-cert and --rpc-key",
        "the authority is not given, the name is not in the certificate, or the worker asks for ours "
        "(--tls-client-ca)",
        (
            "restart the server with --rpc-ca   # and with --rpc-cert and --rpc-key if the worker has "
            "--tls-client-ca",
        ),
    ),
    "worker-without-memory": Symptom(
        "A worker has no memory to lend",
        "--rpc: the free memory of its devices",
        "other clients have it all, its container has a small limit, or -m/--mem is small",
        ("restart the worker with a larger -m   # or end what uses the memory of its machine",),
    ),
    "slow-link": Symptom(
        "A slow link",
        "--rpc: round trip of a graph and MB/s, against the other workers",
        "Wi-Fi, a VPN, another site, or a saturated line: every token crosses it",
        (
            "ping -c 20 {host}   # from the server; llamado plan shows which share of a token it takes",
            "measure the link from the server   # llamado plan shows which share of a token it takes",
        ),
    ),
    "slow-node": Symptom(
        "A slow node",
        "--rpc: how fast it reads weights, against the others",
        "fewer cores or memory channels, a container's limit, or other work on it",
        (
            "restart the server with -ts auto   # it gets fewer layers; top on {host} shows other work",
            "restart the server with -ts auto   # it gets fewer layers",
        ),
    ),
    "same-worker": Symptom(
        "One worker under two names",
        "--rpc: the addresses behind the names",
        "its memory is counted twice, and layers are sent twice",
        ("restart the server with --rpc {all}",),
    ),
    # --- a model's file
    "no-file": Symptom(
        "The model's file is not there",
        "-m: the path",
        "the path is misspelled, or not mounted in the container",
        (
            "ls -la {folder}   # llamado list shows the models that are here",
            "check the path   # llamado list shows the models that are here",
        ),
    ),
    "not-readable": Symptom(
        "The model's file may not be read",
        "-m: opening it",
        "it belongs to another user, as files of Ollama's service do",
        ("sudo chmod a+r {path}   # or sudo chown $USER {path}",),
    ),
    "not-gguf": Symptom(
        "Not a GGUF file",
        "-m: its first bytes",
        "a page of an error or a Git LFS pointer was saved in its place, or it has another format",
        ("fetch the file again, from the hub's /resolve/ address   # not /blob/; in a clone: git lfs pull",),
    ),
    "truncated": Symptom(
        "The file ends too early",
        "-m: the sizes its header promises",
        "the download was interrupted, or the disk was full",
        (
            "rm {path}   # then fetch it again",
            "fetch the file again",
        ),
    ),
    "missing-part": Symptom(
        "Parts of a split model are missing",
        "-m: the other parts beside the first",
        "only some of NAME-0000i-of-0000N.gguf were fetched, or a later one was given",
        (
            "fetch all of {pattern} into {folder}, and give the first",
            "fetch all parts into one folder, and give the first",
        ),
    ),
    "damaged": Symptom(
        "The file's header is damaged",
        "-m: every field and range of its header",
        "a bad download or disk, or a program that writes GGUF wrongly",
        (
            "sha256sum {path}   # compare with the hub's; fetch it again where it differs",
            "sha256sum of the file, and the hub's: fetch it again where they differ",
        ),
    ),
    "architecture": Symptom(
        "An architecture that is not known here",
        "-m: general.architecture",
        "the file is newer than this program, or Ollama gave the architecture a name of its own",
        (
            "update llamado, or take another file of the model   # {instead}",
            "update llamado, or take another file of the model   # of Ollama's the original's on Hugging Face",
        ),
    ),
    "weight-type": Symptom(
        "A type of weights that has no kernel here",
        "-m: the types of its tensors",
        "a quantization that this program does not compute",
        (
            "llama-quantize --allow-requantize {path} {path}.q4_k_m.gguf Q4_K_M   # or fetch a Q4_K_M of the model",
            "fetch a Q4_K_M of the model",
        ),
    ),
    "no-model": Symptom(
        "Not a language model",
        "-m: general.type and the architecture",
        "the file is an adapter or a projector (mmproj) of a model",
        ("give {flag} {path} beside -m with the model that it belongs to",),
    ),
    "invalid-model": Symptom(
        "The file contradicts its architecture",
        "-m: hyper-parameters and weights",
        "it was converted by another version, or is not what its name says",
        (
            "llamado inspect {path}",
            "fetch another file of the model   # llamado inspect shows what this one says",
        ),
    ),
    "too-large": Symptom(
        "The model is larger than memory",
        "-m: its size, context and cache against memory here and of --rpc",
        "weights, context and K/V cache need more than is free",
        (
            "{fits}",
            "start with a smaller -c, or -ctk q8_0 -ctv q8_0   # llamado plan with the same flags shows what fits",
        ),
    ),
    "ollama-model": Symptom(
        "Ollama does not have this model",
        "-m ollama:NAME: its manifest",
        "it was never pulled, has another tag, or Ollama's folder is elsewhere ($OLLAMA_MODELS)",
        ("ollama pull {name}   # ollama list shows what there is",),
    ),
    "ollama-blob": Symptom(
        "Ollama's manifest points to a file that is missing",
        "-m ollama:NAME: the blob of its manifest",
        "the store was cleaned up or copied in part",
        (
            "ollama pull {name}",
            "ollama pull the model again",
        ),
    ),
    # --- this machine
    "port-taken": Symptom(
        "The port is taken",
        "--port: listening there",
        "another program, or an earlier one of this, still runs",
        (
            "kill {pid}   # {program}; or --port {free}",
            "ss -ltnp 'sport = :{port}'   # which program it is; or take another --port",
            "take another --port   # ss -ltnp lists the programs that listen",
        ),
    ),
    "port-forbidden": Symptom(
        "The port may not be used",
        "--port: listening there",
        "ports below 1024 are the administrator's",
        ("take --port 8080   # with a proxy before it: llamado deploy nginx",),
    ),
    "not-this-machine": Symptom(
        "The address is none of this machine's",
        "--host: listening there",
        "--host names where to listen: an address of this machine, or 0.0.0.0 for all",
        ("ip -brief address   # then take one of these with --host, or 0.0.0.0 with --api-key",),
    ),
    "container-memory": Symptom(
        "A container's limit is what is short",
        "limits of control groups against the machine's memory",
        "the container or unit may have less than the machine has",
        (
            "docker run --memory {needed}   # compose: deploy.resources.limits.memory; systemd: MemoryMax={needed}",
        ),
    ),
    "too-many-threads": Symptom(
        "More threads than processors",
        "-t against affinity, cores and the share of time of control groups",
        "threads that wait for each other: every step is as slow as the last of them",
        ("take -t {cores}   # or leave -t out",),
    ),
    "lock-limit": Symptom(
        "--mlock cannot lock the model",
        "--mlock: RLIMIT_MEMLOCK and the container's memory against the file",
        "the limit of locked memory is small",
        ("ulimit -l unlimited   # systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1",),
    ),
    "disk-full": Symptom(
        "The disk is full",
        "free space of the cache's folder",
        "models and a worker's cache fill it",
        (
            "du -sh {folder}/*   # delete what is not needed, or set LLAMADO_CACHE to a folder of another disk",
            "df -h   # delete what is not needed, or set LLAMADO_CACHE to a folder of another disk",
        ),
    ),
    "cache-not-writable": Symptom(
        "The cache cannot be written",
        "the cache's folder: making a file there",
        "it belongs to another user, or is mounted read-only",
        (
            "sudo chown -R $(id -u) {folder}   # or set LLAMADO_CACHE to another folder",
            "set LLAMADO_CACHE, for llama.cpp LLAMA_CACHE, to a folder that can be written",
        ),
    ),
    "open-files": Symptom(
        "Few open files are allowed",
        "RLIMIT_NOFILE",
        "each connection is an open file",
        ("ulimit -n 65536   # systemd: LimitNOFILE=65536",),
    ),
    # --- logs alone
    "crash": Symptom(
        "The process crashed",
        "LOGFILE: segmentation fault, abort, GGML_ASSERT",
        "while loading it is often the fitting of memory; with mixed back ends flash attention",
        ("start it with -fit off   # still: with -fa off, too",),
    ),
    "killed": Symptom(
        "The system ended the process for want of memory",
        "LOGFILE: Killed, oom-kill",
        "model, context and cache need more than the machine or container has",
        (
            "start with a smaller -c, or -ctk q8_0 -ctv q8_0   # llamado plan with the same flags shows what fits",
        ),
    ),
    "out-of-memory": Symptom(
        "Out of memory",
        "LOGFILE: a buffer that could not be had",
        "weights, K/V cache or batches are larger than the memory of a device",
        (
            "start with a smaller -c, or -ctk q8_0 -ctv q8_0   # llamado plan with the same flags shows what fits",
        ),
    ),
    "context-full": Symptom(
        "A prompt is longer than the context",
        "LOGFILE",
        "the context of a slot is -c divided by -np",
        ("start with a larger -c, or a smaller -np",),
    ),
    "wrong-flag": Symptom(
        "A flag that is not known, or a bad value",
        "LOGFILE",
        "flags differ between versions",
        ("llamado serve --help   # takes the older spellings, too",),
    ),
    "no-template": Symptom(
        "The chat template cannot be used",
        "LOGFILE",
        "the model's template is none, or uses what is not known",
        ("start with --chat-template chatml",),
    ),
    "device-same": Symptom(
        "Two workers share a device that cannot be shared",
        "LOGFILE: an operation that is not supported, in rpc-server",
        "rpc-server without -d takes all devices, BLAS among them",
        ("rpc-server -d CPU   # each with a -d of its own",),
    ),
}  # fmt: skip


def page() -> str:
    """The table as a Markdown page."""
    lines = [
        "# Symptoms that `llamado doctor` knows",
        "",
        "Made by `python -m llamado.cluster.doctor.symptoms`. Fields in braces are filled in.",
        "",
        "| symptom | how it is looked for | likely causes | what mends it |",
        "|---|---|---|---|",
    ]
    for row in SYMPTOMS.values():
        cells = [row.title, row.looked, row.cause, f"`{row.remedies[0]}`"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
