"""The program `llamado`: its commands and their parsers. Each command imports its heavy packages when it runs."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from llamado import __version__
from llamado.errors import LlamadoError
from llamado.flags import (
    DRAFT_COMMANDS,
    FLAGS,
    SECRET_FLAGS,
    FlagError,
    FlagParser,
    ParsedFlags,
    add_flags,
    check_port,
    memory_size,
    parse,
)
from llamado.installation import PROGRAMS
from llamado.loglines import LineFormatter
from llamado.processes.secret_values import taken
from llamado.terminal.text import print

USAGE = """\
llamado: serve and run GGUF language models, on one machine or split across several

  llamado serve -m MODEL        HTTP server with a web UI and the APIs of llama-server, OpenAI, Anthropic and Ollama
  llamado serve -m A -m B       several models at one address (also --models-dir, --config)
  llamado wait URL              wait until a server is ready
  llamado run [MODEL]           chat in the terminal
  llamado pull MODEL            download a model
  llamado list                  list the models on this machine (show MODEL: details; rm MODEL: delete)
  llamado ps                    list the servers running on this machine
  llamado inspect MODEL         show the contents of a GGUF file, local or remote, and whether it is supported
  llamado gguf split|merge|set  split a GGUF file, merge its parts, or change a key
  llamado bench -m MODEL        measure prompt and generation speed
  llamado perplexity -m MODEL -f TEXT
                                score a text by llama-perplexity's method
  llamado quantize IN OUT TYPE  write a model with fewer bits per weight
  llamado imatrix -m MODEL -f TEXT
                                compute an importance matrix for quantize
  llamado worker                compute for a server on another machine (ggml RPC)
  llamado plan -m MODEL --rpc HOST:PORT,…
                                show the layer placement and the predicted time per token
  llamado doctor [URL|LOG …]    diagnose servers, workers (--rpc), a model (-m) or this machine, and show the fix
  llamado gateway --replica URL --replica URL
                                one address for several servers, llamado or llama-server
  llamado verify URL URL        check that servers give the same answers, byte by byte
  llamado top [URL]             watch a server's machines and slots, or a gateway's replicas
  llamado cluster init          create keys and certificates for TLS between machines
  llamado deploy TARGET [cluster.yaml] -- FLAGS
                                write files for compose, docker, kubernetes, helm, systemd, nginx, prometheus, grafana
  llamado up --nodes 3          run workers and a server on this machine (also ps, logs, drain, down)
  llamado tap                   proxy in front of a worker that shows or delays its traffic
  llamado completions bash|zsh|fish
                                print a script that completes commands, flags and models

MODEL: a GGUF path, a name (smollm2, gemma3), hf:user/repo[:quant], ollama:name[:tag]
llamado COMMAND --help lists the common flags of a command (--help-all: all of them); llamado --version the version.
"""


def _import_numpy() -> None:
    """Import numpy without threads for its matrix products, which models do not use: they cost a tenth of a second of
    processor time at the start, and memory for each core. Programs that this one starts do not inherit the setting.
    """
    name = "OPENBLAS_NUM_THREADS"
    is_given = name in os.environ
    os.environ.setdefault(name, "1")
    import numpy  # noqa: F401

    if not is_given:
        del os.environ[name]


def _serve(flags: ParsedFlags, _: argparse.Namespace) -> int:
    _import_numpy()
    from llamado.commands.serve import run_serve

    return run_serve(flags)


def _wait(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    for key in ("timeout", "interval"):
        if not 0 < flags.values[key] < math.inf:
            raise FlagError(f"--{key}: expected seconds, more than 0, got {flags.values[key]}")
    if namespace.url and flags.pid is not None:
        raise FlagError("a URL and --pid: give one of them")
    from llamado.commands.wait.wait import run_wait

    return run_wait(namespace.url, timeout=flags.timeout, interval=flags.interval, pid=flags.pid)


def _run(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    _import_numpy()
    from llamado.commands.chat.run import run_chat

    return run_chat(flags, namespace.spec)


def _bench(flags: ParsedFlags, _: argparse.Namespace) -> int:
    _import_numpy()
    if flags.latency or flags.nodes:
        from llamado.commands.bench.latency import bench_latency

        return bench_latency(flags)
    drafting = [flag.label for flag in FLAGS if flag.key in flags.given and flag.commands == DRAFT_COMMANDS]
    if drafting and flags.spec_type != "none":
        names = ", ".join(drafting)
        print(f"llamado: {names}: no effect without --latency; these tests evaluate given tokens", file=sys.stderr)
    if flags.roofline:
        from llamado.commands.bench.roofline import bench_roofline

        return bench_roofline(flags)
    if flags.n_parallel:
        from llamado.commands.bench.batches import bench_batches

        return bench_batches(flags)
    from llamado.commands.bench.speed import bench

    return bench(flags)


def _perplexity(flags: ParsedFlags, _: argparse.Namespace) -> int:
    from llamado.commands.bench.perplexity import perplexity

    return perplexity(flags)


def _quantize(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.quantize import run_quantize

    return run_quantize(flags, namespace.words)


def _imatrix(flags: ParsedFlags, _: argparse.Namespace) -> int:
    from llamado.commands.files.imatrix import run_imatrix

    return run_imatrix(flags)


def _pull(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.options import fit_options
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.engine.supported import fetch_model
    from llamado.gguf.sources.resolve import progress_bar, resolve_projector
    from llamado.terminal.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not namespace.spec and not namespace.hf_repo:
        raise FlagError("pull: no model given; try: llamado pull smollm2")
    source = ModelSource(spec=namespace.spec, hf_repo=namespace.hf_repo, hf_file=namespace.hf_file)
    options = EngineOptions(fit=fit_options(flags))
    with progress_bar(console, source.name) as progress:
        path = fetch_model(source, options, progress=progress, warn=console.print, say=console.print)
        if flags.mmproj_auto:
            projector = resolve_projector(
                source.spec, hf_repo=source.hf_repo, hf_file=source.hf_file, progress=progress
            )
            if projector is not None:
                console.print(f"projector for pictures and sounds: {projector}")
    print(path)
    return 0


def _inspect(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.engine.supported import check_supported, memory_estimate
    from llamado.gguf.inspect import render
    from llamado.gguf.sources.resolve import progress_bar
    from llamado.terminal.console import Console

    # In a pipe or file the table keeps its full width.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    source = ModelSource(spec=namespace.spec)
    with progress_bar(Console(stderr=True), source.name) as progress:
        header = source.header(progress=progress)
    render(header, console, tensors=not namespace.no_tensors)
    lines: list[str] = []
    try:
        check_supported(header)
        lines.append("Its architecture and weight types are supported.")
        lines += memory_estimate(header, EngineOptions())
    except LlamadoError as error:
        lines.append(str(error) if lines else f"This model is not supported. {error}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _list(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.models import run_list

    return run_list(namespace.models_dir, as_json=namespace.output == "json")


def _show(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.models import run_show

    return run_show(namespace.spec, template=namespace.template, as_json=namespace.output == "json")


def _rm(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.models import run_rm

    return run_rm(namespace.spec, yes=namespace.yes, force=namespace.force)


def _gguf(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.gguf import run_gguf

    return run_gguf(namespace)


def _plan(flags: ParsedFlags, _: argparse.Namespace) -> int:
    from llamado.commands.plan import plan

    return plan(flags)


def _list_devices(flags: ParsedFlags) -> int:
    from llamado.commands.plan import list_devices

    return list_devices(flags)


def _list_cache() -> int:
    from llamado.gguf.sources.resolve import cache_dir

    for path in sorted((cache_dir() / "models").glob("*.gguf")):
        print(f"{path}  {path.stat().st_size / 1e6:.0f} MB")
    return 0


def _worker(flags: ParsedFlags, _: argparse.Namespace) -> int:
    _import_numpy()
    if flags.threads is not None and flags.threads < 1:
        raise FlagError(f"-t/--threads: expected 1 or more, got {flags.threads}")
    if bool(flags.tls_cert) != bool(flags.tls_key):
        raise FlagError("--tls-cert and --tls-key: give both or none")
    if flags.tls_client_ca and not flags.tls_cert:
        raise FlagError("--tls-client-ca: verifying client certificates also requires --tls-cert and --tls-key")
    if flags.join and not flags.token:
        raise FlagError("--join: servers require a token; give --token with the value of their --cluster-token")
    if not 0 <= flags.share < math.inf:
        raise FlagError(f"--share: expected a number, 0 or more, got {flags.share}")
    mem = None if flags.mem is None else memory_size(flags.mem)
    devices = tuple(name for name in re.split("[,/]+", flags.device or "") if name)
    check_port("-p/--port", flags.port)
    _log_to_stderr(flags)

    from llamado.gguf.sources.resolve import cache_dir
    from llamado.rpc.worker.server import WorkerOptions, run_worker

    options = WorkerOptions(
        host=flags.host,
        port=flags.port,
        threads=flags.threads,
        devices=devices,
        cache=flags.cache,
        mem=mem,
        tls_cert=flags.tls_cert,
        tls_key=flags.tls_key,
        tls_client_ca=flags.tls_client_ca,
        allow=tuple(n.strip() for given in flags.allow or [] for n in given.split(",") if n.strip()),
        join=tuple(n.strip() for given in flags.join or [] for n in given.split(",") if n.strip()),
        token=flags.token or "",
        share=flags.share,
        announce=flags.announce,
        ring=not flags.no_ring,
        protocol=int(flags.protocol),
        clients=cache_dir() / "rpc-clients.json",
        own_files=not flags.no_own_files,
        models=_existing_folders("--models-dir", flags.models_dir or []),
    )
    return run_worker(options)


def _existing_folders(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    """Split lists of folders. Raises FlagError if a folder does not exist."""
    folders = [os.path.expanduser(folder) for text in given for folder in text.split(",") if folder]
    for folder in folders:
        if not os.path.isdir(folder):
            raise FlagError(f"{flag} {folder}: no such folder")
    return tuple(folders)


def _log_to_stderr(flags: ParsedFlags) -> None:
    level = logging.DEBUG if flags.verbose else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(verbose=flags.verbose, timed=flags.log_timestamps))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(max(level, logging.WARNING))  # at INFO it logs every request


def _tap(flags: ParsedFlags, _: argparse.Namespace) -> int:
    check_port("--listen-port", flags.listen_port)
    check_port("--target-port", flags.target_port)
    for key in ("latency_ms", "jitter_ms"):
        if not 0 <= flags.values[key] < 1e7:
            raise FlagError(f"--{key.replace('_', '-')}: expected 0 or more, got {flags.values[key]}")
    _log_to_stderr(flags)

    from llamado.rpc.tap.proxy import TapOptions, parse_bandwidth, run_tap

    options = TapOptions(
        listen_host=flags.listen_host,
        listen_port=flags.listen_port,
        target_host=flags.target_host,
        target_port=flags.target_port,
        latency_ms=flags.latency_ms,
        jitter_ms=flags.jitter_ms,
        bandwidth=None if flags.bandwidth is None else parse_bandwidth(flags.bandwidth),
        all=flags.all,
        trace=flags.trace,
    )
    return run_tap(options)


def _doctor(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.doctor import run_doctor

    return run_doctor(flags, namespace.targets)


def _gateway(flags: ParsedFlags, _: argparse.Namespace) -> int:
    from llamado.commands.gateway.gateway import run_gateway

    return run_gateway(flags)


def _verify(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.verify import run_verify

    return run_verify(flags, namespace.urls)


def _top(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.top.top import top

    return top(flags, namespace.url)


def _cluster(flags: ParsedFlags, _: argparse.Namespace) -> int:
    from llamado.commands.cluster import init

    return init(flags)


def _deploy(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.deploy.run import run_deploy

    return run_deploy(flags, namespace.target, namespace.file, namespace.server_flags)


def _up(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.start import run_up

    return run_up(flags, namespace)


def _ps(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.running import run_ps

    return run_ps(clusters_json=namespace.json, as_json=namespace.output == "json", key=namespace.api_key)


def _down(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.running import run_down

    return run_down(namespace.cluster)


def _logs(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.running import run_logs

    return run_logs(namespace.service, namespace.cluster, follow=namespace.follow)


def _drain(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    if namespace.gateway:
        from llamado.commands.gateway.replicas import drain_replica

        return drain_replica(namespace.gateway, namespace.service, flags.admin_key, undo=namespace.undo)
    from llamado.commands.up.running import run_drain

    return run_drain(namespace.service, namespace.cluster, undo=namespace.undo)


def _completions(_: ParsedFlags, namespace: argparse.Namespace) -> int:
    return _print_completions(namespace.shell)


def _print_completions(shell: str) -> int:
    if shell == "models":
        from llamado.gguf.sources.stored import stored_models

        print("\n".join(model.argument for model in stored_models() if model.is_complete))
        return 0
    from llamado.commands.completions import command_of, script

    print(script(shell, [command_of(name, help, make_parser(name)) for name, (_, help) in COMMANDS.items()]), end="")
    return 0


COMMANDS: dict[str, tuple[Callable[[ParsedFlags, argparse.Namespace], int], str]] = {
    "serve": (_serve, "HTTP server with a web UI and the APIs of llama-server, OpenAI, Anthropic and Ollama"),
    "wait": (_wait, "wait until a server is ready"),
    "run": (_run, "chat in the terminal"),
    "pull": (_pull, "download a model and print its path"),
    "list": (_list, "list the models on this machine with size, type and last use"),
    "show": (_show, "show architecture, size, context, license and chat template of a model"),
    "rm": (_rm, "delete all files of a downloaded model, after asking"),
    "inspect": (_inspect, "show metadata and tensors of a GGUF file"),
    "gguf": (_gguf, "split a GGUF file, merge its parts, or set a key"),
    "bench": (_bench, "measure prompt and generation speed"),
    "perplexity": (_perplexity, "score a text by llama-perplexity's method"),
    "quantize": (_quantize, "write a model with fewer bits per weight, with llama-quantize's flags, types and output"),
    "imatrix": (_imatrix, "compute an importance matrix from a text, in llama-imatrix's format"),
    "worker": (_worker, "compute for a server on another machine, with rpc-server's flags and protocol"),
    "plan": (_plan, "show the layer placement and the predicted time per token"),
    "doctor": (_doctor, "diagnose servers, workers, models, logs and this machine, and show the commands that help"),
    "gateway": (_gateway, "one address for several servers: balances load, reuses caches, survives lost servers"),
    "verify": (_verify, "check that servers give the same answers to the same prompts and seeds, byte by byte"),
    "top": (_top, "watch a server's machines: layers, memory, links, and the parts of a token's time"),
    "cluster": (_cluster, "init: create keys and certificates for TLS between a server and its workers"),
    "deploy": (_deploy, "write files that run servers, workers and a gateway, from flags or a cluster.yaml"),
    "tap": (_tap, "proxy in front of a worker that delays, limits and decodes its traffic"),
    "up": (_up, "run workers, taps and a server on this machine, and restart those that crash"),
    "ps": (_ps, "list the servers of this machine and the services of llamado up"),
    "down": (_down, "stop a cluster of llamado up"),
    "logs": (_logs, "print the logs of a cluster of llamado up"),
    "drain": (_drain, "stop a service of llamado up, or a replica of a gateway, after its requests; --undo: resume"),
    "completions": (_completions, "print a script with which bash, zsh or fish complete commands, flags and models"),
}


def make_parser(command: str) -> FlagParser:
    """Return the parser of a command."""
    parser = FlagParser(prog=f"llamado {command}", description=COMMANDS[command][1], allow_abbrev=False)
    parser.add_argument("--usage", action="help", help=argparse.SUPPRESS)
    if command == "serve":
        parser.add_argument("--version", action="version", version=f"llamado {__version__}", help="print the version")
        parser.add_argument("--completion-bash", action="store_true", help="print a completion script for bash")
    if command == "run":
        parser.add_argument("spec", nargs="?", metavar="MODEL", help="model, instead of -m (default: smollm2)")
    elif command == "quantize":
        from llamado.commands.files.quantize import types_table

        about = "input model, output file, one of the types below, and number of threads"
        parser.add_argument("words", nargs="*", metavar="IN.gguf [OUT.gguf] TYPE [THREADS]", help=about)
        parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, types_table()
        parser.usage = "llamado quantize [flags] IN.gguf [OUT.gguf] TYPE [THREADS]"
    elif command == "wait":
        about = (
            "http://host:port of a server or tcp://host:port of a worker (default: the server, gateway or worker of "
            "this container)"
        )
        parser.add_argument("url", metavar="URL", nargs="?", help=about)
    elif command == "doctor":
        about = "http://host:port of servers, tcp://host:port of workers, log files, models (default: this machine)"
        parser.add_argument("targets", nargs="*", metavar="URL|LOG|MODEL", help=about)
    elif command == "verify":
        parser.add_argument("urls", nargs="+", metavar="URL", help="http://host:port of each server")
    elif command == "top":
        about = "http://host:port of a server (default: http://127.0.0.1:8080)"
        parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8080", help=about)
    elif command == "cluster":
        parser.add_argument("action", choices=["init"], help="init: create the files")
    elif command == "completions":
        about = "shell of the script; models: print the names of the models on this machine, one per line"
        parser.add_argument("shell", choices=["bash", "zsh", "fish", "models"], metavar="bash|zsh|fish", help=about)
    elif command == "deploy":
        from llamado.cluster.deploy.targets import TARGETS

        parser.add_argument("target", choices=sorted(TARGETS), metavar="TARGET", help=", ".join(sorted(TARGETS)))
        parser.add_argument(
            "file", nargs="?", metavar="cluster.yaml", help="services to deploy, in the format of llamado up"
        )
        parser.usage = "llamado deploy TARGET [cluster.yaml] [flags] [-- server flags]"
    elif command == "pull":
        parser.add_argument("spec", nargs="?", metavar="MODEL", help="smollm2, gemma3, hf:user/repo[:quant], …")
        parser.add_argument(
            "-hf", "-hfr", "--hf-repo", metavar="REPO", help="model from Hugging Face: user/repo[:quant]"
        )
        parser.add_argument("-hff", "--hf-file", metavar="FILE", help="file inside --hf-repo")
    elif command == "inspect":
        parser.add_argument("spec", metavar="MODEL", help="a GGUF path, a URL, or a name as for -m")
        parser.add_argument("--no-tensors", action="store_true", help="omit the table of tensors")
    elif command == "list":
        parser.add_argument("--models-dir", metavar="DIR", help="also list the models in this folder")
    elif command in ("show", "rm"):
        parser.add_argument("spec", metavar="MODEL", help="name in llamado list" + ", or a path" * (command == "show"))
        if command == "show":
            parser.add_argument("--template", action="store_true", help="print the chat template only")
        else:
            parser.add_argument("-y", "--yes", action="store_true", help="delete without asking")
            parser.add_argument("--force", action="store_true", help="delete even if a process has the file open")
    elif command == "gguf":
        from llamado.commands.files.gguf import add_arguments

        add_arguments(parser)
    elif command == "up":
        parser.add_argument(
            "file", nargs="?", metavar="cluster.yaml", help="services to start (docs/cluster.schema.json)"
        )
        parser.usage = "llamado up [cluster.yaml] [flags] [-- server flags]"
    elif command == "ps":
        parser.add_argument("--json", action="store_true", help="print the clusters only, as JSON")
        parser.add_argument("--api-key", metavar="KEY", help="API key of the servers, to show their tokens/s")
    elif command == "down":
        parser.add_argument(
            "cluster", nargs="?", metavar="NAME", help="name of the cluster, if several run (--name of llamado up)"
        )
    elif command in ("logs", "drain"):
        parser.add_argument("--cluster", metavar="NAME", help="name of the cluster, if several run")
        many = {"nargs": "?"} if command == "logs" else {}
        parser.add_argument("service", metavar="SERVICE", help="name in llamado ps", **many)  # type: ignore[arg-type]
        if command == "drain":
            parser.add_argument("--undo", action="store_true", help="start a drained server again")
            parser.add_argument("--gateway", metavar="URL", help="SERVICE is the name or URL of a replica of this "
                                "gateway: it keeps running, but gets no new requests")  # fmt: skip
        if command == "logs":
            parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    if command in ("list", "show", "ps"):
        parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="output format")
    add_flags(parser, command)
    if parser.usage is None:
        # argparse's own usage would list all flags.
        positionals = [_positional(action) for action in parser._actions if not action.option_strings]
        parser.usage = " ".join([f"llamado {command}", *positionals, "[flags]"])
    return parser


def _positional(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else "|".join(action.choices or (action.dest.upper(),))
    optional, repeated = action.nargs in ("?", "*"), action.nargs in ("+", "*")
    text = f"{name} …" if repeated else name
    return f"[{text}]" if optional else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 success, 1 failure, 2 wrong flags, 130 interrupted."""
    with taken(sys.argv if arguments is None else (), SECRET_FLAGS) as environ:
        return _main(list(_command_line(sys.argv) if arguments is None else arguments), environ)


def _main(given: list[str], environ: Mapping[str, str]) -> int:
    command = PROGRAMS.get(given[0], given[0]) if given else ""
    if command in ("", "-h", "--help", "--help-all", "help"):
        print(USAGE, end="")
        return 0 if given else 2
    if command in ("-V", "--version", "version"):
        print(f"llamado {__version__}")
        return 0
    try:
        if command not in COMMANDS:
            raise _unknown_command(command)
        own, server_flags = split_server_flags(given[1:]) if command in ("deploy", "up") else (given[1:], [])
        flags, namespace = parse(make_parser(command), command, own, environ)
        if getattr(namespace, "completion_bash", False):
            return _print_completions("bash")
        if flags.values.get("list_devices"):
            return _list_devices(flags)
        if flags.values.get("cache_list"):
            return _list_cache()
        for warning in flags.warnings if command != "serve" else ():  # a server logs them
            print(f"llamado: {warning}", file=sys.stderr)
        namespace.given, namespace.server_flags = own, server_flags
        return COMMANDS[command][0](flags, namespace)
    except FlagError as error:
        print(f"llamado: {error}", file=sys.stderr)
        return 2
    except LlamadoError as error:
        print(f"llamado: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output has ended (`| head`). Flushing at exit would fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # a bug in llamado: -v shows the traceback
        if _was_interrupted(error):
            print(file=sys.stderr)
            return 128 + signal.SIGINT
        if "-v" in given or "--verbose" in given:
            raise
        if isinstance(error, OSError) and error.strerror:  # disk full, folder not writable
            where = f"{error.filename}: " if error.filename else ""
            print(f"llamado: {where}{error.strerror} (-v shows where)", file=sys.stderr)
            return 1
        print(f"llamado: unexpected {type(error).__name__}: {error} (-v shows where)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _was_interrupted(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused an error: Python wraps a KeyboardInterrupt during an import into others."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _command_line(argv: Sequence[str]) -> Sequence[str]:
    """Return the arguments. If the program was started under a name of llama.cpp's, that name comes first."""
    name = os.path.basename(argv[0])
    return [name, *argv[1:]] if name in PROGRAMS else argv[1:]


def split_server_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `deploy` and `up` at `--` into their own and those of the server."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _unknown_command(command: str) -> FlagError:
    import difflib

    if command.strip() in ("", "\\") or command.lstrip().startswith("#"):
        return FlagError("no command: a \\ continues a line only as its last character")
    if command.startswith("-"):
        return FlagError(f"no command: try llamado serve {command} …, or one of {', '.join(COMMANDS)}")
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
    return FlagError(f"unknown command {command!r}: {hint}")
