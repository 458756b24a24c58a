"""Commands run as a user runs them, with stand-ins for all that would compute, connect, listen or wait.

What the stand-ins are given is written down under "place.field": there a flag has arrived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# What is patched, and what takes it from there, is imported before that: it would keep a stand-in for ever.
import llamado.cluster.deploy.targets
import llamado.commands.bench.latency
import llamado.commands.bench.perplexity
import llamado.commands.bench.speed
import llamado.commands.files.imatrix
import llamado.commands.files.quantize
import llamado.commands.gateway.gateway
import llamado.commands.plan
import llamado.commands.up.start
import llamado.commands.verify
import llamado.commands.wait.wait
import llamado.devices.split.measure
import llamado.engine.forward.device_pool
import llamado.engine.forward.runner
import llamado.gguf.sources.resolve
import llamado.models
import llamado.router.catalog
import llamado.rpc.tap.proxy
import llamado.rpc.worker.server
import llamado.text.grammar.compiler
from llamado.cluster.doctor.examination import Examination
from llamado.commands import cli, options
from llamado.commands.chat import run as chat_run
from llamado.commands.chat.backend import AnswerPiece, AnswerStats
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.measure import figures_of
from llamado.devices.split.placement import DeviceFigures
from llamado.engine import loaded_model
from llamado.engine.embedding.load import chosen_pooling
from llamado.engine.forward import fitting
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import CacheOptions, SchedulerOptions
from llamado.engine.request import Defaults
from llamado.models.hparams import override_metadata
from llamado.quantize.imatrix import ColumnSums, Imatrix
from llamado.quantize.plan import FilePlan, QuantizeRequest
from llamado.router import serve as router_serve
from llamado.server import load, run
from llamado.text.grammar.source import GrammarSource
from llamado.text.template import rendering
from llamado.tools.api import ToolsApi

Seen = dict[str, Any]
ROOM = 1 << 44


class Commands:
    """Runs commands; `folder` holds the model tiny.gguf and whatever files flags name."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.model = folder, folder / "tiny.gguf"
        self._patch = patch
        self._seen: Seen = {}
        self._said: list[str] = []
        self._command = ""
        self.memory = ROOM
        """Bytes that this machine and every worker have."""
        self._stand_in()
        # Thousands of models are loaded and closed: one process for templates serves them all.
        patch.setattr(rendering, "end", lambda: None)

    def run(self, command: str, arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[int, Seen, list[str]]:
        """Exit code, what arrived where, and lines about flags without effect."""
        self._seen, self._said, self._command = {}, [], command
        with pytest.MonkeyPatch.context() as patch, self._listening():
            for name in [name for name in os.environ if name.startswith(("LLAMA", "HF_", "GGML_", "MTMD_"))]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr(options, "keep", lambda variable, value: self._note("environ", **{variable: value}))
            before = dict(os.environ)
            code = cli.main([command, *arguments])
            changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
            for name in changed:
                del os.environ[name]
                if name in before:
                    os.environ[name] = before[name]
            self._note("environ", **changed)
        return code, self._seen, self._said

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Gathers what the commands log about flags."""
        said, logger = self._said, logging.getLogger("llamado")

        class Ear(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())

        ear, level = Ear(), logger.level
        logger.addHandler(ear)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(ear)
            logger.setLevel(level)

    def _note(self, place: str, /, **fields: Any) -> None:
        for name, value in fields.items():
            if dataclasses.is_dataclass(value) and not isinstance(value, type | GrammarSource):
                inner = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
                self._note(f"{place}.{name}", **inner)
            else:
                self._seen[f"{place}.{name}"] = value

    # -- the stand-ins -------------------------------------------------------------------------------------------------

    def _stand_in(self) -> None:
        self._common()
        self._loading()
        self._serving()
        self._routing()
        self._measuring()
        self._quantizing()
        self._others()

    def _common(self) -> None:
        note, model = self._note, self.model

        def resolve(spec: str | None, *, hf_repo: str | None = None, hf_file: str | None = None, **_: Any) -> Path:
            note("source", spec=None if spec is None else str(spec), hf_repo=hf_repo, hf_file=hf_file)
            return model

        def read_header(spec: str | None, *, hf_repo: str | None, hf_file: str | None, **_: Any) -> Any:
            resolve(spec, hf_repo=hf_repo, hf_file=hf_file)
            return real_read_header(model)

        real_read_header = llamado.gguf.sources.resolve.read_header
        self._patch.setattr("llamado.engine.supported.resolve", resolve)
        self._patch.setattr("llamado.gguf.sources.resolve.read_header", read_header)
        self._patch.setattr("llamado.http.logs.configure", lambda **options: note("logs", **options))
        self._patch.setattr(
            cli, "_log_to_stderr", lambda flags: note("logs", verbose=flags.verbose, timestamps=flags.log_timestamps)
        )

    def _loading(self) -> None:
        """Record the arguments that reach the device, the forward pass and the engine."""
        commands = self
        note, real_open = self._note, loaded_model.GGUFFile.open
        real_memory_request = fitting.memory_request
        real_load = LoadedModel.load.__func__  # type: ignore[attr-defined]

        def load_model(cls: type[LoadedModel], source: Any, options: Any, **more: Any) -> LoadedModel:
            note("load", defaults=more.get("defaults") or Defaults())
            loaded: LoadedModel = real_load(cls, source, options, **more)
            note("template", source=loaded.template.source)
            return loaded

        def open_file(path: Path, *, mmap: bool = True) -> Any:
            note("file", mmap=mmap)
            return real_open(path, mmap=mmap)

        def metadata(given: Any, changes: Any) -> Any:
            note("file", metadata=tuple(changes))
            return override_metadata(given, changes)

        def adapters(model: Any, paths: Sequence[Any], *, mmap: bool = True) -> tuple[()]:
            note("file", adapters=tuple(map(str, paths)))
            return ()

        def control(n_embd: int, n_layer: int, files: Any, layers: Any) -> None:
            note("file", control=files, layers=layers)

        class Device:
            name, lost, local, links = "CPU", None, True, False

            def __init__(self, n_threads: Any = None, n_threads_batch: Any = None, *, numa: Any = None) -> None:
                note("device", n_threads=n_threads, n_threads_batch=n_threads_batch, numa=numa)
                self.jit = Jit()

            def memory(self) -> tuple[int, int]:
                return commands.memory, commands.memory

            def close(self) -> None: ...

        class Forward:
            def __init__(
                self, file: Any, model: Any, devices: Any, options: Any, placement: Any, progress: Any = None
            ) -> None:
                note("forward", **{k: v for k, v in vars(options).items() if k not in ("reconnect", "replace")})
                self.max_batch, self.devices = options.max_batch, devices
                self.memory = SimpleNamespace(n_cells=options.n_cells)
                self.chunk, self.n_vocab, self.placement = self.max_batch, model.hparams.n_vocab, placement

            def warm_up(self, *_: Any) -> None: ...

            def close(self) -> None: ...

        class Engine:
            def __init__(
                self, forward: Any, tokenizer: Any, options: Any, *, scales: Any, drafts: Any, top_rows: Any
            ) -> None:
                named = [field.name for part in (SchedulerOptions, CacheOptions) for field in fields(part)]
                note("engine", **{name: getattr(options, name) for name in named if name != "unified"})
                note("engine", lora=scales.each, invocations=scales.invocations, drafts=drafts)
                self.n_ctx, self.lora = options.n_ctx_slot, scales.each
                note("engine", n_ctx=self.n_ctx)

            def close(self, timeout: float = 0.0) -> None: ...

            def between_steps(self, work: Any, *, forget: bool) -> None: ...

        class House:
            def __init__(self, split: Any, here: Any, file: Any, model: Any, wanted: Any, progress: Any) -> None:
                note("divided", split=split)
                self.devices, self.fit = [here], fitting.fit(file, model, wanted, [figures_of(here)], None)
                self.split, self.reconnect, self.replace_lost = split, None, None

            def log_placement(self, placement: Any) -> None: ...

        def memory_request(options: Any) -> Any:
            note("fit", **dataclasses.asdict(options.fit))
            return real_memory_request(options)

        def model_in(file: Any, rope: Any) -> Any:
            note("rope", **dataclasses.asdict(rope))
            return real_model_in(file, rope)

        def open_draft_model(file: Any, tokenizer: Any, model: Any, options: Any) -> None:
            note("drafts", **{field.name: getattr(options.drafts, field.name) for field in fields(options.drafts)})

        def drafts_for(options: Any, model: Any, n_vocab: int) -> tuple[str, ...]:
            found = real_drafts_for(options, model, n_vocab)
            return () if found is None else tuple(kind.name for kind in found.kinds)

        real_model_in, real_drafts_for = llamado.models.load_model, loaded_model.drafts_for
        self._patch.setattr(loaded_model, "open_draft_model", open_draft_model)
        self._patch.setattr(loaded_model, "drafts_for", drafts_for)
        self._patch.setattr(loaded_model, "load_model", model_in)
        self._patch.setattr("llamado.models.load_model", model_in)
        self._patch.setattr(LoadedModel, "load", classmethod(load_model))
        self._patch.setattr(loaded_model, "memory_request", memory_request)
        self._patch.setattr(fitting, "memory_request", memory_request)
        self._patch.setattr(loaded_model, "GGUFFile", SimpleNamespace(open=open_file))
        self._patch.setattr(loaded_model, "override_metadata", metadata)
        self._patch.setattr(loaded_model, "load_adapters", adapters)
        self._patch.setattr(loaded_model, "load_control", control)
        self._patch.setattr(loaded_model, "Engine", Engine)
        self._patch.setattr("llamado.devices.cpu.device.CpuDevice", Device)
        self._patch.setattr("llamado.engine.forward.runner.ModelRunner", Forward)
        self._patch.setattr("llamado.engine.forward.device_pool.DevicePool", House)
        self._patch.setattr("llamado.engine.topology.topology.Topology", lambda *_: None)

    def _serving(self) -> None:
        """The server around the model."""
        note, real_serve, real_gate, real_state = self._note, load.serve_llama, run.ConnectionLimits, run.ServerState

        class Grammars:
            def __init__(self, tokenizer: Any) -> None: ...

            def compile(self, source: Any) -> None:
                note("grammars", compiled=source)

        def serve_llama(*given: Any) -> Any:
            served = real_serve(*given)
            info = served.info
            note("served", name=info.name, aliases=info.aliases, tags=info.tags)
            note("served", n_slots=served.n_slots, n_batch=served.n_batch, defaults=served.defaults)
            return served

        def load_embedder(file: Any, model: Any, options: Any, *given: Any, beside: Any = None) -> Any:
            pooling = chosen_pooling(options, model)
            note("embedder", pooling=pooling.name, n_ctx=beside.n_ctx_slot)
            forward = SimpleNamespace()
            more = {"close": lambda timeout: None, "max_tokens": 512}
            return forward, SimpleNamespace(pooling=pooling, forward=forward, **more)

        def make_state(**given: Any) -> Any:
            note("state", **given)
            return real_state(**given)

        def gate(most: Any, seconds: Any) -> Any:
            note("gate", most=most, seconds=seconds)
            return real_gate(most, seconds)

        class Sleep:
            def __init__(self, state: Any, load: Any, seconds: Any) -> None:
                note("sleep", seconds=seconds)

            async def watch(self) -> None: ...

        class Server:
            should_exit, started = False, True

            def __init__(self, config: Any, watchers: Any, cut_off: Any) -> None:
                note("uvicorn", ssl_key=config.ssl_keyfile, ssl_cert=config.ssl_certfile)
                note("uvicorn", keep_alive=config.timeout_keep_alive)
                self._watchers = watchers

            def run(self, sockets: Any) -> None:
                for watcher in self._watchers():
                    watcher.close()
                for thread in threading.enumerate():
                    if thread.name == "llamado-load":
                        thread.join()

        class Lan:
            def __init__(self, state: Any, listen: Any) -> None:
                note("discovery", on=True)

            def close(self) -> None:
                pass

        class Laboratory:
            def __init__(self, rpc: Sequence[str], n_own: int) -> None:
                note("lab", n_own=n_own)
                self.endpoints = tuple(f"tap:{i + 1}" for i in range(len(rpc) + n_own))

            def close(self) -> None: ...

        self._patch.setattr("llamado.cluster.latency_lab.LatencyLab", Laboratory)
        self._patch.setattr("llamado.text.grammar.compiler.GrammarCompiler", Grammars)
        self._patch.setattr(load, "serve_llama", serve_llama)
        self._patch.setattr(loaded_model, "load_embedder", load_embedder)
        real_embeddings = load.ServedEmbeddings

        def embeddings(**given: Any) -> Any:
            note("embeddings", normalize=given["normalize"], reranks=given["reranks"])
            return real_embeddings(**given)

        self._patch.setattr(load, "ServedEmbeddings", embeddings)
        self._patch.setattr(run, "ServerState", make_state)
        self._patch.setattr(run, "ConnectionLimits", gate)
        self._patch.setattr(run, "Sleep", Sleep)
        self._patch.setattr(run, "LanWorkers", Lan)
        self._patch.setattr(run, "_Server", Server)
        self._patch.setattr(run, "use_threads", lambda n: note("long texts", n_threads=n))
        self._patch.setattr(run, "open_tracing", lambda on: note("tracing", on=on))
        self._patch.setattr(run, "overview", lambda *_: [])
        self._patch.setattr(run.memory, "freeze", lambda: None)
        self._patch.setattr(sys, "setswitchinterval", lambda _: None)
        self._patch.setattr("llamado.http.sockets.check_tls", lambda *files: note("tls", checked=files))

        def open_tools(settings: Any, access: Any, hosts: Any) -> ToolsApi:
            note("tools", **vars(settings))
            return ToolsApi()

        def listen(hosts: Any, port: Any, *, reuse_port: bool = False) -> list[Any]:
            note("listen", hosts=hosts, port=port, reuse_port=reuse_port)
            return []

        self._patch.setattr("llamado.http.sockets.listen", listen)
        self._patch.setattr(run.ToolsApi, "open", staticmethod(open_tools))

    def _routing(self) -> None:
        note = self._note

        class Server:
            router = None

            def __init__(self, config: Any) -> None:
                self._config = config

            def run(self, sockets: Any) -> None:
                self._config.app()

        def make(catalog: Any, settings: Any, options: Any, tools: Any) -> Any:
            note("router", models=tuple(catalog.models), limits=options.limits, autoload=options.autoload)
            fleet = SimpleNamespace(find=lambda name: None, kill=lambda: None)
            parts = {"log_tail": logging.NullHandler(), "fleet": fleet, "page": frozenset()}
            return SimpleNamespace(**parts, traffic=None, routes=SimpleNamespace(endpoint=None), peers=None)

        self._patch.setattr(router_serve, "RouterServer", Server)
        self._patch.setattr(router_serve, "Router", make)
        self._patch.setattr("llamado.router.catalog.cached_models", dict)

    def _measuring(self) -> None:
        """bench and perplexity."""
        from llamado.commands.bench import roofline

        note = self._note

        def speeds(loaded: Any, prompts: Any, generations: Any, repetitions: int, depth: int) -> list[Any]:
            note("bench", prompts=prompts, generations=generations, repetitions=repetitions)
            self._seen.setdefault("bench.depths", []).append(depth)
            return []

        def profile(loaded: Any, n: int, start: int) -> list[Any]:
            self._seen.setdefault("bench.profiled", []).append((n, start))
            return []

        def measured_pass(loaded: Any, machine: Any, n: int, start: int, repetitions: int, threads: int) -> Any:
            self._seen.setdefault("roofline.passes", []).append((n, start))
            return [roofline.KernelRow("total", 1, 1.0, roofline.PassWork(), 0.0)], roofline.Peaks(1.0, 1.0, 1.0)

        def batch(forward: Any, pp: int, tg: int, pl: int) -> tuple[float, float]:
            self._seen.setdefault("bench.batches", []).append((pp, tg, pl))
            return 1.0, 1.0

        def score(forward: Any, tokens: Any, n_ctx: int, **options: Any) -> Any:
            from llamado.commands.bench.perplexity import Score

            note("perplexity", n_ctx=n_ctx, chunks=options["chunks"], n_tokens=len(tokens))
            return Score(2, 1.0, 1.0)

        class Taps:
            def __init__(self, targets: Sequence[Any], *, both_ways: bool) -> None:
                note("latency", both_ways=both_ways)
                self.endpoints = [f"h:{i + 1}" for i in range(len(targets))]

            def delay(self, latency_ms: float) -> None:
                seen.setdefault("latency.delays", []).append(latency_ms)

            def close(self) -> None: ...

        seen = _Late(self)

        @contextlib.contextmanager
        def workers(n: int) -> Iterator[list[str]]:
            note("latency", workers=n)
            yield ["h:1"] * n

        def rate(loaded: Any, n_streams: int, n_predict: int, seed: int) -> float:
            note("latency", n_predict=n_predict, n_streams=n_streams)
            return 1.0

        def draw(rows: Any, title: str, folder: Path) -> list[Path]:
            note("latency", folder=str(folder))
            return []

        for name, value in {"Taps": Taps, "own_workers": workers, "generation_rate": rate, "draw": draw}.items():
            self._patch.setattr(f"llamado.commands.bench.latency.{name}", value)
        self._patch.setattr("llamado.commands.bench.latency.can_draw", lambda: True)
        self._patch.setattr("llamado.commands.bench.latency._load", self._load_divided)
        self._patch.setattr("llamado.commands.bench.speed.speeds", speeds)
        self._patch.setattr("llamado.commands.bench.speed._profile", profile)
        self._patch.setattr(roofline, "measured_pass", measured_pass)
        self._patch.setattr("llamado.commands.bench.batches.measure", batch)
        self._patch.setattr("llamado.commands.bench.perplexity.score_text", score)

    def _quantizing(self) -> None:
        note = self._note

        def plan(file: Any, request: QuantizeRequest) -> FilePlan:
            asked = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
            known = None if request.imatrix is None else sorted(request.imatrix.entries)
            note("quantize", **(asked | {"imatrix": known}))
            return FilePlan([], [], [])

        known = Imatrix(Path("i.gguf"), dict.fromkeys(("blk.0.a", "blk.0.b"), ColumnSums(np.ones((1, 1)), np.ones(1))))
        self._patch.setattr("llamado.commands.files.imatrix.compute", lambda options: note("imatrix", options=options))
        self._patch.setattr("llamado.commands.files.imatrix.read_imatrix", lambda _: known)
        self._patch.setattr("llamado.commands.files.imatrix.show", lambda given: note("imatrix", shown=given.source))
        self._patch.setattr("llamado.commands.files.quantize.plan", plan)
        self._patch.setattr("llamado.commands.files.quantize.write", lambda *_, **__: note("quantize", written=True))
        self._patch.setattr("llamado.commands.files.quantize.read_imatrix", lambda _: known)

    def _load_divided(self, source: Any, options: Any, nodes: int) -> Any:
        return LoadedModel.load(source, options)

    def _others(self) -> None:
        """run, plan, worker, tap, wait, and what ends a command early."""
        note = self._note

        def answer(_: Any, messages: Any, settings: Any) -> Generator[AnswerPiece, None, AnswerStats]:
            note("chat", messages=messages, **settings)
            yield AnswerPiece("answer")
            return AnswerStats()

        class Far:
            name, notes = "far", ()

            def __init__(self, url: str, model: str | None, key: str | None) -> None:
                note("far", url=url, model=model, key=key)

            def close(self) -> None: ...

        def screen_of(markdown: bool) -> Any:
            note("chat", markdown=markdown)
            return real_screen(markdown=markdown)

        real_screen = chat_run.screen_of
        self._patch.setattr(Far, "answer", answer, raising=False)
        self._patch.setattr(chat_run, "screen_of", screen_of)
        self._patch.setattr("llamado.commands.chat.local.LocalBackend.answer", answer)
        self._patch.setattr("llamado.commands.chat.remote.RemoteBackend", Far)

        class Workers:
            def __init__(self, split: Any) -> None:
                note("divided", split=split)

            def devices(self) -> list[Any]:
                return [SimpleNamespace(name=f"RPC{i}", close=lambda: None) for i in range(2)]

        def measure_all(devices: Any, **_: Any) -> list[DeviceFigures]:
            speeds = {"free": self.memory, "total": self.memory, "decode": 1e9, "prefill": 1e9}
            return [DeviceFigures(name=device.name, local=device.name == "CPU", **speeds) for device in devices]

        real_sizes = fitting.model_sizes

        def model_sizes(file: Any, model: Any, options: Any) -> Any:
            if self._command == "plan":
                note("sizes", **vars(options))
            return real_sizes(file, model, options)

        def examine(what: Any, options: Any, machine: Any, **more: Any) -> Examination:
            note("doctor", what=what, options=options, machine=machine, **more)
            found = Examination(("pretended",), ())
            real_json = found.as_json
            object.__setattr__(found, "as_json", lambda: note("doctor", told=True) or real_json())
            return found

        self._patch.setattr(fitting, "model_sizes", model_sizes)
        self._patch.setattr("llamado.commands.plan._workers", Workers)
        self._patch.setattr("llamado.devices.split.measure.measure_all", measure_all)
        self._patch.setattr("llamado.commands.plan.list_devices", lambda flags: note("listed", devices=True))
        self._patch.setattr(cli, "_list_cache", lambda: note("listed", cache=True))

        async def compare(urls: Any, prompts: Any, parallel: int, key: Any) -> dict[str, Any]:
            note("verify", n=len(prompts), prompts=tuple(asked.prompt for asked in prompts), parallel=parallel, key=key)
            note("verify", n_predict=prompts[0].n_predict, temperature=prompts[0].temperature)
            return {"servers": [], "conflicts": [], "notes": [], "differences": [], "prompts": 1, "parallel": 1,
                    "different_answers": 0, "equal": True}  # fmt: skip

        self._patch.setattr("llamado.commands.verify._run", compare)
        self._patch.setattr("llamado.gateway.serve.serve_gateway", lambda options, _: note("gateway", options=options))
        self._patch.setattr("llamado.rpc.worker.server.run_worker", lambda options: note("worker", options=options))
        self._patch.setattr("llamado.rpc.tap.proxy.run_tap", lambda options: note("tap", options=options))
        self._patch.setattr("llamado.cluster.doctor.examination.examine", examine)

        def make(folder: Path, server: Any, workers: Any, days: int) -> list[Path]:
            note("cluster", folder=folder.name, server=server, workers=tuple(workers), days=days)
            return []

        self._patch.setattr(
            "llamado.commands.top.top.show", lambda url, **options: note("top", url=url, **options) or 0
        )
        self._patch.setattr("llamado.commands.cluster.make", make)
        deploy = "llamado.cluster.deploy.targets"
        self._patch.setattr(f"{deploy}.files_for", lambda target, what: note("deploy", what=what) or {})
        self._patch.setattr(f"{deploy}.write", lambda files, folder: note("deploy", folder=folder) or [])
        up = "llamado.commands.up.start"
        self._patch.setattr(f"{up}.run_in_foreground", lambda config: note("up", config=config, detach=False))
        self._patch.setattr(f"{up}.run_in_background", lambda config, *_: note("up", config=config, detach=True))
        self._patch.setattr(
            "llamado.commands.wait.wait.run_wait", lambda url, **options: note("wait", url=url, **options)
        )


class _Late:
    """The calls that the current run recorded."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def setdefault(self, key: str, value: Any) -> Any:
        return self._commands._seen.setdefault(key, value)
