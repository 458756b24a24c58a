"""The command `llamado`: sub-commands and their flags, nothing else. Heavy rooms are imported by the one that runs."""

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
    Parsed,
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
llamado: serve and run GGUF language models, on one machine or on many

  llamado serve -m MODEL        a page in the browser, and llama-server's, OpenAI's and other APIs
  llamado serve -m A -m B       several models behind one address (also --models-dir, --config)
  llamado wait URL              wait until a server answers requests
  llamado run [MODEL]           chat in the terminal
  llamado pull MODEL            fetch a model
  llamado list                  the models that are here (show MODEL: what one is; rm MODEL: delete it)
  llamado ps                    the servers that run on this machine
  llamado inspect MODEL         what is in a GGUF file, here or on a server, and whether it runs
  llamado gguf split|merge|set  a GGUF file in parts, parts in one file, another value of a key
  llamado bench -m MODEL        speed of prompts and of generation
  llamado perplexity -m MODEL -f TEXT
  llamado quantize IN OUT TYPE  a smaller file of a model: fewer bits a weight
  llamado imatrix -m MODEL -f TEXT
                                which columns of its weights matter, for quantize
  llamado worker                lend this machine to a server elsewhere (ggml RPC)
  llamado plan -m MODEL --rpc HOST:PORT,…
                                which layers would go to which machine
  llamado doctor [URL|LOG …]    what ails a server, workers (--rpc), a model (-m) or this machine, and what mends it
  llamado gateway --replica URL --replica URL
                                one address before many servers, ours or llama.cpp's
  llamado verify URL URL        whether servers give the same answers, byte by byte
  llamado top [URL]             the machines of a server while they work
  llamado cluster init          keys and certificates for TLS between machines
  llamado deploy TARGET [cluster.yaml] -- FLAGS
                                files for compose, docker, kubernetes, helm, systemd, nginx, prometheus, grafana
  llamado up --nodes 3          workers and a server on this machine, watched (also ps, logs, drain, down)
  llamado tap                   a proxy before a worker that delays and shows its traffic
  llamado completions bash|zsh|fish
                                a script with which the shell completes commands, flags and models

MODEL: a GGUF path, a name (smollm2, gemma3), hf:user/repo[:quant], ollama:name[:tag]
llamado COMMAND --help shows a command's flags (--help-all: also rare ones); llamado --version the version.
"""


def _serve(flags: Parsed, _: argparse.Namespace) -> int:
    from llamado.commands.serve import run_serve

    return run_serve(flags)


def _wait(flags: Parsed, namespace: argparse.Namespace) -> int:
    for key in ("timeout", "interval"):
        if not 0 < flags.values[key] < math.inf:
            raise FlagError(f"--{key}: expected seconds, more than 0, got {flags.values[key]}")

    if namespace.url and flags.pid is not None:
        raise FlagError("a URL and --pid: give one of them")

    from llamado.commands.wait.wait import run_wait

    return run_wait(namespace.url, timeout=flags.timeout, interval=flags.interval, pid=flags.pid)


def _run(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.chat.run import run_chat

    return run_chat(flags, namespace.spec)


def _bench(flags: Parsed, _: argparse.Namespace) -> int:
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


def _perplexity(flags: Parsed, _: argparse.Namespace) -> int:
    from llamado.commands.bench.perplexity import perplexity

    return perplexity(flags)


def _quantize(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.quantize import run_quantize

    return run_quantize(flags, namespace.words)


def _imatrix(flags: Parsed, _: argparse.Namespace) -> int:
    from llamado.commands.files.imatrix import run_imatrix

    return run_imatrix(flags)


def _pull(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.options import fit_options
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.engine.supported import fetch_model
    from llamado.gguf.sources.resolve import progress_bar
    from llamado.terminal.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not namespace.spec and not namespace.hf_repo:
        raise FlagError("pull: which model? Try: llamado pull smollm2")
    source = ModelSource(spec=namespace.spec, hf_repo=namespace.hf_repo, hf_file=namespace.hf_file)
    options = EngineOptions(fit=fit_options(flags))
    with progress_bar(console, source.name) as progress:
        path = fetch_model(source, options, progress=progress, warn=console.print, say=console.print)
    print(path)
    return 0


def _inspect(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.engine.supported import check_supported, what_it_takes
    from llamado.gguf.inspect import render
    from llamado.gguf.sources.resolve import progress_bar
    from llamado.terminal.console import Console

    # A table that goes into a pipe or a file keeps its full width.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    source = ModelSource(spec=namespace.spec)
    with progress_bar(Console(stderr=True), source.name) as progress:
        header = source.header(progress=progress)
    render(header, console, tensors=not namespace.no_tensors)
    lines: list[str] = []
    try:
        check_supported(header)
        lines.append("Its architecture and its types of weights run here.")
        lines += what_it_takes(header, EngineOptions())
    except LlamadoError as error:
        lines.append(str(error) if lines else f"This model does not run here. {error}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _list(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.models import run_list

    return run_list(namespace.models_dir, as_json=namespace.output == "json")


def _show(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.models import run_show

    return run_show(namespace.spec, template=namespace.template, as_json=namespace.output == "json")


def _rm(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.models import run_rm

    return run_rm(namespace.spec, yes=namespace.yes, force=namespace.force)


def _gguf(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.files.gguf import run_gguf

    return run_gguf(namespace)


def _plan(flags: Parsed, _: argparse.Namespace) -> int:
    from llamado.commands.plan import plan

    return plan(flags)


def _list_devices(flags: Parsed) -> int:
    from llamado.commands.plan import list_devices

    return list_devices(flags)


def _list_cache() -> int:
    from llamado.gguf.sources.resolve import cache_dir

    for path in sorted((cache_dir() / "models").glob("*.gguf")):
        print(f"{path}  {path.stat().st_size / 1e6:.0f} MB")
    return 0


def _worker(flags: Parsed, _: argparse.Namespace) -> int:
    if flags.threads is not None and flags.threads < 1:
        raise FlagError(f"-t/--threads: expected 1 or more, got {flags.threads}")
    if bool(flags.tls_cert) != bool(flags.tls_key):
        raise FlagError("--tls-cert and --tls-key: give both or none")
    if flags.tls_client_ca and not flags.tls_cert:
        raise FlagError("--tls-client-ca: it checks clients' certificates, so --tls-cert and --tls-key are needed, too")
    if flags.join and not flags.token:
        raise FlagError("--join: the servers want a token; give --token with what they have as --cluster-token")
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
        models=_folders("--models-dir", flags.models_dir or []),
    )
    return run_worker(options)


def _folders(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    """Folders that have to be there."""
    folders = [os.path.expanduser(one) for many in given for one in many.split(",") if one]
    for folder in folders:
        if not os.path.isdir(folder):
            raise FlagError(f"{flag} {folder}: there is no such folder")
    return tuple(folders)


def _log_to_stderr(flags: Parsed) -> None:
    level = logging.DEBUG if flags.verbose else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(verbose=flags.verbose, timed=flags.log_timestamps))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(max(level, logging.WARNING))  # each of its requests would be a line


def _tap(flags: Parsed, _: argparse.Namespace) -> int:
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


def _doctor(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.doctor import run_doctor

    return run_doctor(flags, namespace.targets)


def _gateway(flags: Parsed, _: argparse.Namespace) -> int:
    from llamado.commands.gateway.gateway import run_gateway

    return run_gateway(flags)


def _verify(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.verify import run_verify

    return run_verify(flags, namespace.urls)


def _top(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.top.top import top

    return top(flags, namespace.url)


def _cluster(flags: Parsed, _: argparse.Namespace) -> int:
    from llamado.commands.cluster import init

    return init(flags)


def _deploy(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.deploy.run import run_deploy

    return run_deploy(flags, namespace.target, namespace.file, namespace.behind)


def _up(flags: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.start import run_up

    return run_up(flags, namespace)


def _ps(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.running import run_ps

    return run_ps(clusters_json=namespace.json, as_json=namespace.output == "json", key=namespace.api_key)


def _down(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.running import run_down

    return run_down(namespace.cluster)


def _logs(_: Parsed, namespace: argparse.Namespace) -> int:
    from llamado.commands.up.running import run_logs

    return run_logs(namespace.service, namespace.cluster, follow=namespace.follow)


def _drain(flags: Parsed, namespace: argparse.Namespace) -> int:
    if namespace.gateway:
        from llamado.commands.gateway.replicas import drain_replica

        return drain_replica(namespace.gateway, namespace.service, flags.admin_key, undo=namespace.undo)
    from llamado.commands.up.running import run_drain

    return run_drain(namespace.service, namespace.cluster, undo=namespace.undo)


def _completions(_: Parsed, namespace: argparse.Namespace) -> int:
    return _print_completions(namespace.shell)


def _print_completions(shell: str) -> int:
    if shell == "models":
        from llamado.gguf.sources.stored import stored_models

        print("\n".join(model.argument for model in stored_models() if model.is_complete))
        return 0
    from llamado.commands.completions import completed, script

    print(script(shell, [completed(name, help, _parser(name)) for name, (_, help) in COMMANDS.items()]), end="")
    return 0


COMMANDS: dict[str, tuple[Callable[[Parsed, argparse.Namespace], int], str]] = {
    "serve": (_serve, "a page in the browser, and llama-server's, OpenAI's, Anthropic's and Ollama's API"),
    "wait": (_wait, "wait until a server answers requests"),
    "run": (_run, "chat in the terminal"),
    "pull": (_pull, "fetch a model and print its path"),
    "list": (_list, "the models that are on this machine: size, type, when they were used"),
    "show": (_show, "what a model is: architecture, size, context, license, template"),
    "rm": (_rm, "delete a model that was fetched, all of its files; asks first"),
    "inspect": (_inspect, "show a GGUF file's metadata and tensors"),
    "gguf": (_gguf, "split: a GGUF file in parts; merge: parts in one file; set: another value of a key"),
    "bench": (_bench, "measure prompt and generation speed"),
    "perplexity": (_perplexity, "score a text with the method of llama-perplexity"),
    "quantize": (_quantize, "write a model with fewer bits a weight: llama-quantize's flags, types and files"),
    "imatrix": (_imatrix, "what goes through a model's weights while it reads a text: llama-imatrix's files"),
    "worker": (_worker, "lend this machine's devices to a server elsewhere: rpc-server's flags and protocol"),
    "plan": (_plan, "which layers would go to which device, and how long a token would take"),
    "doctor": (_doctor, "what ails servers, workers, models, logs and this machine, and the command that mends it"),
    "gateway": (_gateway, "one address before many servers: least loaded, caches kept, no request lost with a server"),
    "verify": (_verify, "whether servers give the same answers to the same prompts and seeds, byte by byte"),
    "top": (_top, "the machines of a server while they work: layers, memory, links, where a token's time goes"),
    "cluster": (_cluster, "init: make keys and certificates for TLS between a server and its workers"),
    "deploy": (_deploy, "files with which others run servers, workers and a gateway: from flags, or a cluster.yaml"),
    "tap": (_tap, "a proxy before a worker that delays, limits and decodes its traffic"),
    "up": (_up, "start workers, taps and a server on this machine, and keep them running"),
    "ps": (_ps, "the servers of this machine, and what llamado up runs"),
    "down": (_down, "end what llamado up runs"),
    "logs": (_logs, "print the logs of what llamado up runs"),
    "drain": (_drain, "have a service of llamado up, or a gateway's replica, finish what it is doing; --undo: go on"),
    "completions": (_completions, "a script with which bash, zsh or fish complete commands, flags and models"),
}


def _parser(command: str) -> FlagParser:
    parser = FlagParser(prog=f"llamado {command}", description=COMMANDS[command][1], allow_abbrev=False)
    parser.add_argument("--usage", action="help", help=argparse.SUPPRESS)
    if command == "serve":
        parser.add_argument("--version", action="version", version=f"llamado {__version__}", help="print the version")
        parser.add_argument("--completion-bash", action="store_true", help="print a completion script for bash")
    if command == "run":
        parser.add_argument("spec", nargs="?", metavar="MODEL", help="instead of -m (default: smollm2)")
    elif command == "quantize":
        from llamado.commands.files.quantize import types_table

        about = "a model, where to write it, one of the types below, and how many threads"
        parser.add_argument("words", nargs="*", metavar="IN.gguf [OUT.gguf] TYPE [THREADS]", help=about)
        parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, types_table()
        parser.usage = "llamado quantize [flags] IN.gguf [OUT.gguf] TYPE [THREADS]"
    elif command == "wait":
        about = (
            "http://host:port of a server, or tcp://host:port of a worker (default: the server, gateway or worker that "
            "runs in this container)"
        )
        parser.add_argument("url", metavar="URL", nargs="?", help=about)
    elif command == "doctor":
        about = "http://host:port of servers, tcp://host:port of workers, logs, models (default: this machine)"
        parser.add_argument("targets", nargs="*", metavar="URL|LOG|MODEL", help=about)
    elif command == "verify":
        parser.add_argument("urls", nargs="+", metavar="URL", help="http://host:port of each server")
    elif command == "top":
        about = "http://host:port of a server (default: http://127.0.0.1:8080)"
        parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8080", help=about)
    elif command == "cluster":
        parser.add_argument("action", choices=["init"], help="what to do")
    elif command == "completions":
        about = "print its script; models: the names of those that are here, one a line"
        parser.add_argument("shell", choices=["bash", "zsh", "fish", "models"], metavar="bash|zsh|fish", help=about)
    elif command == "deploy":
        from llamado.cluster.deploy.targets import TARGETS

        parser.add_argument("target", choices=sorted(TARGETS), metavar="TARGET", help=", ".join(sorted(TARGETS)))
        parser.add_argument("file", nargs="?", metavar="cluster.yaml", help="what is deployed, as llamado up reads it")
        parser.usage = "llamado deploy TARGET [cluster.yaml] [flags] [-- flags of the server]"
    elif command == "pull":
        parser.add_argument("spec", nargs="?", metavar="MODEL", help="smollm2, gemma3, hf:user/repo[:quant], …")
        parser.add_argument("-hf", "-hfr", "--hf-repo", metavar="REPO", help="user/repo[:quant] of Hugging Face")
        parser.add_argument("-hff", "--hf-file", metavar="FILE", help="file inside --hf-repo")
    elif command == "inspect":
        parser.add_argument("spec", metavar="MODEL", help="a GGUF path, a URL, or a name as -m takes it")
        parser.add_argument("--no-tensors", action="store_true", help="leave out the table of tensors")
    elif command == "list":
        parser.add_argument("--models-dir", metavar="DIR", help="the models of this folder, too")
    elif command in ("show", "rm"):
        parser.add_argument(
            "spec", metavar="MODEL", help="as llamado list names it" + ", or a path" * (command == "show")
        )
        if command == "show":
            parser.add_argument("--template", action="store_true", help="print the chat template alone")
        else:
            parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
            parser.add_argument("--force", action="store_true", help="delete it though a process has it open")
    elif command == "gguf":
        from llamado.commands.files.gguf import add_arguments

        add_arguments(parser)
    elif command == "up":
        parser.add_argument("file", nargs="?", metavar="cluster.yaml", help="what to start (docs/cluster.schema.json)")
        parser.usage = "llamado up [cluster.yaml] [flags] [-- flags of the server]"
    elif command == "ps":
        parser.add_argument("--json", action="store_true", help="the clusters alone, for programs")
        parser.add_argument("--api-key", metavar="KEY", help="of servers that have one, to see their tokens/s")
    elif command == "down":
        parser.add_argument(
            "cluster", nargs="?", metavar="NAME", help="the cluster's, where several run (--name of llamado up)"
        )
    elif command in ("logs", "drain"):
        parser.add_argument("--cluster", metavar="NAME", help="of which cluster, where several run")
        many = {"nargs": "?"} if command == "logs" else {}
        parser.add_argument("service", metavar="SERVICE", help="as llamado ps names it", **many)  # type: ignore[arg-type]
        if command == "drain":
            parser.add_argument("--undo", action="store_true", help="a drained server starts, and gets requests, again")
            parser.add_argument("--gateway", metavar="URL", help="SERVICE is a replica of this gateway, by its name or "
                                "URL: it gets no new requests, and goes on running")  # fmt: skip
        if command == "logs":
            parser.add_argument("-f", "--follow", action="store_true", help="go on with what is added")
    if command in ("list", "show", "ps"):
        parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="json: for programs")
    add_flags(parser, command)
    if parser.usage is None:
        # argparse would list all flags here and below.
        places = [_place(action) for action in parser._actions if not action.option_strings]
        parser.usage = " ".join([f"llamado {command}", *places, "[flags]"])
    return parser


def _place(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else "|".join(action.choices or (action.dest.upper(),))
    few, many = action.nargs in ("?", "*"), action.nargs in ("+", "*")
    return f"[{name}{' …' if many else ''}]" if few else f"{name}{' …' if many else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 wrong flags, 130 interrupted."""
    with taken(sys.argv if arguments is None else (), SECRET_FLAGS) as environ:
        return _main(list(_words(sys.argv) if arguments is None else arguments), environ)


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
        own, behind = _divided(given[1:]) if command in ("deploy", "up") else (given[1:], [])
        flags, namespace = parse(_parser(command), command, own, environ)
        if getattr(namespace, "completion_bash", False):
            return _print_completions("bash")
        if flags.values.get("list_devices"):
            return _list_devices(flags)
        if flags.values.get("cache_list"):
            return _list_cache()
        for note in flags.warnings if command != "serve" else ():  # a server says it in its log
            print(f"llamado: {note}", file=sys.stderr)
        namespace.given, namespace.behind = own, behind
        return COMMANDS[command][0](flags, namespace)
    except FlagError as error:
        print(f"llamado: {error}", file=sys.stderr)
        return 2
    except LlamadoError as error:
        print(f"llamado: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output went away (`| head`); nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # a fault of this program: the reason for everybody, the traceback for who asks
        if _was_interrupted(error):
            print(file=sys.stderr)
            return 128 + signal.SIGINT
        if "-v" in given or "--verbose" in given:
            raise
        if isinstance(error, OSError) and error.strerror:  # a disk that is full, a folder that may not be written
            where = f"{error.filename}: " if error.filename else ""
            print(f"llamado: {where}{error.strerror} (-v shows where)", file=sys.stderr)
            return 1
        print(f"llamado: unexpected {type(error).__name__}: {error} (-v shows where)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether an error came of Ctrl-C: in the middle of an import Python wraps it into others."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _words(argv: Sequence[str]) -> Sequence[str]:
    """What stands behind `llamado`; called by one of llama.cpp's names, that name stands first."""
    name = os.path.basename(argv[0])
    return [name, *argv[1:]] if name in PROGRAMS else argv[1:]


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and what behind it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _unknown_command(command: str) -> FlagError:
    import difflib

    if command.strip() in ("", "\\") or command.lstrip().startswith("#"):
        return FlagError("no command: a \\ joins two lines only as the last character of the first")
    if command.startswith("-"):
        return FlagError(f"which command? llamado serve {command} …, or one of {', '.join(COMMANDS)}")
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return FlagError(f"unknown command {command!r}: {hint}")
