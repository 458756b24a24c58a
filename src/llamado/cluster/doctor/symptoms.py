"""The one table of symptoms: what each is called, how it is looked for, what is likely behind it, and what mends it.

Checks and explained logs report rows of this table; `docs/doctor.md` is made of it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple


class Symptom(NamedTuple):
    """`command` may have fields in braces, which a finding fills in."""

    title: str
    looked: str
    cause: str
    command: str


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


def finding(symptom: str, where: str, found: str, *, cause: str = "", **fields: object) -> Finding:
    """A finding of this symptom; `fields` fill in its command, `cause` replaces the usual one.

    A field that nobody knows stays in capital letters, as manuals have it.
    """
    row = SYMPTOMS[symptom]
    names = {name for _, name, _, _ in Formatter().parse(row.command) if name}
    filled = row.command.format(**{name: fields.get(name) or name.upper() for name in names})
    return Finding(symptom, where, found, cause or row.cause, filled)


SYMPTOMS: dict[str, Symptom] = {
    # --- an HTTP server
    "refused": Symptom(
        "Connection refused",
        "URL: a TCP connection",
        "no server runs there, it has ended, or it listens on another port",
        "ss -ltnp | grep ':{port} '   # nothing listed: start it, llamado serve -m MODEL --port {port}",
    ),
    "unknown-host": Symptom(
        "A host that no name server knows",
        "URL, --rpc: the name is resolved",
        "the name is misspelled, or known on another network only",
        "getent hosts {host}   # nothing printed: give the address instead of the name",
    ),
    "unreachable": Symptom(
        "No connection within the time",
        "URL, --rpc: a TCP connection",
        "a firewall drops the packets, the machine is off, or the address is wrong",
        "sudo ufw allow {port}/tcp   # on {host}; then nc -zv {host} {port} from here",
    ),
    "silent": Symptom(
        "Connections are accepted, and nothing is answered",
        "URL: GET /health",
        "the process is stopped or hangs: the system accepts connections for it",
        "kill -CONT $(lsof -ti :{port} -sTCP:LISTEN)   # still silent: restart it",
    ),
    "slow-health": Symptom(
        "/health answers late",
        "URL: GET /health, timed",
        "the machine is overloaded, or the server answers /health between large batches",
        "llamado serve -m MODEL -ub 256   # smaller batches; give probes a timeout of 10 s",
    ),
    "not-a-server": Symptom(
        "Something else answers",
        "URL: what /health says",
        "another program has the port, or the server has a path of its own before all paths (--api-prefix)",
        "lsof -i :{port} -sTCP:LISTEN   # which program it is",
    ),
    "worker-address": Symptom(
        "The address of a worker is used as that of a server",
        "URL: HELLO, where HTTP is not spoken",
        "workers (50052 and on) speak RPC; requests go to the server that has them in --rpc",
        "llamado serve -m MODEL --rpc {host}:{port}",
    ),
    "wants-tls": Symptom(
        "TLS on one side only: the server has it",
        "URL: a TLS handshake, where http:// fails",
        "the server was started with --ssl-key-file and --ssl-cert-file",
        "llamado doctor https://{host}:{port}",
    ),
    "no-tls": Symptom(
        "TLS on one side only: the server does not have it",
        "URL: HTTP without TLS, where https:// fails",
        "the server was started without a certificate, or TLS ends at a proxy before it",
        "llamado serve -m MODEL --ssl-key-file KEY.pem --ssl-cert-file CERT.pem   # or use http://{host}:{port}",
    ),
    "certificate": Symptom(
        "A certificate that is not trusted",
        "URL: a TLS handshake with the authorities this machine trusts",
        "it is self-signed, has run out, or is for another name",
        "openssl s_client -connect {host}:{port} </dev/null | openssl x509 -noout -subject -dates -ext subjectAltName",
    ),
    "loading": Symptom(
        "Still loading the model (503 is right then)",
        "URL: /health says 503 Loading model, and its progress grows",
        "it has not been started long ago; large models and slow links take minutes",
        "llamado wait {url}",
    ),
    "stuck-loading": Symptom(
        "Loading stands still",
        "URL: /health says 503 Loading model, and its progress does not grow",
        "memory is exhausted and the machine swaps, a worker has frozen, or the disk does not deliver",
        "llamado doctor -m MODEL --rpc WORKERS   # does it fit, do all workers answer; llamado doctor LOGFILE",
    ),
    "failed-to-load": Symptom(
        "503 for ever: the model could not be loaded",
        "URL: /health says why",
        "the model's file, its size, or a worker; the message says which",
        "llamado doctor -m MODEL --rpc WORKERS   # then start the server again",
    ),
    "proxy-error": Symptom(
        "502, 503 or 504 without a reason",
        "URL: an error that is not a llama server's",
        "a proxy answers whose server is away, or which ends answers that take long",
        "llamado doctor http://BACKEND:8080   # the server itself; llamado deploy nginx has fitting time-outs",
    ),
    "worker-lost": Symptom(
        "503: a worker is away",
        "URL: /health names it",
        "its process or machine has ended, or the network between them",
        "llamado worker -p PORT   # on {worker}; --rpc-failover 30 lets the server do without it",
    ),
    "degraded": Symptom(
        "A worker is away, others have its layers",
        "URL: degraded in /health",
        "its process or machine has ended; answers go on, slower",
        "llamado worker -p PORT   # on {worker}: it gets its layers back",
    ),
    "no-slots": Symptom(
        "No slot is free",
        "URL: /slots, /health?fail_on_no_slot=1 and requests_deferred of /metrics",
        "more requests than slots; those behind them wait",
        "llamado serve -m MODEL -np {more}   # or more replicas behind one address",
    ),
    "wrong-key": Symptom(
        "401: a key is missing or wrong",
        "URL: GET /props with --api-key",
        "the server was started with --api-key, and this one is not among them",
        "llamado doctor {url} --api-key KEY",
    ),
    "no-key": Symptom(
        "Open to others without a key",
        "URL that others can reach: GET /props and /slots without a key",
        "--host 0.0.0.0 without --api-key: whoever gets through uses the machine and sees what others ask",
        "llamado serve -m MODEL --host 0.0.0.0 --api-key $(openssl rand -hex 16)",
    ),
    "bind-address": Symptom(
        "It listens on another address of this machine",
        "URL of this machine: 127.0.0.1 and ::1 as well",
        "the server listens on one address only (--host, 127.0.0.1 if none is given)",
        "llamado serve -m MODEL --host {listen} --port {port}   # or use {url}",
    ),
    "clock": Symptom(
        "Clocks differ",
        "URL: the Date of answers against this machine's time",
        "a clock is not synchronised: certificates, created and rate limits are then wrong",
        "sudo timedatectl set-ntp true   # on the machine whose clock is wrong",
    ),
    "builds-differ": Symptom(
        "Replicas are of different builds",
        "several URLs: build_info of /props",
        "one was updated and not the other: answers to the same seed may differ",
        "llamado --version   # on all of them: install the same one everywhere, then restart",
    ),
    "models-differ": Symptom(
        "Replicas serve different models",
        "several URLs: size, parameters and context of /v1/models",
        "one was started with another file or another -c",
        "llamado serve -m {model}   # the same file and flags everywhere",
    ),
    # --- workers
    "worker-refused": Symptom(
        "Connection refused by a worker",
        "--rpc: a TCP connection",
        "no worker runs there, or it listens on 127.0.0.1 only",
        "llamado worker -H 0.0.0.0 -p {port}   # on {host}; rpc-server -H 0.0.0.0 -p {port} alike",
    ),
    "worker-silent": Symptom(
        "A worker accepts connections and does not greet",
        "--rpc: HELLO",
        "llama.cpp's rpc-server serves one client at a time and has one already; or it is stopped",
        "ss -tnp | grep ':{port} '   # who is connected; llamado worker -p {port} serves many",
    ),
    "worker-version": Symptom(
        "Versions of RPC differ",
        "--rpc: the version in HELLO",
        "server and worker are of different llama.cpp builds",
        "rpc-server --version; llama-server --version   # use builds of the same RPC version (this one: {ours}); "
        "llamado worker --protocol 7   # where the worker is llamado's and the server an older llama.cpp",
    ),
    "not-a-worker": Symptom(
        "No worker, but something else answers",
        "--rpc: HELLO",
        "another program has the port, or it is the address of an HTTP server",
        "lsof -i :{port} -sTCP:LISTEN   # on {host}: which program it is",
    ),
    "worker-wants-tls": Symptom(
        "TLS on one side only: the worker has it",
        "--rpc: a TLS handshake, where plain HELLO fails",
        "the worker was started with --tls-cert",
        "llamado serve -m MODEL --rpc tls://{host}:{port} --rpc-ca CA.pem",
    ),
    "worker-no-tls": Symptom(
        "TLS on one side only: the worker does not have it",
        "--rpc tls://: plain HELLO, where the handshake fails",
        "the worker was started without --tls-cert; llama.cpp's never has TLS",
        "llamado worker -p {port} --tls-cert CERT.pem --tls-key KEY.pem   # or --rpc {host}:{port} without tls://",
    ),
    "worker-certificate": Symptom(
        "A worker's certificate is not trusted, or it refuses ours",
        "--rpc tls://: the handshake with --rpc-ca, --rpc-cert and --rpc-key",
        "the authority is not given, the name is not in the certificate, or the worker asks for ours (--tls-client-ca)",
        "llamado serve -m MODEL --rpc tls://{host}:{port} --rpc-ca CA.pem --rpc-cert CERT.pem --rpc-key KEY.pem",
    ),
    "worker-without-memory": Symptom(
        "A worker has no memory to lend",
        "--rpc: the free memory of its devices",
        "other clients have it all, its container has a small limit, or -m/--mem is small",
        "llamado worker -p PORT -m 8G   # with a larger limit, or end what uses the machine's memory",
    ),
    "slow-link": Symptom(
        "A slow link",
        "--rpc: round trip of a graph and MB/s, against the other workers",
        "Wi-Fi, a VPN, another site, or a saturated line: every token crosses it",
        "llamado plan -m MODEL --rpc {all}   # its share; ping -c 20 {host}",
    ),
    "slow-node": Symptom(
        "A slow node",
        "--rpc: how fast it reads weights, against the others",
        "fewer cores or memory channels, a container's limit, or other work on it",
        "llamado serve -m MODEL --rpc {all} -ts auto   # it gets fewer layers; on {host}: top",
    ),
    "same-worker": Symptom(
        "One worker under two names",
        "--rpc: the addresses behind the names",
        "its memory is counted twice, and layers are sent twice",
        "llamado serve -m MODEL --rpc {all}",
    ),
    # --- a model's file
    "no-file": Symptom(
        "The model's file is not there",
        "-m: the path",
        "the path is misspelled, or not mounted in the container",
        "ls -la {folder}   # or llamado pull MODEL",
    ),
    "not-readable": Symptom(
        "The model's file may not be read",
        "-m: opening it",
        "it belongs to another user, as files of Ollama's service do",
        "sudo chmod a+r {path}   # or sudo chown $USER {path}",
    ),
    "not-gguf": Symptom(
        "Not a GGUF file",
        "-m: its first bytes",
        "a page of an error or a Git LFS pointer was saved in its place, or it has another format",
        "curl -L -o {path} URL/resolve/main/FILE.gguf   # of a hub's page: /resolve/, not /blob/",
    ),
    "truncated": Symptom(
        "The file ends too early",
        "-m: the sizes its header promises",
        "the download was interrupted, or the disk was full",
        "rm {path}; curl -L -C - -o {path} URL   # or llamado pull MODEL",
    ),
    "missing-part": Symptom(
        "Parts of a split model are missing",
        "-m: the other parts beside the first",
        "only some of NAME-0000i-of-0000N.gguf were fetched, or a later one was given",
        "hf download USER/REPO --include '{pattern}' --local-dir {folder}",
    ),
    "damaged": Symptom(
        "The file's header is damaged",
        "-m: every field and range of its header",
        "a bad download or disk, or a program that writes GGUF wrongly",
        "sha256sum {path}   # compare with the hub's; fetch it again where it differs",
    ),
    "architecture": Symptom(
        "An architecture that is not known here",
        "-m: general.architecture",
        "the file is newer than this program, or Ollama gave the architecture a name of its own",
        "{instead}",
    ),
    "weight-type": Symptom(
        "A type of weights that has no kernel here",
        "-m: the types of its tensors",
        "a quantisation that this program does not compute",
        "llama-quantize --allow-requantize {path} OUT.gguf Q4_K_M   # or fetch a Q4_K_M of the model",
    ),
    "no-model": Symptom(
        "Not a language model",
        "-m: general.type and the architecture",
        "the file is an adapter or a projector (mmproj) of a model",
        "llamado serve -m MODEL {flag} {path}",
    ),
    "invalid-model": Symptom(
        "The file contradicts its architecture",
        "-m: hyper-parameters and weights",
        "it was converted by another version, or is not what its name says",
        "llamado inspect {path}",
    ),
    "too-large": Symptom(
        "The model is larger than memory",
        "-m: its size, context and cache against memory here and of --rpc",
        "weights, context and K/V cache need more than is free",
        "{fits}",
    ),
    "ollama-model": Symptom(
        "Ollama does not have this model",
        "-m ollama:NAME: its manifest",
        "it was never pulled, has another tag, or Ollama's folder is elsewhere ($OLLAMA_MODELS)",
        "ollama pull {name}   # ollama list shows what there is",
    ),
    "ollama-blob": Symptom(
        "Ollama's manifest points to a file that is missing",
        "-m ollama:NAME: the blob of its manifest",
        "the store was cleaned up or copied in part",
        "ollama pull {name}",
    ),
    # --- this machine
    "port-taken": Symptom(
        "The port is taken",
        "--port: listening there",
        "another program, or an earlier one of this, still runs",
        "kill {pid}   # {program}; or --port {free}",
    ),
    "port-forbidden": Symptom(
        "The port may not be used",
        "--port: listening there",
        "ports below 1024 are the administrator's",
        "llamado serve -m MODEL --port 8080   # with a proxy before it: llamado deploy nginx",
    ),
    "not-this-machine": Symptom(
        "The address is none of this machine's",
        "--host: listening there",
        "--host names where to listen: an address of this machine, or 0.0.0.0 for all",
        "ip -brief address   # then llamado serve --host 0.0.0.0 --api-key KEY",
    ),
    "container-memory": Symptom(
        "A container's limit is what is short",
        "limits of control groups against the machine's memory",
        "the container or unit may have less than the machine has",
        "docker run --memory {needed} …   # compose: deploy.resources.limits.memory; systemd: MemoryMax={needed}",
    ),
    "too-many-threads": Symptom(
        "More threads than processors",
        "-t against affinity, cores and the share of time of control groups",
        "threads that wait for each other: every step is as slow as the last of them",
        "llamado serve -m MODEL -t {cores}   # or leave -t out",
    ),
    "lock-limit": Symptom(
        "--mlock cannot lock the model",
        "--mlock: RLIMIT_MEMLOCK and the container's memory against the file",
        "the limit of locked memory is small",
        "ulimit -l unlimited   # systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1",
    ),
    "disk-full": Symptom(
        "The disk is full",
        "free space of the cache's folder",
        "models and a worker's cache fill it",
        "du -sh {folder}/*; rm {folder}/…   # or LLAMADO_CACHE=/other/disk",
    ),
    "cache-not-writable": Symptom(
        "The cache cannot be written",
        "the cache's folder: making a file there",
        "it belongs to another user, or is mounted read-only",
        "sudo chown -R $(id -u) {folder}   # or LLAMADO_CACHE=/writable/folder",
    ),
    "open-files": Symptom(
        "Few open files are allowed",
        "RLIMIT_NOFILE",
        "each connection is an open file",
        "ulimit -n 65536   # systemd: LimitNOFILE=65536",
    ),
    # --- logs alone
    "crash": Symptom(
        "The process crashed",
        "LOGFILE: segmentation fault, abort, GGML_ASSERT",
        "while loading it is often the fitting of memory; with mixed back ends flash attention",
        "llama-server … -fit off -fa off   # one after the other",
    ),
    "killed": Symptom(
        "The system ended the process for want of memory",
        "LOGFILE: Killed, oom-kill",
        "model, context and cache need more than the machine or container has",
        "llamado doctor -m MODEL   # what fits",
    ),
    "out-of-memory": Symptom(
        "Out of memory",
        "LOGFILE: a buffer that could not be had",
        "weights, K/V cache or batches are larger than the memory of a device",
        "llama-server … -c 4096 -ctk q8_0 -ctv q8_0   # or a smaller quantisation; llamado plan -m MODEL",
    ),
    "context-full": Symptom(
        "A prompt is longer than the context",
        "LOGFILE",
        "the context of a slot is -c divided by -np",
        "llamado serve -m MODEL -c N   # more, or fewer slots (-np)",
    ),
    "wrong-flag": Symptom(
        "A flag that is not known, or a bad value",
        "LOGFILE",
        "flags differ between versions",
        "llamado serve --help   # takes the older spellings, too",
    ),
    "no-template": Symptom(
        "The chat template cannot be used",
        "LOGFILE",
        "the model's template is none, or uses what is not known",
        "llamado serve -m MODEL --chat-template chatml",
    ),
    "device-same": Symptom(
        "Two workers share a device that cannot be shared",
        "LOGFILE: an operation that is not supported, in rpc-server",
        "rpc-server without -d takes all devices, BLAS among them",
        "rpc-server -d CPU -p {port}   # one device each",
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
        cells = [row.title, row.looked, row.cause, f"`{row.command}`"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
