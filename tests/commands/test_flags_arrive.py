"""Each flag, by each spelling and each variable, changes exactly the options that its row names.

Options are the records that a command passes to the packages below (recorded_commands.py). A flag without a row fails.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from recorded_commands import RecordedCommands, Seen
from tiers import first_of
from tiny_models import make_llama
from waiting import until

from llamado.cluster.file import LinkConfig, WorkerConfig
from llamado.commands.verify import generated_prompts
from llamado.flags import FLAGS, Flag, Kind
from llamado.gateway.options import KeyOptions, ReplicaOptions
from llamado.gguf.types import TensorType
from llamado.installation import own_command
from llamado.text.grammar.source import GrammarSource
from llamado.tools.mcp.config import McpServerConfig

COMMANDS = (
    "serve", "run", "perplexity", "bench", "plan", "worker", "tap", "wait", "doctor", "gateway", "verify",
    "quantize", "imatrix", "top", "cluster", "deploy", "up",
)  # fmt: skip
BASE = {
    "serve": "-m @model",
    "run": "-m @model -p hi",
    "perplexity": "-m @model -f @folder/text",
    "bench": "-m @model",
    "plan": "-m @model",
    "worker": "",
    "tap": "",
    "wait": "http://h:1",
    "doctor": "http://h:1",
    "gateway": "--replica http://h:1",
    "verify": "http://h:1 http://h:2",
    "quantize": "@model @folder/out.gguf Q4_K_M",
    "imatrix": "-f @folder/text",
    "top": "http://h:1",
    "cluster": "init --out @folder/tls",
    "deploy": "systemd",
    "up": "",
}
CHATML = "{{ messages[0].content }}"
GONE = "(nothing)"
TEXT = base64.b64encode(b"Hello " * 400).decode()
"""The file `@folder/text`."""
ASKED = {"type": "text", "text": "hi"}
MCP_SERVER = McpServerConfig(name="clock", command=("clock",))


class Row(NamedTuple):
    """`value` (None for a switch) changes the records by `changes`, and by nothing else unless `part` is True.

    `beside`: arguments with and without the flag; `along`: arguments only with the flag; `base`: replaces those of the
    command. `elsewhere`: changes in other commands, if they differ.
    """

    value: str | None
    changes: Mapping[str, Any]
    beside: str = ""
    base: str | None = None
    elsewhere: Mapping[str, Mapping[str, Any]] = {}
    part: bool = False
    along: str = ""


def option(field: str, value: str | None, given: Any, beside: str = "", **more: Any) -> Row:
    """A field of `EngineOptions`, and more of its fields."""
    return Row(value, {f"load.options.{name}": one for name, one in {field: given, **more}.items()}, beside)


def sampling(field: str, value: str | None, given: Any) -> Row:
    return Row(value, {f"load.defaults.sampling.{field}": given})


def default(field: str, value: str | None, given: Any) -> Row:
    return Row(value, {f"load.defaults.{field}": given})


def splitting(
    field: str, value: str | None, given: Any, beside: str = "", labels: tuple[str, ...] = (), **more: Any
) -> Row:
    """`labels`: those that a log line names if there are no devices to divide the model among."""
    changes = {field: given, **more} | ({"given": labels} if labels else {})
    changed = {f"split.{name}": one for name, one in changes.items()}
    return Row(value, {f"load.options.{name}": one for name, one in changed.items()}, f"--rpc h:1,h:2 {beside}")


def drafting(field: str, value: str | None, given: Any, beside: str = "", *, part: bool = False) -> Row:
    return option(f"drafts.{field}", value, given, beside)._replace(part=part)


def pair(names: str, value: str, place: str, along: str, beside: str = "", **more: Any) -> Row:
    """One of two flags that must be given together."""
    given = dict(zip((f"{place}{name}" for name in names.split()), ("c.pem", "k.pem"), strict=True))
    return Row(value, given | more, beside, along=along)


def switch(field: str, value: str | None, given: Any) -> Row:
    return Row(value, {f"server.switches.{field}": given})


def router(value: str, base: str = "", **changes: Any) -> Row:
    return Row(value, {f"router.{name}": given for name, given in changes.items()}, base=base, part=True)


def worker(field: str, value: str | None, given: Any, beside: str = "") -> Row:
    return Row(value, {f"worker.options.{field}": given}, beside)


def tap(field: str, value: str | None, given: Any) -> Row:
    return Row(value, {f"tap.options.{field}": given})


def gateway(field: str, value: str | None, given: Any) -> Row:
    return Row(value, {f"gateway.options.{field}": given})


def verify(field: str, value: str | None, given: Any) -> Row:
    return Row(value, {f"verify.{field}": given})


def quantized(field: str, value: str | None, given: Any, beside: str = "") -> Row:
    return Row(value, {f"quantize.{field}": given}, beside)


def imatrix(field: str, value: str | None, given: Any, **more: Any) -> Row:
    return Row(value, {f"imatrix.options.{field}": given}, **more)


def both(value: str | None, served: Mapping[str, Any], **of_gateway: Any) -> Row:
    """A flag of the server and of the gateway."""
    named = {f"gateway.options.{name.replace('__', '.')}": given for name, given in of_gateway.items()}
    return Row(value, served, elsewhere={"gateway": named})


def deployed(field: str, value: str | None, given: Any) -> Row:
    return Row(value, {f"deploy.deployment.{field}": given})


def up(field: str, value: str, given: Any) -> Row:
    return Row(value, {f"up.config.{field}": given})


def logs(field: str, value: str | None, given: Any, **kw: Any) -> Row:
    return Row(value, {f"logs.{field}": given}, **kw)


OF_TLS = {"gateway.options.ssl_cert": "c.pem", "gateway.options.ssl_key": "k.pem", "tls.checked": ("k.pem", "c.pem")}
REPLICAS = (ReplicaOptions(url="http://a:1"), ReplicaOptions(url="http://b:2"))

ROWS: dict[str, Row] = {
    # the model
    "serve --model": Row("other.gguf", {"load.source.spec": "other.gguf"}, base="--hf-repo u/r"),
    "serve --hf-repo": Row("u/r", {"load.source.hf_repo": "u/r"}),
    "serve --hf-file": Row("f.gguf", {"load.source.hf_file": "f.gguf"}),
    "serve --hf-token": Row("secret", {"environ.HF_TOKEN": "secret"}),
    "serve --offline": Row(None, {"environ.HF_HUB_OFFLINE": "1"}),
    "serve --model-url": Row("http://h/x.gguf", {"load.source.spec": "http://h/x.gguf"}, base="--hf-repo u/r"),
    "serve --cache-list": Row(None, {"listed.cache": True}, part=True),
    "serve --alias": Row("one,two", {"server.aliases": ("one", "two")}),
    "serve --tags": Row("a,b", {"server.tags": ("a", "b")}),
    "serve --mmproj": option("mmproj", "p.gguf", "p.gguf"),
    "serve --mmproj-url": option("mmproj", "http://h/p.gguf", "http://h/p.gguf"),
    "serve --mmproj-auto": option("mmproj_auto", None, False),
    "serve --mmproj-offload": option("mmproj_offload", None, False),
    "serve --mmproj-device": option("mmproj_device", "CUDA1", "CUDA1"),
    "serve --image-min-tokens": option("image_min_tokens", "8", 8),
    "serve --image-max-tokens": option("image_max_tokens", "9", 9),
    "serve --media-path": switch("media_path", "@folder", "@folder"),
    "serve --media-url": switch("media_url", None, True),
    "serve --lora": option("lora", "a.gguf,b.gguf", (("a.gguf", 1.0), ("b.gguf", 1.0))),
    "serve --lora-scaled": option("lora", "a.gguf:0.5", (("a.gguf", 0.5),)),
    "serve --lora-init-without-apply": option("lora_apply", None, False),
    "serve --control-vector": option("control", "a.gguf,b.gguf", (("a.gguf", 1.0), ("b.gguf", 1.0))),
    "serve --control-vector-scaled": option("control", "a.gguf:-0.5", (("a.gguf", -0.5),)),
    "serve --control-vector-layer-range": option("control_layers", "2 5", (2, 5)),
    "serve --override-kv": option("metadata", "general.name=str:other", (("general.name", "other"),)),
    # computing
    "serve --threads": option("n_threads", "3", 3),
    "serve --threads-batch": option("n_threads_batch", "3", 3),
    "serve --ctx-size": option("n_ctx", "256", 256)._replace(
        elsewhere={"bench": {}, "perplexity": {"load.options.n_ctx": 256, "perplexity.n_ctx": 256}}),
    "serve --batch-size": option("n_batch", "256", 256, **{"fit.batch": False}),
    "serve --ubatch-size": option("n_ubatch", "128", 128, **{"fit.batch": False}),
    "serve --parallel": option("n_slots", "2", 2, unified=False),
    "serve --cont-batching": option("cont_batching", None, False),
    "serve --kv-unified": option("unified", None, True, "-np 2"),
    "serve --cache-type-k": option("type_k", "q8_0", "q8_0", **{"fit.cache": False}),
    "serve --cache-type-v": option("type_v", "bf16", "bf16", **{"fit.cache": False}),
    "serve --attn-rot-disable": option("rotated", None, False),
    "serve --memory-f32": option("type_k", None, "f32", **{"type_v": "f32", "fit.cache": False}),
    "serve --mmap": option("mmap", None, False),
    "serve --mlock": option("mlock", None, True),
    "serve --load-mode": option("mlock", "mlock", True, mmap=False),
    "serve --fit": option("fit.on", "off", False),
    "serve --fit-target": option("fit.target", "64,32", (64 << 20, 32 << 20)),
    "serve --fit-ctx": option("fit.least_context", "128", 128),
    "serve --numa": option("numa", "isolate", "isolate"),
    "serve --rope-scaling": option("rope.scaling", "yarn", "yarn"),
    "serve --rope-scale": option("rope.freq_scale", "4", 0.25),
    "serve --rope-freq-base": option("rope.freq_base", "20000", 20000.0),
    "serve --rope-freq-scale": option("rope.freq_scale", "0.125", 0.125),
    "serve --yarn-orig-ctx": option("rope.n_ctx_orig", "128", 128),
    "serve --yarn-ext-factor": option("rope.ext_factor", "0.5", 0.5),
    "serve --yarn-attn-factor": option("rope.attn_factor", "1.5", 1.5),
    "serve --yarn-beta-slow": option("rope.beta_slow", "2", 2.0),
    "serve --yarn-beta-fast": option("rope.beta_fast", "16", 16.0),
    "serve --spec-type": drafting("kinds", "ngram-mod,suffix", ("ngram-mod", "suffix")),
    "serve --spec-default": drafting("kinds", None, ("ngram-mod",)),
    "serve --model-draft": drafting("model.spec", "small", "small", part=True),
    "serve --hf-repo-draft": drafting("model.hf_repo", "u/r", "u/r", part=True),
    "serve --spec-draft-device": drafting("split.devices", "RPC0", ("RPC0",), "--rpc h:1", part=True),
    "serve --spec-draft-ngl": drafting("split.n_gpu_layers", "3", 3, "--rpc h:1 --spec-draft-device RPC0"),
    "serve --spec-draft-threads": option("drafts.n_threads", "3", 3, **{"drafts.n_threads_batch": 3}),
    "serve --spec-draft-threads-batch": drafting("n_threads_batch", "3", 3),
    "serve --spec-draft-type-k": drafting("type_k", "q8_0", "q8_0"),
    "serve --spec-draft-type-v": drafting("type_v", "q8_0", "q8_0"),
    "serve --spec-draft-n-max": drafting("most", "5", 5),
    "serve --spec-draft-n-min": drafting("least", "2", 2),
    "serve --spec-draft-p-min": drafting("p_min", "0.5", 0.5),
    "serve --lookup-cache-static": drafting("lookup_static", "c", "c"),
    "serve --lookup-cache-dynamic": drafting("lookup_dynamic", "c", "c"),
    # several machines
    "serve --rpc": option("split.rpc", "h:1,tls://h:2", ("h:1", "tls://h:2"))._replace(part=True),
    "serve --tensor-split": splitting("tensor_split", "3,1", (3.0, 1.0), labels=("-ts/--tensor-split",)),
    "serve --gpu-layers": splitting("n_gpu_layers", "1", 1, labels=("-ngl/--gpu-layers",)),
    "serve --device": splitting("devices", "CPU", ("CPU",), labels=("-dev/--device",)),
    "serve --override-tensor": splitting(
        "overrides", "x=CPU", (("x", "CPU"),), labels=("-ot/--override-tensor",)),
    "serve --cpu-moe": splitting(
        "overrides", None, ((r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),), labels=("-cmoe/--cpu-moe",)),
    "serve --n-cpu-moe": splitting(
        "overrides", "2", ((r"^blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),),
        labels=("-ncmoe/--n-cpu-moe",)),
    "serve --n-cpu-ffn": splitting(
        "overrides", "1", ((r"^blk\.(0)\.ffn_(up|down|gate)\.", "CPU"),), labels=("-ncffn/--n-cpu-ffn",)),
    "serve --kv-offload": splitting("kv_offload", None, False, labels=("-kvo/--kv-offload",)),
    "serve --split-mode": splitting("mode", "none", "none", labels=("-sm/--split-mode",), main_gpu=0),
    "serve --main-gpu": splitting("main_gpu", "1", 1, "-sm none", labels=("-sm/--split-mode", "-mg/--main-gpu")),
    "serve --rpc-failover": splitting("failover", "3", 3.0),
    "serve --rpc-wait": splitting("wait", "9", 9.0),
    "serve --rpc-request-wait": splitting("request_wait", "9", 9.0),
    "serve --rpc-connect-timeout": splitting("connect_timeout", "9", 9.0),
    "serve --rpc-alive-timeout": splitting("alive_timeout", "9", 9.0),
    "serve --rpc-ring": splitting("ring", "off", False),
    "serve --rpc-ca": splitting("ca", "ca.pem", "ca.pem"),
    "serve --rpc-cert": pair("cert key", "c.pem", "load.options.split.", "--rpc-key k.pem", "--rpc h:1"),
    "serve --rpc-key": pair("cert key", "k.pem", "load.options.split.", "--rpc-cert c.pem", "--rpc h:1"),
    "serve --list-devices": Row(None, {"listed.devices": True}, part=True),
    # sampling
    "serve --predict": default("n_predict", "77", 77)._replace(
        elsewhere={"run": {"load.defaults.n_predict": 77, "chat.n_predict": 77}}),
    "serve --keep": default("n_keep", "5", 5),
    "serve --reverse-prompt": default("stop", "END", ("END",)),
    "serve --seed": sampling("seed", "42", 42),
    "serve --samplers": sampling("samplers", "top_p;top_k", ("top_p", "top_k")),
    "serve --sampler-seq": sampling("samplers", "pk", ("top_p", "top_k")),
    "serve --temp": sampling("temperature", "0.5", 0.5),
    "serve --top-k": sampling("top_k", "7", 7),
    "serve --top-p": sampling("top_p", "0.5", 0.5),
    "serve --min-p": sampling("min_p", "0.25", 0.25),
    "serve --typical": sampling("typical_p", "0.5", 0.5),
    "serve --repeat-last-n": sampling("repeat_last_n", "9", 9),
    "serve --repeat-penalty": sampling("repeat_penalty", "1.5", 1.5),
    "serve --presence-penalty": sampling("presence_penalty", "0.5", 0.5),
    "serve --frequency-penalty": sampling("frequency_penalty", "0.5", 0.5),
    "serve --ignore-eos": sampling("ignore_eos", None, True),
    "serve --logit-bias": sampling("logit_bias", "5-1.5", {5: -1.5}),
    "serve --top-nsigma": sampling("top_n_sigma", "1.5", 1.5),
    "serve --xtc-probability": sampling("xtc_probability", "0.5", 0.5),
    "serve --xtc-threshold": sampling("xtc_threshold", "0.25", 0.25),
    "serve --dry-multiplier": sampling("dry_multiplier", "0.5", 0.5),
    "serve --dry-base": sampling("dry_base", "2", 2.0),
    "serve --dry-allowed-length": sampling("dry_allowed_length", "3", 3),
    "serve --dry-penalty-last-n": sampling("dry_penalty_last_n", "9", 9),
    "serve --dry-sequence-breaker": sampling("dry_sequence_breakers", "x", ("x",)),
    "serve --adaptive-target": sampling("adaptive_target", "0.5", 0.5),
    "serve --adaptive-decay": sampling("adaptive_decay", "0.5", 0.5),
    "serve --dynatemp-range": sampling("dynatemp_range", "0.5", 0.5),
    "serve --dynatemp-exp": sampling("dynatemp_exponent", "2", 2.0),
    "serve --mirostat": sampling("mirostat", "2", 2),
    "serve --mirostat-lr": sampling("mirostat_eta", "0.5", 0.5),
    "serve --mirostat-ent": sampling("mirostat_tau", "4", 4.0),
    **{
        f"serve --{name}": switch("grammar", value, GrammarSource(kind, text))
        for name, value, kind, text in (
            ("grammar", 'root ::= "a"', "gbnf", 'root ::= "a"'),
            ("grammar-file", "@folder/grammar", "gbnf", 'root ::= "b"'),
            ("json-schema", "{}", "json_schema", "{}"),
            ("json-schema-file", "@folder/schema", "json_schema", '{"type": "object"}'),
        )
    },
    # the server
    "serve --host": Row("::1,h", {"listen.hosts": ("::1", "h"), "server.hosts": ("::1", "h"),
                                 "server.access.allowed_hosts": ("h",)}, elsewhere={
        "gateway": {"listen.hosts": ("::1", "h"), "gateway.options.access.allowed_hosts": ("h",)}}),
    "serve --port": Row("99", {"listen.port": 99, "server.port": 99}),
    "serve --reuse-port": Row(None, {"listen.reuse_port": True, "server.reuse_port": True}),
    "serve --api-key": both("a,b", {"server.access.api_keys": (b"a", b"b")}, access__api_keys=(b"a", b"b")),
    "serve --api-key-file": both("@folder/keys", {"server.access.api_keys": (b"one", b"two")},
                                 access__api_keys=(b"one", b"two")),
    "serve --ssl-cert-file": pair("ssl_cert ssl_key", "c.pem", "server.", "--ssl-key-file k.pem",
                                  **{"tls.checked": ("k.pem", "c.pem")})._replace(elsewhere={"gateway": OF_TLS}),
    "serve --ssl-key-file": pair("ssl_cert ssl_key", "k.pem", "server.", "--ssl-cert-file c.pem",
                                 **{"tls.checked": ("k.pem", "c.pem")})._replace(elsewhere={"gateway": OF_TLS}),
    "serve --cors-origins": both("http://a", {"server.access.cors_origins": "http://a"}, access__cors_origins="http://a"),
    "serve --cors": both(None, {"server.access.cors_origins": "*"}, access__cors_origins="*"),
    "serve --allowed-hosts": both("a,.b", {"server.access.allowed_hosts": ("a", ".b")},
                                  access__allowed_hosts=("a", ".b")),
    "serve --cors-methods": both("PUT", {"server.access.cors_methods": "PUT"}, access__cors_methods="PUT"),
    "serve --cors-headers": both("X-A", {"server.access.cors_headers": "X-A"}, access__cors_headers="X-A"),
    "serve --cors-credentials": both(None, {"server.access.cors_credentials": False}, access__cors_credentials=False),
    "serve --metrics": switch("metrics", None, True),
    "serve --metrics-labels": both("a=b", {"server.switches.metrics_labels": (("a", "b"),)}, labels={"a": "b"}),
    "serve --slots": switch("slots", None, False),
    "serve --props": switch("props", None, True),
    "serve --cache-prompt": default("cache_prompt", None, False),
    "serve --sse-ping-interval": switch("sse_ping_interval", "5", 5),
    "serve --chat-template": option("chat_template", CHATML, CHATML),
    "serve --chat-template-file": option("chat_template", "@folder/template", "{{ messages }}"),
    "serve --chat-template-kwargs": switch("chat_template_kwargs", '{"a": 1}', {"a": 1}),
    "serve --prefill-assistant": switch("prefill_assistant", None, False),
    "serve --jinja": switch("jinja", None, False),
    "serve --skip-chat-parsing": switch("skip_chat_parsing", None, True),
    "serve --reasoning-format": switch("reasoning_format", "none", "none"),
    "serve --reasoning": switch("reasoning", "off", "off"),
    "serve --reasoning-effort": switch("reasoning_effort", "low", "low"),
    "serve --reasoning-budget": switch("reasoning_budget", "9", 9),
    "serve --reasoning-budget-message": switch("reasoning_budget_message", "done", "done"),
    "serve --reasoning-preserve": switch("reasoning_preserve", None, False),
    "serve --timeout": both("20", {"server.timeout": 20}, timeout=20),
    "serve --threads-http": Row("3", {"server.threads_http": 3}),
    "serve --max-queue": option("max_queue", "7", 7),
    "serve --max-prompts": switch("max_prompts", "3", 3),
    "serve --max-connections": Row("9", {"server.max_connections": 9}),
    "serve --slot-prompt-similarity": option("slot_prompt_similarity", "0.5", 0.5),
    "serve --cache-ram": option("cache_ram", "64", 64),
    "serve --cache-disk": option("cache_disk", "@folder/c", "@folder/c"),
    "serve --cache-disk-size": option("cache_disk_size", "5M", 5 << 20),
    "serve --ctx-checkpoints": option("ctx_checkpoints", "7", 7),
    "serve --checkpoint-min-step": option("checkpoint_min_step", "70", 70),
    "serve --cache-idle-slots": option("cache_idle_slots", None, "clear"),
    "serve --special": default("special", None, True),
    "serve --spm-infill": switch("spm_infill", None, True),
    "serve --context-shift": option("context_shift", None, True),
    "serve --embedding": option("embeddings", None, True),
    "serve --rerank": option("reranking", None, True, pooling="rank"),
    "serve --pooling": option("pooling", "last", "last"),
    "serve --embd-normalize": option("embd_normalize", "-1", -1),
    "serve --slot-save-path": switch("slot_save_path", "@folder", "@folder"),
    "serve --api-prefix": switch("api_prefix", "/llama", "/llama"),
    "serve --path": switch("static_path", "@folder", "@folder"),
    "serve --tools": Row("read_file,get_info", {"server.tools.builtin": ("read_file", "get_info")}),
    "serve --tools-folder": Row("@folder/models", {"server.tools.folder": "@folder/models"}, "--tools all"),
    "serve --tools-runtime": Row("docker:alpine", {"server.tools.runtime": "docker:alpine"}, "--tools all"),
    "serve --mcp-servers-config": Row("@folder/mcp.json", {"server.tools.servers": (MCP_SERVER,)}),
    "serve --mcp-servers-json": Row('{"mcpServers":{"clock":{"command":"clock"}}}',
                                    {"server.tools.servers": (MCP_SERVER,)}),
    "serve --agent": Row(None, {"server.tools.builtin": ("all",), "server.tools.proxy": True}),
    "serve --ui-mcp-proxy": Row(None, {"server.tools.proxy": True}),
    "serve --ui": switch("page", None, False),
    "serve --ui-config": switch("page_settings", '{"theme":"dark"}', {"theme": "dark"}),
    "serve --chats": switch("chats", "@folder/chats", "@folder/chats"),
    "serve --ui-config-file": switch("page_settings", "@folder/ui.json", {"theme": "light"}),
    "serve --cluster-token": switch("cluster_token", "secret", "secret")._replace(part=True),
    "serve --discover": Row(None, {"server.discover": True}, part=True),
    "serve --lab": Row("2", {"lab.n_own": 2}, part=True),
    "serve --hang-timeout": switch("hang_timeout", "9", 9.0),
    "serve --sleep-idle-seconds": switch("sleep_idle_seconds", "60", 60),
    # a router
    "serve --models-dir": router("@folder/models", models=("found",)),
    "serve --models-preset": router("@folder/presets.ini", models=("preset",)),
    "serve --llama-swap": router("@folder/swap.yaml", models=("swapped",)),
    "serve --models-max": Row("2", {"router.limits.models_max": 2}, base="--models-dir @folder/models"),
    "serve --models-memory": Row("2G", {"router.limits.memory": 2 << 30}, base="--models-dir @folder/models"),
    "serve --models-autoload": Row(None, {"router.autoload": False}, base="--models-dir @folder/models"),
    # logs
    "serve --verbose": Row(None, {"logs.verbosity": 9, "server.switches.verbose": True}, elsewhere={
        "worker": {"logs.verbose": True}, "tap": {"logs.verbose": True}, "plan": {}, "gateway": {"logs.verbosity": 9}}),
    "serve --verbosity": logs("verbosity", "1", 1, elsewhere={"plan": {}}),
    "serve --log-file": logs("file", "a.log", "a.log"),
    "serve --log-disable": logs("disabled", None, True),
    "serve --log-jsonl": logs("as_json", None, True),
    "serve --log-format": logs("as_json", "json", True),
    "serve --log-timestamps": logs("timestamps", None, False),
    "serve --log-prefix": logs("prefix", None, True),
    "serve --log-colors": logs("colors", "on", "on"),
    "serve --otel": Row(None, {"server.otel": True}),
    # other commands
    "run --prompt": Row("ask", {"chat.messages": [{"role": "user", "content": "ask"}]}),
    "run --image": Row("@folder/text", {"chat.messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{TEXT}"}}, ASKED]}]}),
    "run --audio": Row("@folder/text", {"chat.messages": [{"role": "user", "content": [
        {"type": "input_audio", "input_audio": {"data": TEXT, "format": "wav"}}, ASKED]}]}),
    "run --url": Row("http://h:1", {"remote.url": "http://h:1", "remote.model": "@model"}, part=True),
    "run --api-key": Row("k", {"remote.key": "k"}, beside="--url http://h:1"),
    "run --markdown": Row(None, {"chat.markdown": False}),
    "run --system-prompt": Row("be", {"chat.messages": [{"role": "system", "content": "be"},
                                                        {"role": "user", "content": "hi"}]}),
    "bench --n-prompt": Row("64,32", {"bench.prompts": [64, 32], "bench.profiled": [(64, 0), (32, 0), (1, 127)],
                                      "load.options.n_ctx": 128}, "--profile"),
    "bench --n-gen": Row("16", {"bench.generations": [16], "bench.profiled": [(512, 0), (1, 15)]}, "--profile"),
    "bench --n-depth": Row("0,32", {"bench.depths": [0, 32], "load.options.n_ctx": 544,
                                    "bench.profiled": [(512, 0), (1, 127), (512, 32), (1, 159)]}, "--profile"),
    "bench --profile": Row(None, {"bench.profiled": [(512, 0), (1, 127)]}),
    "bench --roofline": Row(None, {"roofline.passes": [(512, 0), (1, 127)]}, part=True),
    "bench --n-parallel": Row("2", {"bench.batches": [(512, 2, 2), *[(512, 128, 2)] * 5]}, part=True),
    "bench --repetitions": Row("2", {"bench.repetitions": 2}),
    "bench --output": Row("json", {"printed": "["}),
    "bench --latency": Row("0,7", {"latency.delays": [0.0, 0.0, 7.0] * 3}, "-r 1", part=True),
    "bench --nodes": Row("3", {"latency.workers": 2, "latency.delays": [0.0, 5.0]}, "--latency 5 -r 1", part=True),
    "bench --compare": Row("streams", {"latency.n_streams": 8}, "--latency 5 --nodes 3", part=True),
    "bench --both-ways": Row(None, {"latency.both_ways": True}, "--latency 5 --nodes 2"),
    "bench --out": Row("drawn", {"latency.folder": "drawn"}, "--latency 5 --nodes 2"),
    "perplexity --file": Row("@folder/long", {"perplexity.n_tokens": 1000}),
    "perplexity --chunks": Row("3", {"perplexity.chunks": 3}),
    "worker --host": worker("host", "0.0.0.0", "0.0.0.0"),
    "worker --port": worker("port", "99", 99),
    "worker --threads": worker("threads", "7", 7),
    "worker --device": worker("devices", "CPU,GPU", ("CPU", "GPU")),
    "worker --cache": worker("cache", None, True),
    "worker --mem": worker("mem", "512", 512 << 20),
    "worker --tls-cert": pair("tls_cert tls_key", "c.pem", "worker.options.", "--tls-key k.pem"),
    "worker --tls-key": pair("tls_cert tls_key", "k.pem", "worker.options.", "--tls-cert c.pem"),
    "worker --tls-client-ca": worker("tls_client_ca", "a.pem", "a.pem", "--tls-cert c.pem --tls-key k.pem"),
    "worker --join": worker("join", "a:1,https://b:2", ("a:1", "https://b:2"), "--token t"),
    "worker --token": worker("token", "t", "t"),
    "worker --share": worker("share", "2.5", 2.5),
    "worker --protocol": worker("protocol", "8", 8),
    "worker --models-dir": worker("models", "/", ("/",)),
    "worker --no-own-files": worker("own_files", None, False),
    "worker --no-ring": worker("ring", None, False),
    "worker --announce": worker("announce", None, True),
    "worker --allow": worker("allow", "10.0.0.0/8,::1", ("10.0.0.0/8", "::1")),
    "tap --listen-host": tap("listen_host", "h", "h"),
    "tap --listen-port": tap("listen_port", "9", 9),
    "tap --target-host": tap("target_host", "h", "h"),
    "tap --target-port": tap("target_port", "9", 9),
    "tap --latency-ms": tap("latency_ms", "5", 5.0),
    "tap --jitter-ms": tap("jitter_ms", "5", 5.0),
    "tap --bandwidth": tap("bandwidth", "1M", 1e6),
    "tap --all": tap("all", None, True),
    "tap --trace": tap("trace", "f", "f"),
    "wait --timeout": Row("5", {"wait.timeout": 5.0}),
    "wait --interval": Row("1", {"wait.interval": 1.0}),
    "wait --pid": Row("5", {"wait.pid": 5}, base=""),
    "doctor --model": Row("m.gguf", {"doctor.what.models": ("m.gguf",)}),
    "doctor --rpc": Row("h:1,h:2", {"doctor.split.rpc": ("h:1", "h:2")}, part=True),
    "doctor --rpc-ca": Row("a.pem", {"doctor.split.ca": "a.pem", "doctor.options.split.ca": "a.pem"}, "--rpc h:1"),
    "doctor --rpc-cert": Row("c.pem", {"doctor.split.cert": "c.pem", "doctor.options.split.cert": "c.pem"},
                             "--rpc h:1"),
    "doctor --rpc-key": Row("k.pem", {"doctor.split.key": "k.pem", "doctor.options.split.key": "k.pem"},
                            "--rpc h:1"),
    "doctor --host": Row("0.0.0.0", {"doctor.machine.host": "0.0.0.0"}),
    "doctor --port": Row("99", {"doctor.machine.port": 99}),
    "doctor --api-key": Row("secret", {"doctor.key": "secret"}),
    "doctor --threads": Row("7", {"doctor.machine.threads": 7}),
    "doctor --ctx-size": Row("256", {"doctor.options.n_ctx": 256, "doctor.context_given": True}),
    "doctor --parallel": Row("2", {"doctor.options.n_slots": 2, "doctor.options.unified": False}),
    "doctor --cache-type-k": Row("q8_0", {"doctor.options.type_k": "q8_0"}),
    "doctor --cache-type-v": Row("q8_0", {"doctor.options.type_v": "q8_0"}),
    "doctor --mlock": Row(None, {"doctor.options.mlock": True, "doctor.machine.mlock": True}),
    "doctor --timeout": Row("5.5", {"doctor.timeout": 5.5}),
    "doctor --patience": Row("2", {"doctor.patience": 2.0}),
    "doctor --json": Row(None, {"printed": "{"}),
    "gateway --replica": gateway("replicas", "http://a:1,http://b:2", REPLICAS)._replace(base="--admin-key k"),
    "gateway --backup": gateway("replicas", "http://b:2", (*REPLICAS[:1], replace(REPLICAS[1], backup=True)))._replace(
        base="--replica http://a:1"),
    "gateway --config": Row("@folder/gateway.yaml", {"gateway.options.patience": 3.0}),
    "gateway --replica-key": gateway("replicas", "k", (replace(REPLICAS[0], key="k"),))._replace(
        base="--replica http://a:1"),
    "gateway --admin-key": gateway("admin_key", "k", "k"),
    "gateway --key-file": gateway("keys", "@folder/keys.yaml", (KeyOptions(name="n", key="k"),)),
    "gateway --quota-file": gateway("quota_file", "q.json", Path("q.json"))._replace(
        base="--replica http://a:1 --key-file @folder/keys.yaml"),
    "gateway --health-interval": gateway("health_interval", "3", 3.0),
    "gateway --health-timeout": gateway("health_timeout", "3", 3.0),
    "gateway --stall-timeout": gateway("stall_timeout", "3", 3.0),
    "gateway --patience": gateway("patience", "3", 3.0),
    "verify --prompts": verify("prompts", "@folder/keys", ("one", "# two", "two")),
    "verify --count": verify("prompts", "2", tuple(generated_prompts(2))),
    "verify --parallel": verify("parallel", "3", 3),
    "verify --n-predict": verify("n_predict", "3", 3),
    "verify --temp": verify("temperature", "0.5", 0.5),
    "verify --api-key": verify("key", "k", "k"),
    "verify --json": Row(None, {"printed": "{"}),
    "quantize --allow-requantize": quantized("allow_requantize", None, True),
    "quantize --leave-output-tensor": quantized("type_options.keep_output", None, True),
    "quantize --pure": quantized("type_options.pure", None, True),
    "quantize --imatrix": quantized("imatrix", "i.gguf", ["blk.0.a", "blk.0.b"]),
    "quantize --include-weights": quantized("imatrix", "0.a", ["blk.0.a"], "--imatrix i.gguf"),
    "quantize --exclude-weights": quantized("imatrix", "0.a", ["blk.0.b"], "--imatrix i.gguf"),
    "quantize --output-tensor-type": quantized("type_options.output", "q8_0", TensorType.Q8_0),
    "quantize --token-embedding-type": quantized("type_options.embedding", "iq4_XS", TensorType.IQ4_XS),
    "quantize --tensor-type": quantized("type_options.types", "attn_Q=q8_0", [("attn_q", TensorType.Q8_0)]),
    "quantize --tensor-type-file": quantized("type_options.types", "@folder/types",
                                             [("a", TensorType.Q8_0), ("b", TensorType.F16)]),
    "quantize --prune-layers": quantized("prune", "1,3", frozenset({1, 3})),
    "quantize --keep-split": quantized("keep_split", None, True),
    "quantize --override-kv": quantized("overrides", "a.b=int:3", [("a.b", 3)]),
    "quantize --dry-run": quantized("written", None, GONE),
    "imatrix --model": imatrix("model", "m.gguf", "m.gguf"),
    "imatrix --file": imatrix("text_file", "t", "t", base="--in-file i.gguf"),
    "imatrix --output": imatrix("output", "o.gguf", Path("o.gguf")),
    "imatrix --ctx-size": imatrix("n_ctx", "64", 64),
    "imatrix --threads": imatrix("n_threads", "3", 3),
    "imatrix --rpc": imatrix("rpc", "a:1,b:2", ("a:1", "b:2"), base="--in-file i.gguf"),
    "imatrix --chunk": imatrix("first", "2", 2),
    "imatrix --chunks": imatrix("chunks", "2", 2),
    "imatrix --ppl": imatrix("perplexity", None, False),
    "imatrix --process-output": imatrix("head", None, True),
    "imatrix --parse-special": imatrix("special", None, True),
    "imatrix --output-frequency": imatrix("every", "2", 2),
    "imatrix --save-frequency": imatrix("copies", "2", 2),
    "imatrix --output-format": imatrix("legacy", "dat", True),
    "imatrix --in-file": imatrix("before", "a,b", ("a", "b")),
    "imatrix --show-statistics": Row(None, {"imatrix.shown": Path("i.gguf")}, base="--in-file i.gguf", part=True),
    "top --once": Row(None, {"top.once": True}),
    "top --json": Row(None, {"top.as_json": True}),
    "top --interval": Row("5", {"top.interval": 5.0}),
    "top --api-key": Row("k", {"top.key": "k"}),
    "cluster --out": Row("@folder/others", {"cluster.folder": "others"}, base="init"),
    "cluster --server": Row("a,10.0.0.1", {"cluster.server": ("a", "10.0.0.1")}),
    "cluster --worker": Row("w,10.0.0.2", {"cluster.workers": (("w", "10.0.0.2"),)}),
    "cluster --workers": Row("2", {"cluster.workers": ((), ())}),
    "cluster --days": Row("9", {"cluster.days": 9}),
    "deploy --name": deployed("name", "mine", "mine"),
    "deploy --replicas": deployed("replicas", "3", 3),
    "deploy --workers": deployed("workers", "2", 2),
    "deploy --port": deployed("port", "9000", 9000),
    "deploy --worker-port": deployed("worker_port", "9000", 9000),
    "deploy --image": deployed("image", "mine:1", "mine:1"),
    "deploy --program": deployed("program", "/opt/llamado", "/opt/llamado"),
    "deploy --models": deployed("models", "/data", "/data"),
    "deploy --memory": deployed("memory", "8G", "8G"),
    "deploy --cpus": deployed("cpus", "2", 2.0),
    "deploy --tls": deployed("tls", None, True),
    "deploy --key": deployed("key", None, True),
    "deploy --domain": deployed("domain", "llm.example", "llm.example"),
    "deploy --gateway": deployed("gateway", None, ()),
    "deploy --lws": deployed("leader_worker_set", None, True),
    "deploy --out": Row("folder", {"deploy.folder": Path("folder")}),
    "up --model": up("model", "x.gguf", "x.gguf"),
    "up --nodes": up("workers", "3", 2),
    "up --latency": up("workers", "20,0", (WorkerConfig(link=LinkConfig(latency=20.0)), WorkerConfig())),
    "up --host": up("host", "0.0.0.0", "0.0.0.0"),
    "up --port": up("port", "9", 9),
    "up --replicas": up("replicas", "3", 3),
    "up --engine": up("engine", "llama.cpp", "llama.cpp"),
    "up --on": up("on", "ray", "ray"),
    "up --detach": Row(None, {"up.detach": True}),
    "up --name": up("name", "n", "n"),
    "up --log-folder": up("log_folder", "f", "f"),
}  # fmt: skip


def home(flag: Flag) -> str:
    """Return the command of the flag's row."""
    return next(command for command in COMMANDS if command in flag.commands)


def key(flag: Flag) -> str:
    return f"{home(flag)} {next((name for name in flag.names if name.startswith('--')), flag.names[0])}"


def arguments_of(flag: Flag, name: str, value: str | None) -> list[str]:
    """Return the arguments that set a flag by one of its spellings."""
    if value is None:
        return [name]
    if flag.n_values > 1:
        return [name, *value.split()]
    return [f"{name}={value}"] if name.startswith("--") and value.startswith("-") else [name, value]


USED = [flag for flag in FLAGS if flag.kind is Kind.USED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("flags")
    make_llama(found / "tiny.gguf", n_vocab=320)
    texts = {
        "text": "Hello " * 400, "long": "a" * 1000, "keys": "one\n# two\ntwo\n", "template": "{{ messages }}",
        "grammar": 'root ::= "b"',
        "ui.json": '{"theme": "light"}', "mcp.json": '{"mcpServers": {"clock": {"command": "clock"}}}',
        "schema": '{"type": "object"}',
        "presets.ini": "[preset]\nmodel = x.gguf\n", "types": "a=q8_0\nb=F16",
        "gateway.yaml": "patience: 3", "keys.yaml": "[{name: n, key: k}]",
        "swap.yaml": "models:\n  swapped:\n    cmd: llamado serve --port ${PORT} -m x.gguf\n",
    }  # fmt: skip
    for name, text in texts.items():
        (found / name).write_text(text)
    (found / "models").mkdir()
    (found / "models" / "found.gguf").write_bytes((found / "tiny.gguf").read_bytes())
    return found


class Outcome(NamedTuple):
    code: int
    seen: Seen
    warnings: list[str]
    err: str


class Runs:
    """Runs commands, and caches outcomes of arguments."""

    def __init__(self, commands: RecordedCommands, folder: Path) -> None:
        self._commands, self._folder = commands, folder
        self._outcomes: dict[tuple[str, ...], Outcome] = {}

    def fill(self, text: str) -> str:
        return text.replace("@model", str(self._folder / "tiny.gguf")).replace("@folder", str(self._folder))

    def run(
        self, capsys: pytest.CaptureFixture[str], command: str, arguments: str | list[str], **environ: str
    ) -> Outcome:
        given = arguments.split() if isinstance(arguments, str) else arguments
        known = (command, *given)
        if not environ and known in self._outcomes:
            return self._outcomes[known]
        capsys.readouterr()
        filled = {name: self.fill(value) for name, value in environ.items()}
        code, seen, warnings = self._commands.run(command, [self.fill(argument) for argument in given], filled)
        out, err = capsys.readouterr()
        if command in ("bench", "verify", "doctor"):
            seen["printed"] = out[:1]
        outcome = Outcome(code, seen, [*warnings, *err.splitlines()], err)
        if not environ:
            self._outcomes[known] = outcome
        return outcome


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # for default folders
        yield Runs(RecordedCommands(patch), folder)


def changes(before: Seen, after: Seen) -> dict[str, Any]:
    paths = {*before, *after}
    return {p: after.get(p, GONE) for p in paths if before.get(p, GONE) != after.get(p, GONE)}


def expected(runs: Runs, row: Row, command: str, base: Outcome, at_home: bool) -> dict[str, Any]:
    """Return the changes of the row that a command can show: all of them in the home command of the flag."""
    wanted = dict(row.elsewhere.get(command, row.changes))
    if command not in row.elsewhere and not at_home:
        places = {path.partition(".")[0] for path in base.seen} | {"environ", "listed"}
        wanted = {path: given for path, given in row.changes.items() if path.partition(".")[0] in places}
    return {path: runs.fill(given) if isinstance(given, str) else given for path, given in wanted.items()}


def check(runs: Runs, flag: Flag, row: Row, command: str, base: Outcome, after: Outcome, how: str) -> None:
    assert after.code == base.code == 0, (how, after.err)
    found, wanted = changes(base.seen, after.seen), expected(runs, row, command, base, command == home(flag))
    if row.part:
        found = {path: given for path, given in found.items() if path in wanted}
    assert found == wanted, f"{command} {how}"


def test_every_flag_has_its_row() -> None:
    assert {key(flag) for flag in USED} == set(ROWS), "a flag without a row, or a row without a flag"
    assert len({key(flag) for flag in USED}) == len(USED)


FIRST = {command: key(next(flag for flag in USED if command in flag.commands and flag.env)) for command in COMMANDS
         if any(command in flag.commands and flag.env for flag in USED)}  # fmt: skip
"""For each command, a flag with a variable."""


@pytest.mark.parametrize("variables", first_of(["of some commands", "of all commands"]))
@pytest.mark.parametrize("flag", USED, ids=key)
def test_a_flag_arrives_where_it_acts(
    runs: Runs, capsys: pytest.CaptureFixture[str], flag: Flag, variables: str
) -> None:
    """All commands read variables alike: in each run those of a flag's home, and one of each other command."""
    row = ROWS[key(flag)]
    for command in (command for command in COMMANDS if command in flag.commands):
        start = BASE[command] if row.base is None else row.base
        if row.base is not None and command not in ("serve", "plan"):
            start += {"run": " -p hi", "perplexity": " -f @folder/text"}.get(command, "")
        start = f"{start} {row.beside}"
        base = runs.run(capsys, command, start)
        names = flag.off_names if flag.type == "bool" and flag.default is True else flag.names
        for name in names if command == home(flag) else names[:1]:
            after = runs.run(capsys, command, f"{start} {row.along}".split() + arguments_of(flag, name, row.value))
            check(runs, flag, row, command, base, after, name)
        text = row.value if row.value is not None else "off" if flag.default is True else "1"
        every = command == home(flag) or key(flag) == FIRST[command] or variables == "of all commands"
        for variable in flag.env if every else ():
            after = runs.run(capsys, command, f"{start} {row.along}", **{variable: text})
            check(runs, flag, row, command, base, after, variable)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.kind is Kind.MEANINGLESS], ids=key)
def test_a_flag_without_effect_gives_a_warning(runs: Runs, capsys: pytest.CaptureFixture[str], flag: Flag) -> None:
    value = None if flag.type == "bool" else (flag.choices or ("1",))[0]
    for command in (command for command in COMMANDS if command in flag.commands):
        base = runs.run(capsys, command, BASE[command])
        given = [arguments_of(flag, name, value) for name in flag.names] + [[name] for name in flag.off_names]
        outcomes = [(flag.label, runs.run(capsys, command, BASE[command].split() + words)) for words in given]
        outcomes += [(name, runs.run(capsys, command, BASE[command], **{name: value or "1"})) for name in flag.env]
        for label, after in outcomes:
            assert after.code == 0 and changes(base.seen, after.seen) == {}
            (warning,) = [line for line in after.warnings if "no effect here" in line]
            assert label in warning and flag.help in warning


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.kind is Kind.REFUSED], ids=key)
def test_a_refused_flag_names_itself_and_the_reason(runs: Runs, capsys: pytest.CaptureFixture[str], flag: Flag) -> None:
    value = None if flag.type == "bool" else "1"
    for command in (command for command in COMMANDS if command in flag.commands):
        refused = [runs.run(capsys, command, BASE[command].split() + arguments_of(flag, n, value)) for n in flag.names]
        refused += [runs.run(capsys, command, BASE[command], **{name: value or "1"}) for name in flag.env]
        for outcome, name in zip(refused, (*(flag.label for _ in flag.names), *flag.env), strict=True):
            assert outcome.code == 2 and f"{name}: {flag.help}" in outcome.err
            assert set(outcome.seen) <= {f"environ.{variable}" for variable in flag.env}, "the command has started"


def test_an_open_address_without_a_key_is_said(
    runs: Runs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(arguments: str) -> list[str]:
        caplog.clear()
        assert runs.run(capsys, "serve", arguments).code == 0
        return [line for line in caplog.messages if "no key" in line]

    for base in ("-m @model", "--models-dir @folder/models"):
        for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", "127.0.0.1,0.0.0.0"):
            (line,) = warnings(f"{base} --host {host}")
            assert host.split(",")[-1] in line and "--api-key" in line
            assert warnings(f"{base} --host {host} --api-key k") == []
        for host in ("127.0.0.1", "localhost", "::1", "/tmp/x.sock"):
            assert warnings(f"{base} --host {host}") == []


@pytest.mark.full
def test_flags_take_effect_in_a_server(folder: Path) -> None:
    flags = (
        "--port 0 -c 256 -np 2 -n 3 --temp 0 -a one,two --api-key k --metrics --no-slots --api-prefix /llm "
        f"--chat-template-file {folder}/template --cors-origins http://a --max-prompts 2 --reasoning-format none -t 1"
    )
    command = own_command("serve", "-m", str(folder / "tiny.gguf"), *flags.split())
    log = folder / "serve.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            listens = re.compile(r"listening on (http://[^\s/]+)")
            until(lambda: listens.search(log.read_text()) or process.poll() is not None, log.read_text)
            found = listens.search(log.read_text())
            assert found is not None, log.read_text()
            with httpx.Client(base_url=f"{found[1]}/llm", headers={"Authorization": "Bearer k"}) as http:
                until(lambda: http.get("/health").status_code == 200, log.read_text)
                assert httpx.get(f"{found[1]}/health").status_code == 404
                assert httpx.get(f"{found[1]}/llm/v1/models").status_code == 401
                assert http.get("/v1/models").json()["data"][0]["id"] == "one"
                assert http.get("/metrics").status_code == 200 and http.get("/slots").status_code == 501
                props = http.get("/props").json()
                assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (2, 128)
                assert props["chat_template"] == "{{ messages }}"
                allowed = http.get("/v1/models", headers={"Origin": "http://a"}).headers
                assert allowed["access-control-allow-origin"] == "http://a"
                answers = {http.post("/completion", json={"prompt": "Hi", "seed": seed}).text for seed in (1, 2)}
                assert {json.loads(text)["tokens_predicted"] for text in answers} == {3}
                assert len({json.loads(text)["content"] for text in answers}) == 1
                assert http.post("/completion", json={"prompt": ["a", "b", "c"]}).status_code == 400
        finally:
            process.terminate()
