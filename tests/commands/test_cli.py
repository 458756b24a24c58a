"""The command line: flags, environment variables, help and error messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from parsers import parser_of

from llamado import flags
from llamado.__main__ import main as entry
from llamado.commands import cli
from llamado.commands.serve import serve_settings, serves_many
from llamado.devices.split.placement import ALL_LAYERS
from llamado.flags import FlagError, FlagParser, Kind, ParsedFlags, add_flags, parse
from llamado.models.keys import FILE_ROPE, RopeOptions
from llamado.quantize.file_types import COPY, FILE_TYPES

ROOT = Path(__file__).parents[2]

LLAMA_SERVER = (
    "-m x.gguf -a one,two --host 0.0.0.0 --port 9999 -t 3 -tb 2 -c 4096 -n 77 -b 1024 -ub 256 -np 2 -cb --keep 5 "
    "-ngl 99 -fa on -ctk q8_0 -ctv f16 --mlock --no-mmap --numa distribute -s 42 --temp 0.5 --top-k 10 --top-p 0.9 "
    "--min-p 0.1 --api-key a,b --metrics --no-slots -v --log-verbosity 2 --repeat-penalty 1.1 --typical 0.9"
)


@pytest.fixture(autouse=True)
def parsers_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "make_parser", parser_of)


@cache
def flags_of(command: str) -> FlagParser:
    parser = FlagParser(prog="llamado", allow_abbrev=False)
    add_flags(parser, command)
    return parser


def parsed(*arguments: str, command: str = "serve", environ: Mapping[str, str] | None = None) -> ParsedFlags:
    return parse(flags_of(command), command, arguments, environ or {})[0]


def settings(*arguments: str, environ: Mapping[str, str] | None = None) -> Any:
    return serve_settings(parsed(*arguments, environ=environ))


def test_llama_servers_flags_are_taken_by_their_spellings() -> None:
    s = settings(*LLAMA_SERVER.split())
    assert s.source.spec == "x.gguf" and s.aliases == ("one", "two")
    assert (s.hosts, s.port) == (("0.0.0.0",), 9999)
    e = s.engine
    assert (e.n_threads, e.n_threads_batch, e.n_ctx, e.n_batch, e.n_ubatch, e.n_slots) == (3, 2, 4096, 1024, 256, 2)
    assert (e.type_k, e.type_v, e.mmap, e.mlock, e.numa, e.unified) == ("q8_0", "f16", False, True, "distribute", False)
    d = s.defaults
    assert (d.n_predict, d.n_keep, d.sampling.seed, d.sampling.temperature) == (77, 5, 42, 0.5)
    assert (d.sampling.top_k, d.sampling.top_p, d.sampling.min_p, d.sampling.typical_p) == (10, 0.9, 0.1, 0.9)
    assert d.sampling.repeat_penalty == 1.1
    assert s.access.api_keys == (b"a", b"b") and s.switches.metrics and not s.switches.slots
    assert len(s.notes) == 1 and "-fa" in s.notes[0] and s.engine.split.given[0] == "-ngl/--gpu-layers"


def test_defaults_are_llama_servers() -> None:
    s = settings("-m", "x")
    assert (s.hosts, s.port, s.engine.n_slots, s.engine.unified) == (("127.0.0.1",), 8080, 4, True)
    assert (s.engine.n_batch, s.engine.n_ubatch, s.engine.type_k, s.engine.mmap) == (2048, 512, "f16", True)
    sampling = s.defaults.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert sampling.seed is None and s.notes == () and s.switches.slots and not s.switches.metrics


@pytest.mark.parametrize(
    "arguments",
    [
        "--no-flash-attn",
        "-fa",
        "-fa auto",
        "--flash-attn on --no-webui",
        "-fit off",
        "-fit auto",
        "--fit auto",
        "--no-webui",
        "--jinja",
        "--no-jinja",
        "--no-warmup",
        "--tensor-split 3,1",
        "--main-gpu 0",
        "--metal",
        "-ngl all",
        "--ngl 99",
        "--mirostat 0",
        "--xtc-probability 0.0",
        "--no-context-shift",
        "--rope-scaling none",
        "--log-format json",
        "--numa",
        "--cache_type_k f32",
    ],
)
def test_older_and_meaningless_spellings_are_accepted(arguments: str) -> None:
    settings("-m", "x", *arguments.split())


def test_a_switch_opens_to_any_site_and_a_list_to_its_own() -> None:
    assert settings("-m", "x").access.cors_origins == "localhost"
    assert settings("-m", "x", "--cors").access.cors_origins == "*"
    given = settings("-m", "x", "--cors", "--cors-origin", "http://a:3000,http://b:5173")
    assert given.access.cors_origins == "http://a:3000,http://b:5173"
    assert settings("-m", "x", "--cors", environ={"LLAMA_ARG_CORS_ORIGINS": "localhost"}).access.cors_origins == (
        "localhost"
    )


def test_memory_f32_means_the_cache() -> None:
    engine = settings("-m", "x", "--memory-f32").engine
    assert (engine.type_k, engine.type_v) == ("f32", "f32")


def test_how_a_model_is_divided() -> None:
    s = settings("-m", "x", "--rpc", "a:1,b", "--rpc=tls://c:2", "-ngl", "99").engine.split
    assert s.rpc == ("a:1", "b:50052", "tls://c:2")
    assert (s.tensor_split, s.n_gpu_layers, s.devices, s.overrides) == (None, 99, (), ())
    assert (s.failover, s.wait, s.request_wait) == (None, 60.0, 30.0)
    split = ["-m", "x", "--rpc", "a:1"]
    shares = {
        "3,1": (3, 1),
        "0.5,0.25,0.25": (0.5, 0.25, 0.25),
        "3/1": (3, 1),
        "memory": (),
        "0,1": (0, 1),
        "auto": None,
    }
    for text, expected in shares.items():
        assert settings(*split, "-ts", text).engine.split.tensor_split == expected
    for text, layers in {"auto": None, "-1": None, "all": ALL_LAYERS, "-2": ALL_LAYERS, "0": 0}.items():
        assert settings(*split, "-ngl", text).engine.split.n_gpu_layers == layers
    assert settings(*split, "-dev", "CPU,RPC0[a:1]").engine.split.devices == ("CPU", "RPC0[a:1]")
    assert settings(*split, "-sm", "none").engine.split.main_gpu == 0
    single = settings(*split, "-sm", "none", "-mg", "1", "-ts", "1,0").engine.split
    assert (single.main_gpu, single.tensor_split, single.devices) == (1, (), ())
    chosen = settings(*split, "-sm", "none", "-mg", "1", "-dev", "RPC0,CPU").engine.split
    assert (chosen.main_gpu, chosen.devices) == (None, ("CPU",))
    overrides = settings(*split, "-ot", r"blk\.\d{1,2}\.ffn=CPU,output=RPC0", "-ot", "x=CPU").engine.split.overrides
    assert overrides == ((r"blk\.\d{1,2}\.ffn", "CPU"), ("output", "RPC0"), ("x", "CPU"))
    environ = {"LLAMA_ARG_RPC": "a:1,b:2", "LLAMA_ARG_TENSOR_SPLIT": "3,1"}
    s = settings("-m", "x", environ=environ).engine.split
    assert (s.rpc, s.tensor_split) == (("a:1", "b:2"), (3, 1))
    assert s.gpus and not s.joins and s.networked
    assert settings("-m", "x", "--cluster-token", "secret").engine.split.joins


def test_graphics_cards_need_no_flag() -> None:
    """Without workers the same flags divide the model among this machine's devices."""
    s = settings("-m", "x").engine
    assert s.split is not None and s.split.gpus and not s.split.networked and s.split.given == ()
    assert (s.split.n_gpu_layers, s.split.tensor_split, s.split.devices, s.split.kv_offload) == (None, None, (), True)
    assert s.draft_kinds == (), "drafts hide the latency of networks"
    flags = ["-ngl", "20", "-dev", "CUDA1,CUDA0", "-ts", "3,1", "-nkvo", "-ncmoe", "2", "-ot", "x=CUDA0"]
    s = settings("-m", "x", *flags).engine
    assert s.split is not None and (s.split.n_gpu_layers, s.split.tensor_split) == (20, (3, 1))
    assert (s.split.devices, s.split.kv_offload) == (("CUDA1", "CUDA0"), False)
    assert [device for _, device in s.split.overrides] == ["CUDA0", "CPU"]
    s = settings("-m", "x", "-sm", "none", "-mg", "1").engine
    assert s.split is not None and s.split.main_gpu == 1
    environ = {"LLAMA_ARG_N_GPU_LAYERS": "7", "LLAMA_ARG_KV_OFFLOAD": "0", "LLAMA_ARG_DEVICE": "none"}
    s = settings("-m", "x", environ=environ).engine
    assert s.split is not None and (s.split.n_gpu_layers, s.split.kv_offload, s.split.devices) == (7, False, ("none",))


def test_flags_of_a_division_say_nothing_without_workers() -> None:
    """Without a graphics card, too, the log has one line when the model is loaded; see test_cards.py."""
    s = settings("-m", "x", "-ngl", "7", "-ot", "blk.0=CPU", "-sm", "row", "-mg", "0", "--rpc-wait", "9")
    assert s.notes == (
        "--rpc-wait: accepted, no effect here (the model runs on this machine's CPU; --rpc adds others)",
    )
    assert s.engine.split is not None and s.engine.split.given == (
        "-ngl/--gpu-layers", "-ot/--override-tensor", "-sm/--split-mode", "-mg/--main-gpu",
    )  # fmt: skip
    assert settings("-m", "x", "--rpc", "a:1", "-ngl", "7", "-dev", "none").notes == ()


def test_fitting_is_on_by_any_of_its_words() -> None:
    """Guides to llama.cpp show auto as the default."""
    words = (["-fit"], ["-fit", "on"], ["-fit", "auto"], ["--fit", "auto"], ["--fit=auto"])
    assert all(settings("-m", "x", *given).engine.fit.on for given in words)
    assert settings("-m", "x", environ={"LLAMA_ARG_FIT": "auto"}).engine.fit.on
    assert not settings("-m", "x", "-fit", "off").engine.fit.on


def test_sizes_of_memory() -> None:
    sizes = {"512": 512 << 20, "512K": 512 << 10, "1.5G": 3 << 29, "16GiB": 16 << 30, "800 MB": 800 << 20}
    sizes |= {"1048575": (1 << 40) - (1 << 20), "1048576": 1 << 20, "8589934592": 8 << 30}
    for text, size in sizes.items():
        assert cli.memory_size(text) == size
    for text in ("", "0", "-5", "much", "1E9", "5X"):
        with pytest.raises(FlagError, match="-m/--mem: expected a number of MiB"):
            cli.memory_size(text)


def test_a_worker_has_rpc_servers_flags_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("llamado.rpc.worker.server.run_worker", lambda options: given.append(options) or 7)
    assert cli.main(["worker"]) == 7
    assert (given[0].host, given[0].port, given[0].threads, given[0].devices) == ("127.0.0.1", 50052, None, ())
    assert (given[0].cache, given[0].mem, given[0].tls_cert, given[0].allow) == (False, None, None, ())
    flags = "-H 0.0.0.0 -p 9 -t 2 -d CPU,X/Y -c -m 512 --tls-cert c --tls-key k --tls-client-ca a"
    assert cli.main(["worker", *flags.split(), "--allow", "10.0.0.0/8, ::1", "--allow", "h"]) == 7
    assert (given[1].host, given[1].port, given[1].threads, given[1].devices) == ("0.0.0.0", 9, 2, ("CPU", "X", "Y"))
    assert (given[1].cache, given[1].mem, given[1].allow) == (True, 512 << 20, ("10.0.0.0/8", "::1", "h"))
    assert (given[1].tls_cert, given[1].tls_key, given[1].tls_client_ca) == ("c", "k", "a")


@pytest.mark.parametrize("name", ["rpc-server", "ggml-rpc-server"])
def test_commands_have_llama_cpps_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the first argument (in containers), or the name of a link to `llamado`."""
    given: list[Any] = []
    monkeypatch.setattr("llamado.rpc.worker.server.run_worker", lambda options: given.append(options) or 7)
    monkeypatch.setattr("llamado.commands.serve.run_serve", lambda flags: given.append(flags) or 8)
    assert cli.main([name, "-p", "5"]) == 7
    monkeypatch.setattr(sys, "argv", [f"/some/where/{name}", "-p", "6"])
    assert cli.main() == 7
    assert [options.port for options in given] == [5, 6]
    monkeypatch.setattr(sys, "argv", ["./llama-server", "-m", "x.gguf", "--port", "9"])
    assert cli.main() == 8 and (given[2].model, given[2].port) == (["x.gguf"], 9)
    monkeypatch.setattr(sys, "argv", ["/some/where/llamado", "worker", "-p", "7"])
    assert cli.main() == 7 and given[3].port == 7


def test_one_warning_per_reason() -> None:
    notes = parsed("-m", "x", "--rpc-wait", "1", "--rpc-wait", "2", "--rpc-failover", "3", "--perf").warnings
    assert len(notes) == 2  # flags with the same reason share a line
    assert any("--rpc-failover, --rpc-wait" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ctx-sise 4", "unknown flag --ctx-sise: did you mean --ctx-size?"),
        ("-ctx-size 4", "unknown flag -ctx-size: did you mean --ctx-size?"),
        ("--prot 4", "unknown flag --prot: did you mean --port?"),
        ("--thread=4", "unknown flag --thread: did you mean --threads?"),
        ("-nlg 4", "did you mean -n"),
        ("stray", "unexpected argument 'stray'"),
        ("-c abc", "-c/--ctx-size: expected a whole number, got 'abc'"),
        ("-c 1.5", "-c/--ctx-size: expected a whole number"),
        ("-c -4", "--ctx-size: expected 0 or more"),
        ("--temp warm", "--temp/--temperature: expected a number, got 'warm'"),
        ("--temp nan", "temperature must be a finite number"),
        ("-ctk q6_k", "expected one of f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1, got 'q6_k'"),
        ("--port 70000", "--port: expected 0 to 65535"),
        ("-np 0", "-np/--parallel"),
        ("--model", "-m/--model: expected one argument"),
        ("--draft 4", "--draft/--draft-n: llama-server has removed this flag"),
        ("--tools-folder /nonexistent", "--tools-folder /nonexistent: no such folder"),
        ("--fim-qwen-3b-default", "give the model with -hf ggml-org/Qwen2.5-Coder-3B-Q8_0-GGUF"),
        ("-sps 2", "-sps/--slot-prompt-similarity: expected 0 to 1"),
        ("--cache-ram -2", "--cache-ram: expected -1 or more"),
        ("--max-queue -1", "--max-queue: expected 0 or more"),
        ("--timeout 0", "--timeout: expected 1 or more"),
        ("--threads-http 0", "--threads-http: expected 1 or more, or -1"),
        ("--sleep-idle-seconds 0", "--sleep-idle-seconds: expected 1 or more, or -1"),
        ("--reasoning-budget -2", "--reasoning-budget: expected -1 or more"),
        ("--reasoning maybe", "expected one of on, off, auto, got 'maybe'"),
        ("--pooling first", "expected one of none, mean, cls, last, rank"),
        ("--api-prefix llama", "--api-prefix: expected a path such as /llama"),
        ("--path /nonexistent", "--path /nonexistent: no such folder"),
        ("--slot-save-path /nonexistent", "--slot-save-path /nonexistent: no such folder"),
        ("--metrics-labels pool", "--metrics-labels: expected NAME=VALUE"),
        ("--metrics-labels le=1", "--metrics-labels: expected NAME=VALUE"),
        ("--metrics-labels engine=x", "--metrics-labels: expected NAME=VALUE"),
        ("--lora-scaled a.gguf", "--lora-scaled: expected FILE:SCALE"),
        ("--override-kv a=int:x", "--override-kv: expected KEY=TYPE:VALUE"),
        ("--override-kv a=num:1", "--override-kv: expected KEY=TYPE:VALUE"),
        ("--override-kv a=bool:1", "--override-kv: expected KEY=TYPE:VALUE"),
        ("--rope-scale -1", "--rope-scale: expected a number above 0"),
        ("--rope-scaling ntk", "expected one of none, linear, yarn"),
        ("--grammar x --json-schema {}", "--grammar and -j/--json-schema: give one of them"),
        ("--json-schema {", "-j/--json-schema: invalid JSON"),
        ("--grammar-file /nonexistent", "--grammar-file /nonexistent"),
        ("--spec-type draft-dspark", "--spec-type draft-dspark: DFlash heads with a Markov head are not supported"),
        ("--spec-type draft-eagle3", "--spec-type draft-eagle3: -md/--model-draft names"),
        ("--spec-type suffix,ngrams", "--spec-type: expected auto, none or some of suffix"),
        ("--spec-type draft-simple", "--spec-type draft-simple: -md/--model-draft names"),
        ("--spec-draft-n-max -1", "--spec-draft-n-max: expected 0 or more"),
        ("--draft-p-min 2", "--spec-draft-p-min: expected 0 to 1"),
        ("--hang-timeout -1", "--hang-timeout: expected seconds, 0 or more"),
        ("--rpc ,", "--rpc: expected host:port"),
        ("--rpc h:1,h:1", "--rpc: h:1 is named twice"),
        ("--rpc h:port", "--rpc: "),
        ("--rpc h:1 --rpc-wait -1", "--rpc-wait: expected seconds, 0 or more"),
        ("--rpc h:1 --rpc-request-wait inf", "--rpc-request-wait: expected seconds, 0 or more"),
        ("--rpc h:1 --rpc-connect-timeout 0", "--rpc-connect-timeout: expected seconds, 0.1 or more"),
        ("--rpc h:1 --rpc-alive-timeout nan", "--rpc-alive-timeout: expected seconds, 0.1 or more"),
        ("--rpc h:1 --rpc-failover nan", "--rpc-failover: expected seconds"),
        ("--rpc h:1 --rpc-cert x", "--rpc-cert and --rpc-key: give both or none"),
        ("--rpc h:1 -ts 3,x", "-ts/--tensor-split: expected auto, memory, or proportions"),
        (
            "--rpc h:1 -ts 3,x",
            "-ts/--tensor-split: expected auto, memory, or proportions such as 3,1; 'x' in '3,x' is not",
        ),
        ("--rpc h:1 -ts 3,-1", "-ts/--tensor-split 3,-1: the share -1 is less than 0 (0 gives a device nothing)"),
        ("--rpc h:1 -ts -1,1", "-ts/--tensor-split -1,1: the share -1 is less than 0 (0 gives a device nothing)"),
        ("--rpc h:1 -ts -.5,1", "-ts/--tensor-split -.5,1: the share -0.5 is less than 0"),
        ("--rpc h:1 -ts 0,0", "-ts/--tensor-split 0,0: all shares are 0 (memory divides by free memory)"),
        ("--rpc h:1 -ts 1,inf", "-ts/--tensor-split 1,inf: the share inf is no number up to 1e+15"),
        ("--rpc h:1 -ts 1,nan", "-ts/--tensor-split 1,nan: the share nan is no number up to 1e+15"),
        ("--rpc h:1 -ts ,", "-ts/--tensor-split: expected"),
        ("-ts 3,x", "-ts/--tensor-split: expected auto, memory, or proportions"),
        ("-ngl many", "-ngl/--gpu-layers: expected a whole number, all or auto"),
        ("--rpc h:1 -ngl many", "-ngl/--gpu-layers: expected a whole number, all or auto"),
        ("--rpc h:1 -sm row", "-sm/--split-mode row: not supported"),
        ("--rpc h:1 -sm none -mg -1", "-mg/--main-gpu: expected the index of a device"),
        ("--rpc h:1 -sm none -dev RPC0,CPU -mg 2", "-mg/--main-gpu: expected the index of a device"),
        ("--rpc h:1 -dev none,CPU", "-dev/--device: none cannot be combined"),
        ("--rpc h:1 -dev ,", "-dev/--device: expected names"),
        ("--rpc h:1 -ncmoe -1", "--n-cpu-moe: expected a number of layers"),
        ("--rpc h:1 -ot blk.0", "-ot/--override-tensor: expected PATTERN=DEVICE"),
        ("--rpc h:1 -ot (=CPU", "-ot/--override-tensor: '(' is not a regular expression"),
        ("--samplers top_k;nonsense", "nonsense"),
        ("--logit-bias x", "-l/--logit-bias: expected TOKEN_ID+BIAS"),
        ("--chat-template-kwargs [1]", "expected a JSON object"),
        ("--api-key ,", "no key given"),
        ("--api-key-file /nonexistent", "--api-key-file /nonexistent: it cannot be read: No such file or directory"),
        ("--chat-template-file /nonexistent", "--chat-template-file /nonexistent"),
        ("--ssl-key-file x", "give both or none"),
        ("--embeddings --cluster-token t", "--embeddings: embeddings are computed on this machine only"),
        ("--reranking --rpc h:1 --discover", "omit --rpc and --discover"),
        ("--lab", "--lab: there are no links"),
        ("--lab 17", "--lab: expected 0 to 16 workers"),
        ("--lab 2 --host 0.0.0.0", "give --api-key KEY, or --host 127.0.0.1"),
    ],
)
def test_errors_name_the_flag(arguments: str, message: str) -> None:
    with pytest.raises(FlagError) as error:
        settings("-m", "x", *arguments.split())
    assert message in str(error.value)


def test_the_environment_fills_in_and_a_flag_wins() -> None:
    environ = {
        "LLAMA_ARG_MODEL": "env.gguf",
        "LLAMA_ARG_PORT": "1234",
        "LLAMA_N_CTX": "512",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_ENDPOINT_SLOTS": "off",
        "LLAMA_ARG_NO_MMAP": "1",
        "LLAMA_API_KEY": "k",
        "LLAMA_ARG_N_GPU_LAYERS": "9",
        "LLAMA_ARG_FLASH_ATTN": "true",
    }
    s = settings("--port", "4321", environ=environ)
    assert (s.source.spec, s.port, s.engine.n_ctx, s.engine.mmap) == ("env.gguf", 4321, 512, False)
    assert s.switches.metrics and not s.switches.slots and s.access.api_keys == (b"k",)
    assert s.engine.split.n_gpu_layers == 9


def spellings() -> list[tuple[list[str], list[str]]]:
    lines = (ROOT / "tests" / "llama_server_flags.txt").read_text().splitlines()[1:]
    return [(names.split(), env.split()) for names, _, env in (line.partition("|") for line in lines)]


def test_every_flag_and_variable_of_llama_server_is_in_the_table() -> None:
    rows = {n: f for f in flags.FLAGS if "serve" in f.commands for n in f.names + f.off_names}
    variables = {e: f for f in rows.values() for e in f.env}
    parser = cli.make_parser("serve")._option_string_actions
    assert len(spellings()) == 256
    for names, env in spellings():
        assert set(names) <= set(parser), names
        assert len({id(rows.get(n)) for n in names}) == 1, f"{names} mean several flags"
        for name in env:
            assert variables[name] is rows[names[0]], name


@pytest.mark.interop
def test_list_of_flags_equals_that_of_llama_server(peer_bin: Path) -> None:
    shown = subprocess.run([peer_bin / "llama-server", "--help"], capture_output=True, text=True, check=True).stdout
    found: list[tuple[list[str], list[str]]] = []
    for line in shown.splitlines():
        names = re.match(r"(?:-{1,2}[A-Za-z][\w.-]*,?\s*)+", line)
        if names and not line.startswith("-----"):
            found.append((re.findall(r"-{1,2}[A-Za-z][\w.-]*", names[0]), []))
        if env := re.findall(r"\(env: (\w+)\)", line):
            found[-1][1].extend(env)
    assert found == spellings()


def test_a_variable_without_meaning_is_named() -> None:
    notes = settings("-m", "x", environ={"GGML_CUDA_NO_FA": "1", "LLAMA_ARG_CACHE_REUSE": "256"}).notes
    assert any(note.startswith("GGML_CUDA_NO_FA: accepted, no effect") for note in notes)
    assert any(note.startswith("LLAMA_ARG_CACHE_REUSE: accepted, no effect") for note in notes)


def test_projector_flags(tmp_path: Path) -> None:
    engine = settings("-m", "x").engine
    assert (engine.mmproj, engine.mmproj_auto, engine.image_min_tokens, engine.image_max_tokens) == (None, True, 0, 0)
    engine = settings("-m", "x", "--no-mmproj", "--image-min-tokens", "8", "--image-max-tokens", "64").engine
    assert (engine.mmproj_auto, engine.image_min_tokens, engine.image_max_tokens) == (False, 8, 64)
    assert settings("-m", "x", environ={"LLAMA_ARG_MMPROJ": "x.gguf"}).engine.mmproj == "x.gguf"
    assert settings("-m", "x", "-mmu", "https://h/p.gguf").engine.mmproj == "https://h/p.gguf"
    with pytest.raises(FlagError, match="at most --image-max-tokens 8"):
        settings("-m", "x", "--image-min-tokens", "9", "--image-max-tokens", "8")
    with pytest.raises(FlagError, match="--image-max-tokens: expected 0 or more"):
        settings("-m", "x", "--image-max-tokens", "-1")
    switches = settings("-m", "x", "--media-path", str(tmp_path), "--media-url").switches
    assert (switches.media_path, switches.media_url) == (str(tmp_path), True)
    with pytest.raises(FlagError, match="--media-path"):
        settings("-m", "x", "--media-path", str(tmp_path / "none"))


def test_older_variables() -> None:
    environ = {"LLAMA_N_THREADS": "3", "LLAMA_N_BATCH": "64", "LLAMA_LOG_VERBOSITY": "10"}
    assert settings("-m", "x", environ=environ).engine.n_threads == 3
    assert settings("-m", "x", environ=environ).engine.n_batch == 64
    assert parsed("-m", "x", environ=environ).log_verbosity == 10


def test_values_with_a_meaning_of_their_own() -> None:
    assert settings("-m", "x", "--metrics-labels").switches.metrics_labels == ()
    assert settings("-m", "x", "--api-prefix", "/llama/").switches.api_prefix == "/llama"
    none = settings("-m", "x", "--dry-sequence-breaker", "a", "--dry-sequence-breaker", "none").defaults.sampling
    assert none.dry_sequence_breakers == ()


def test_flags_reach_the_engine(tmp_path: Path) -> None:
    arguments = (
        "-sps 0.5 --context-shift --cache-ram 64 --max-queue 7 --lora a.gguf,b.gguf --lora-scaled c.gguf:0.5 "
        "--lora-init-without-apply --embeddings --pooling mean --embd-normalize -1 --rope-scaling yarn --rope-scale 4 "
        "--rope-freq-base 1e6 --yarn-orig-ctx 2048 --yarn-ext-factor 0 --yarn-beta-fast -1 "
        "--override-kv tokenizer.ggml.add_bos_token=bool:false,general.name=str:a"
    )
    engine = settings("-m", "x", *arguments.split()).engine
    assert (engine.slot_prompt_similarity, engine.context_shift, engine.cache_ram) == (0.5, True, 64)
    assert engine.max_queue == 7 and engine.embeddings and not engine.reranking and not engine.lora_apply
    assert engine.lora == (("a.gguf", 1.0), ("b.gguf", 1.0), ("c.gguf", 0.5))
    assert (engine.pooling, engine.embd_normalize) == ("mean", -1)
    assert settings("-m", "x", "--rerank").engine.pooling == "rank"
    assert dict(engine.metadata) == {"tokenizer.ggml.add_bos_token": False, "general.name": "a"}
    assert engine.rope == RopeOptions("yarn", freq_base=1e6, freq_scale=0.25, n_ctx_orig=2048, ext_factor=0.0)
    assert settings("-m", "x", "--rope-freq-scale", "0.125").engine.rope == RopeOptions(freq_scale=0.125)
    assert settings("-m", "x", "--rope-freq-base", "0").engine.rope == FILE_ROPE


@pytest.mark.slow
def test_router_for_several_models_or_none(tmp_path: Path) -> None:
    assert not serves_many(parsed("-m", "x")) and not serves_many(parsed("-hf", "u/r"))
    assert not serves_many(parsed("-mu", "http://h/x.gguf"))
    for arguments in ("", "-m a -m b", "--models-dir d", "-m a --models-preset p.ini", "--config c.yaml"):
        flags = parsed(*arguments.split())
        assert serves_many(flags), arguments
        assert serve_settings(flags).source.name == ""
    assert parsed("-m", "a", "--alias", "x=a").alias == ["x=a"]


def test_completion_for_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--completion-bash"]) == 0
    script = capsys.readouterr().out
    line = script + '\nCOMP_WORDS=(llamado serve --ctx-s); COMP_CWORD=2; _llamado; echo "${COMPREPLY[@]}"'
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["--ctx-size"]


def test_bad_environment_values_name_the_variable() -> None:
    with pytest.raises(FlagError, match=r"LLAMA_ARG_PORT \(environment\): expected a whole number"):
        settings("-m", "x", environ={"LLAMA_ARG_PORT": "http"})
    with pytest.raises(FlagError, match="LLAMA_ARG_ENDPOINT_METRICS"):
        settings("-m", "x", environ={"LLAMA_ARG_ENDPOINT_METRICS": "maybe"})


def test_spellings_and_variables_are_unique() -> None:
    for command in cli.COMMANDS:
        names = [n for f in flags.FLAGS if command in f.commands for n in f.names + f.off_names]
        assert len(names) == len(set(names)), command
    rows = [f for f in flags.FLAGS if "serve" in f.commands]
    variables = [e for f in rows for e in f.env]
    assert len(variables) == len(set(variables))
    assert len({f.key for f in rows}) == len(rows)
    assert all(f.help for f in rows) and all(f.commands <= set(cli.COMMANDS) for f in flags.FLAGS)


def test_refused_switches_can_be_turned_off() -> None:
    for flag in flags.FLAGS:
        if flag.kind is Kind.REFUSED and "serve" in flag.commands:
            for name in flag.off_names:
                settings("-m", "x", name)
            for value in flag.off_values:
                settings("-m", "x", flag.names[0], value)


def test_flag_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "flags.md").read_text()
    assert page == flags.markdown(), "run: python -m llamado.flags > docs/flags.md"


def test_exit_codes_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("llamado ")
    assert cli.main(["--help"]) == 0 and "llamado serve" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["serv"]) == 2 and "did you mean serve?" in capsys.readouterr().err
    assert cli.main(["-m", "x"]) == 2 and "no command: try llamado serve -m" in capsys.readouterr().err
    assert cli.main(["bench"]) == 2 and "no model" in capsys.readouterr().err
    assert cli.main(["bench", "-m", "a", "-m", "b"]) == 2 and "one model is expected" in capsys.readouterr().err
    assert cli.main(["wait", "http://h", "--timeout", "0"]) == 2 and "--timeout" in capsys.readouterr().err
    assert cli.main(["serve", "--nonsense"]) == 2
    assert cli.main(["serve", "smollm2"]) == 2 and "to give a model, use -m smollm2" in capsys.readouterr().err
    assert cli.main(["worker", "smollm2"]) == 2 and "-m smollm2" not in capsys.readouterr().err
    assert cli.main(["pull"]) == 2
    assert cli.main(["inspect", "/nonexistent.gguf"]) == 1
    assert cli.main(["worker", "-t", "0"]) == 2 and "-t/--threads" in capsys.readouterr().err
    assert cli.main(["worker", "-m", "x"]) == 2 and "-m/--mem" in capsys.readouterr().err
    assert cli.main(["worker", "-p", "70000"]) == 2 and "-p/--port" in capsys.readouterr().err
    assert cli.main(["worker", "--tls-cert", "x"]) == 2 and "--tls-key" in capsys.readouterr().err
    assert cli.main(["worker", "--tls-client-ca", "x"]) == 2 and "--tls-cert" in capsys.readouterr().err
    assert cli.main(["tap", "--listen-port", "-1"]) == 2 and "--listen-port" in capsys.readouterr().err
    assert cli.main(["tap", "--bandwidth", "fast"]) == 1
    assert cli.main(["tap", "--jitter-ms", "-1"]) == 2 and "--jitter-ms" in capsys.readouterr().err
    assert cli.main(["plan", "--rpc", "h:1", "-ts", "x"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_quantize_help_lists_the_types(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["quantize", "--help"])
    shown = [line.split() for line in capsys.readouterr().out.partition("TYPE, bits per weight")[2].splitlines()[1:]]
    assert {row[0] for row in shown if row} == {kind.name for kind in (*FILE_TYPES, COPY)}
    bits = [float(row[1]) for row in shown if row and row[0] != "COPY"]
    assert bits == sorted(bits) and len(bits) == len(FILE_TYPES)
    for kind in FILE_TYPES:  # the bits of a mixture are close to those of its main type
        assert abs(kind.bits - 8 * kind.default.block_bytes / kind.default.block_size) < 0.25, kind.name


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as exit:
            cli.main([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert exit.value.code == 0 and command in shown
        for flag in re.findall(r"(?<= )(--?[\w-]+) N (?:(?! --?\w).)*?\(default: on\)", shown):
            pytest.fail(f"llamado {command} --help: {flag} is a number, but shown as on")


def help_flags(capsys: pytest.CaptureFixture[str], *arguments: str) -> set[str]:
    """Return the flags in the help of a command."""
    with pytest.raises(SystemExit) as exit:
        cli.main([*arguments])
    assert exit.value.code == 0
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", capsys.readouterr().out))


def test_help_is_abridged_and_help_all_complete(capsys: pytest.CaptureFixture[str]) -> None:
    serve = {f.key: f for f in flags.FLAGS if "serve" in f.commands}
    assert {serve[key].kind for key in flags.COMMON} == {Kind.USED}
    for command in cli.COMMANDS:
        used = [f for f in flags.FLAGS if f.kind is Kind.USED and command in f.commands]
        names = {name for f in used for name in f.names}
        short, whole = help_flags(capsys, command, "--help"), help_flags(capsys, command, "--help-all")
        assert names <= whole
        if len(used) > 40:
            own = {name for f in used for name in f.names if f.key in flags.COMMON or f.commands == {command}}
            if command == "serve":
                own = {name for f in used for name in f.names if f.key in flags.COMMON}
            assert own <= short and "--help-all" in short
            assert len(short & names) < len(names) * 0.6, command
        else:
            assert names <= short
    assert len([f for f in serve.values() if f.key in flags.COMMON]) <= 40
    with pytest.raises(FlagError, match=r"llamado serve --help-all"):
        parsed("--no-such-flag")


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from llamado.commands.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"numpy", "numba", "starlette", "uvicorn", "rich", "jinja2"}


def test_broken_pipe_is_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "llamado", "serve", "--help"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert b"Traceback" not in done.stderr


def test_message_of_a_system_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setitem(cli.COMMANDS, "list", (full, *cli.COMMANDS["list"][1:]))
    assert cli.main(["list"]) == 1
    assert capsys.readouterr().err == "llamado: /some/file: No space left on device (-v shows where)\n"


def test_wrapped_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python raises RuntimeError for exceptions during the creation of a class."""

    def interrupted(*_: object) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setitem(cli.COMMANDS, "list", (interrupted, *cli.COMMANDS["list"][1:]))
    assert cli.main(["list"]) == 130 and capsys.readouterr().err == "\n"
    monkeypatch.setitem(sys.modules, "llamado.commands.cli", InterruptedModule("llamado.commands.cli"))
    assert entry() == 130


class InterruptedModule(types.ModuleType):
    """A module whose import is interrupted by Ctrl-C."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_flags_of_up_are_rejected_after_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--port", "9000"], ["-m", "x.gguf"]):
        assert cli.main(["up", "--nodes", "2", "--", *given]) == 2
        assert "give it before the --" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["-h", "--help", "--help-all", "help"])
def test_help_without_a_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 0 and capsys.readouterr().out == cli.USAGE
