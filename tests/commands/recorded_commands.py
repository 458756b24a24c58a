"""Run command lines up to the options records that they become: nothing loads, listens, connects or computes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamado.cluster.doctor.examination import Examination
from llamado.commands import cli, options
from llamado.commands.bench import roofline
from llamado.commands.bench.perplexity import Score
from llamado.commands.chat import run as chat_run
from llamado.commands.chat.backend import AnswerPiece, AnswerStats
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.request import Defaults
from llamado.quantize.imatrix import ColumnSums, Imatrix
from llamado.quantize.plan import FilePlan
from llamado.router import serve as router_serve
from llamado.text.grammar.source import GrammarSource

Seen = dict[str, Any]
"""Values by path: place and fields of nested records, such as "load.options.n_ctx"."""


class _RecordedAll(BaseException):
    """Ends a command after all its records."""


class RecordedCommands:
    """Runs commands and records the options that they pass on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._seen: Seen = {}
        self._warnings: list[str] = []
        patch.setattr(cli, "make_parser", functools.cache(cli.make_parser))
        self._replace_logs()
        self._replace_models()
        self._replace_servers()
        self._replace_bench()
        self._replace_files()
        self._replace_clusters()

    def run(self, command: str, arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[int, Seen, list[str]]:
        """Run a command; return its exit code, the records, and warnings about flags without effect."""
        self._seen, self._warnings = {}, []
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("LLAMA", "HF_", "GGML_", "MTMD_"))]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr(options, "keep", lambda variable, value: self._record("environ", **{variable: value}))
            before = dict(os.environ)
            try:
                code = cli.main([command, *arguments]) or 0
            except _RecordedAll:
                code = 0
            changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
            for name in changed:
                del os.environ[name]
                if name in before:
                    os.environ[name] = before[name]
            self._record("environ", **changed)
        return code, self._seen, self._warnings

    def _record(self, place: str, /, **fields: Any) -> None:
        for name, value in fields.items():
            if dataclasses.is_dataclass(value) and not isinstance(value, type | GrammarSource):
                self._record(f"{place}.{name}", **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
            else:
                self._seen[f"{place}.{name}"] = value

    def _append(self, path: str, value: Any) -> None:
        self._seen.setdefault(path, []).append(value)

    def _recorder(self, place: str, name: str = "options") -> Callable[..., None]:
        """Return a function that records its first argument as `name`, and its keyword arguments."""
        return lambda given, *_, **more: self._record(place, **{name: given}, **more)

    def _replace(self, replacements: Mapping[str, Any], prefix: str = "") -> None:
        for path, value in replacements.items():
            self._patch.setattr(f"llamado.{prefix}{path}", value)

    def _replace_logs(self) -> None:
        record = self._record
        self._replace({"http.monitoring.logs.configure": lambda **options: record("logs", **options)})
        self._patch.setattr(
            cli, "_log_to_stderr", lambda flags: record("logs", verbose=flags.verbose, timestamps=flags.log_timestamps)
        )
        self._patch.setattr(cli, "_list_cache", lambda: record("listed", cache=True))

    def _replace_models(self) -> None:
        """Record what a model is loaded with, for run, perplexity, bench and plan."""
        record = self._record

        def load(source: Any, options: Any, *, defaults: Any = None, **_: Any) -> Any:
            record("load", source=source, options=options, defaults=defaults or Defaults())
            memory = SimpleNamespace(n_cells=1 << 40)
            tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()), add_bos=False, bos=None)
            parts = {"engine": SimpleNamespace(close=lambda: None), "forward": SimpleNamespace(memory=memory)}
            return contextlib.nullcontext(
                SimpleNamespace(**parts, tokenizer=tokenizer, cluster=None, lacks=(), name="tiny")
            )

        def plan_source(flags: Any) -> Any:
            record("load", source=options.model_source(flags), options=options.engine_options(flags))
            raise _RecordedAll

        self._patch.setattr(LoadedModel, "load", staticmethod(load))

        class Backend:
            name, notes = "backend", ()

            def __init__(self, url: Any, model: Any, key: Any = None) -> None:
                if isinstance(url, str):
                    record("remote", url=url, model=model, key=key)

            def answer(self, messages: Any, settings: Any) -> Generator[AnswerPiece, None, AnswerStats]:
                record("chat", messages=messages, **settings)
                yield AnswerPiece("answer")
                return AnswerStats()

            def close(self) -> None: ...

        def screen_of(*, markdown: bool) -> Any:
            record("chat", markdown=markdown)
            return real_screen_of(markdown=False)

        real_screen_of = chat_run.screen_of
        replacements = {
            "plan.model_source": plan_source,
            "plan.list_devices": lambda flags: record("listed", devices=True),
            "chat.local.LocalBackend": Backend,
            "chat.remote.RemoteBackend": Backend,
        }
        self._replace(replacements, "commands.")
        self._patch.setattr(chat_run, "screen_of", screen_of)

    def _replace_servers(self) -> None:
        record = self._record

        def serve(settings: Any, load: Any, sockets: Any, listen: Any, lab: Any = None) -> int:
            fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
            self._warnings += fields.pop("notes")
            record("load", source=fields.pop("source"), options=fields.pop("engine"), defaults=fields.pop("defaults"))
            record("server", **fields, discover=listen is not None)
            return 0

        def listen(hosts: Any, port: Any, *, reuse_port: bool = False) -> list[Any]:
            record("listen", hosts=hosts, port=port, reuse_port=reuse_port)
            return []

        class Lab:
            def __init__(self, rpc: Sequence[str], n_own: int) -> None:
                record("lab", n_own=n_own)
                self.endpoints = tuple(rpc)

            def close(self) -> None: ...

        def make_router(catalog: Any, settings: Any, options: Any, tools: Any) -> Any:
            record("router", models=tuple(catalog.models), limits=options.limits, autoload=options.autoload)
            raise _RecordedAll

        class RouterServer:
            router = None

            def __init__(self, config: Any) -> None:
                self._config = config

            def run(self, sockets: Any) -> None:
                self._config.app()

        self._replace(
            {
                "server.run.serve": serve,
                "cluster.latency_lab.LatencyLab": Lab,
                "http.sockets.listen": listen,
                "http.sockets.check_tls": lambda *files: record("tls", checked=files),
                "gateway.serve.serve_gateway": self._recorder("gateway"),
                "rpc.worker.server.run_worker": self._recorder("worker"),
                "rpc.tap.proxy.run_tap": self._recorder("tap"),
                "router.catalog.cached_models": dict,
            }
        )
        self._patch.setattr(router_serve, "RouterServer", RouterServer)
        self._patch.setattr(router_serve, "Router", make_router)

    def _replace_bench(self) -> None:
        record, append = self._record, self._append

        def speeds(_: Any, prompts: Any, generations: Any, repetitions: int, depth: int) -> list[Any]:
            record("bench", prompts=prompts, generations=generations, repetitions=repetitions)
            append("bench.depths", depth)
            return []

        def measured_pass(_: Any, machine: Any, n: int, start: int, *more: Any) -> Any:
            append("roofline.passes", (n, start))
            return [roofline.KernelRow("total", 1, 1.0, roofline.PassWork(), 0.0)], roofline.Peaks(1.0, 1.0, 1.0)

        def score(forward: Any, tokens: Any, n_ctx: int, **given: Any) -> Score:
            record("perplexity", n_ctx=n_ctx, chunks=given["chunks"], n_tokens=len(tokens))
            return Score(2, 1.0, 1.0)

        class Taps:
            def __init__(self, targets: Sequence[Any], *, both_ways: bool) -> None:
                record("latency", both_ways=both_ways)
                self.endpoints = [f"h:{i + 1}" for i in range(len(targets))]

            def delay(self, latency_ms: float) -> None:
                append("latency.delays", latency_ms)

            def close(self) -> None: ...

        @contextlib.contextmanager
        def workers(n: int) -> Iterator[list[str]]:
            record("latency", workers=n)
            yield ["h:1"] * n

        def rate(_: Any, n_streams: int, n_predict: int, seed: int) -> float:
            record("latency", n_predict=n_predict, n_streams=n_streams)
            return 1.0

        async def compare(urls: Any, prompts: Any, parallel: int, key: Any) -> dict[str, Any]:
            record("verify", prompts=tuple(one.prompt for one in prompts), parallel=parallel, key=key)
            record("verify", n_predict=prompts[0].n_predict, temperature=prompts[0].temperature)
            return {"servers": [], "conflicts": [], "notes": [], "differences": [], "prompts": 1, "parallel": 1,
                    "different_answers": 0, "equal": True}  # fmt: skip

        bench = {
            "latency.Taps": Taps,
            "latency.own_workers": workers,
            "latency.generation_rate": rate,
            "latency.draw": lambda rows, title, folder: record("latency", folder=str(folder)) or [],
            "latency.can_draw": lambda: True,
            "latency._load": lambda source, options, nodes: LoadedModel.load(source, options),
            "speed.speeds": speeds,
            "speed._profile": lambda _, n, start: append("bench.profiled", (n, start)) or [],
            "batches.measure": lambda _, pp, tg, pl: append("bench.batches", (pp, tg, pl)) or (1.0, 1.0),
            "perplexity.score_text": score,
            "roofline.measured_pass": measured_pass,
        }
        self._replace(bench, "commands.bench.")
        self._replace({"commands.verify._run": compare})

    def _replace_files(self) -> None:
        record = self._record
        sums = ColumnSums(np.ones((1, 1)), np.ones(1))
        known = Imatrix(Path("i.gguf"), {"blk.0.a": sums, "blk.0.b": sums})

        def plan(file: Any, request: Any) -> FilePlan:
            entries = None if request.imatrix is None else sorted(request.imatrix.entries)
            fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
            record("quantize", **fields | {"imatrix": entries})
            return FilePlan([], [], [])

        files = {
            "imatrix.compute": self._recorder("imatrix"),
            "imatrix.read_imatrix": lambda _: known,
            "imatrix.show": lambda given: record("imatrix", shown=given.source),
            "quantize.plan": plan,
            "quantize.write": lambda *_, **__: record("quantize", written=True),
            "quantize.read_imatrix": lambda _: known,
        }
        self._replace(files, "commands.files.")

    def _replace_clusters(self) -> None:
        record = self._record

        def examine(what: Any, options: Any, machine: Any, **more: Any) -> Examination:
            record("doctor", what=what, options=options, machine=machine, **more)
            return Examination(("nothing",), ())

        def make(folder: Path, server: Any, workers: Any, days: int) -> list[Path]:
            record("cluster", folder=folder.name, server=server, workers=tuple(workers), days=days)
            return []

        self._replace(
            {
                "cluster.doctor.examination.examine": examine,
                "commands.top.top.show": self._recorder("top", "url"),
                "commands.cluster.make": make,
                "cluster.deploy.targets.files_for": lambda target, given: record("deploy", deployment=given) or {},
                "cluster.deploy.targets.write": lambda files, folder: record("deploy", folder=folder) or [],
                "commands.up.start.run_in_foreground": lambda config: record("up", config=config, detach=False),
                "commands.up.start.run_in_background": lambda config, *_: record("up", config=config, detach=True),
                "commands.wait.wait.run_wait": self._recorder("wait", "url"),
            }
        )
