"""What `llamado serve` was told: the flags' values in the shape the rooms take them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamado.devices.split.placement import ALL_LAYERS, SplitOptions
from llamado.engine.request import Defaults
from llamado.engine.sampling.params import RANDOM_SEED, Sampling, sampler_names
from llamado.errors import LlamadoError
from llamado.flags import FlagError, Parsed
from llamado.http.access import AccessRules
from llamado.server.api.predict import PredictRoutes
from llamado.server.state import Switches
from llamado.text.grammar.source import GrammarSource

VERBOSE = 10
"""`--verbosity` from which on answers hold `__verbose`, as in llama-server."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Which model; see `llamado.gguf.sources.resolve.resolve`."""

    spec: str | None = None
    hf_repo: str | None = None
    hf_file: str | None = None

    @property
    def name(self) -> str:
        """How the API calls the model when no alias is given."""
        return self.spec or self.hf_repo or ""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the model is loaded and run."""

    n_ctx: int = 0
    """0: the model's own."""
    n_slots: int = 4
    unified: bool = True
    """All slots share one context of n_ctx, instead of n_ctx / n_slots each."""
    n_batch: int = 2048
    n_ubatch: int = 512
    cont_batching: bool = True
    n_threads: int | None = None
    n_threads_batch: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    numa: str | None = None
    chat_template: str | None = None
    split: SplitOptions | None = None
    """Other machines that share the model; None: this one alone."""
    drafting: bool | None = None
    """Whether probable next tokens are evaluated along; None: where the model is split."""
    slot_prompt_similarity: float = 0.1
    context_shift: bool = False
    """Whether a full context drops its older half instead of ending the answer."""
    cache_ram: int = 8192
    """MiB of memory for prompts that no slot holds any more; -1: no limit, 0: none."""
    cache_idle_slots: bool = False
    """Whether idle slots' prompts move there whenever a request starts."""
    max_queue: int = 1024
    """Most requests that wait for a slot; more are turned away."""
    lora: tuple[tuple[str, float], ...] = ()
    """Adapters: path and scale."""
    lora_apply: bool = True
    """Whether adapters work from the start (`--lora-init-without-apply`)."""
    embeddings: bool = False
    reranking: bool = False
    pooling: str | None = None
    """none, mean, cls, last, rank; None: the model's own."""
    embd_normalize: int = 2
    metadata: tuple[tuple[str, int | float | bool | str], ...] = ()
    """Values in place of the file's; `{arch}` in a key stands for the model's architecture."""

    def with_context(self, n_ctx: int) -> EngineOptions:
        """The same with another context size."""
        return replace(self, n_ctx=n_ctx)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything `serve` needs."""

    source: ModelSource
    """Empty where a router serves several models."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    access: AccessRules = field(default_factory=AccessRules)
    switches: Switches = field(default_factory=Switches)
    defaults: Defaults = field(default_factory=Defaults)
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    reuse_port: bool = False
    ssl_key: str | None = None
    ssl_cert: str | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timeout: int = 3600
    """Seconds a connection may rest in the middle of a request or an answer."""
    threads_http: int | None = None
    """Threads for long texts; None: automatic."""
    max_connections: int | None = None
    """None: as many as the system lets this process open."""
    otel: bool = False


def serves_many(flags: Parsed) -> bool:
    """Whether `serve` is asked for a router before several models, rather than for one model."""
    many = flags.models_dir or flags.models_preset or flags.llama_swap or len(flags.model or []) > 1
    return bool(many) or not (flags.model or flags.model_url or flags.hf_repo)


def model_source(flags: Parsed) -> ModelSource:
    """The model of any command. Raises FlagError."""
    models = [*(flags.model or []), *([flags.model_url] if flags.model_url else [])]
    if len(models) > 1:
        raise FlagError(f"-m/--model: one model is expected, got {len(models)}: {', '.join(models)}")
    _use_hub(flags)
    if not models and not flags.hf_repo:
        raise FlagError("no model: give -m MODEL (a GGUF path or a name, try -m smollm2) or -hf user/repo")
    return ModelSource(spec=models[0] if models else None, hf_repo=flags.hf_repo, hf_file=flags.hf_file)


def _use_hub(flags: Parsed) -> None:
    if flags.hf_token:
        os.environ["HF_TOKEN"] = flags.hf_token
    if flags.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def sampling_defaults(flags: Parsed) -> Defaults:
    """Defaults of requests. Raises FlagError."""
    samplers: dict[str, Any] = {}
    try:
        if flags.samplers:
            samplers["samplers"] = sampler_names([s for s in flags.samplers.split(";") if s])
        elif flags.sampler_seq:
            samplers["samplers"] = sampler_names(flags.sampler_seq)
        sampling = Sampling(
            seed=None if flags.seed == RANDOM_SEED else flags.seed,
            temperature=flags.temp,
            top_k=flags.top_k,
            top_p=flags.top_p,
            min_p=flags.min_p,
            typical_p=flags.typical,
            repeat_last_n=flags.repeat_last_n,
            repeat_penalty=flags.repeat_penalty,
            presence_penalty=flags.presence_penalty,
            frequency_penalty=flags.frequency_penalty,
            ignore_eos=flags.ignore_eos,
            logit_bias=_biases(flags.logit_bias or []),
            top_n_sigma=flags.top_nsigma,
            xtc_probability=flags.xtc_probability,
            xtc_threshold=flags.xtc_threshold,
            dry_multiplier=flags.dry_multiplier,
            dry_base=flags.dry_base,
            dry_allowed_length=flags.dry_allowed_length,
            dry_penalty_last_n=flags.dry_penalty_last_n,
            adaptive_target=flags.adaptive_target,
            adaptive_decay=flags.adaptive_decay,
            dynatemp_range=flags.dynatemp_range,
            dynatemp_exponent=flags.dynatemp_exp,
            mirostat=flags.mirostat,
            mirostat_tau=flags.mirostat_ent,
            mirostat_eta=flags.mirostat_lr,
            **samplers,
        )
        sampling = replace(sampling, **_breakers(flags.dry_sequence_breaker))
        sampling.validate()
    except LlamadoError as error:
        raise FlagError(str(error)) from None
    if flags.predict < -1:
        raise FlagError(f"-n/--predict: expected -1 or more, got {flags.predict}")
    if flags.keep < -1:
        raise FlagError(f"--keep: expected -1 or more, got {flags.keep}")
    return Defaults(sampling=sampling, n_predict=flags.predict, n_keep=flags.keep, stop=tuple(flags.stop or ()))


def _breakers(given: list[str] | None) -> dict[str, Any]:
    """The texts given take the place of the usual ones; "none" forgets those before it."""
    texts: list[str] = []
    for text in given or ():
        texts = [] if text == "none" else [*texts, text]
    return {} if given is None else {"dry_sequence_breakers": tuple(texts)}


def _biases(given: list[str]) -> Mapping[int, float]:
    biases = {}
    for text in given:
        split = max(text.find("+"), text.find("-"))
        try:
            token, bias = int(text[:split]), float(text[split:])
        except ValueError:
            raise FlagError(f"-l/--logit-bias: expected TOKEN_ID+BIAS or TOKEN_ID-BIAS, got {text!r}") from None
        if math.isnan(bias) or bias == math.inf:
            raise FlagError(f"-l/--logit-bias: expected a number or -inf, got {text!r}")
        biases[token] = bias
    return biases


def engine_options(flags: Parsed, *, n_slots: int | None = None) -> EngineOptions:
    """How any command runs the model. Raises FlagError."""
    for key, low in (("ctx_size", 0), ("batch_size", 1), ("ubatch_size", 1)):
        if flags.values[key] < low:
            raise FlagError(f"--{key.replace('_', '-')}: expected {low} or more, got {flags.values[key]}")
    for key in ("threads", "threads_batch"):
        if flags.values[key] == 0:
            raise FlagError(f"--{key.replace('_', '-')}: expected 1 or more, got 0")
    for key, least in (("cache_ram", -1), ("max_queue", 0), ("embd_normalize", -1)):
        if flags.values.get(key, 0) < least:
            raise FlagError(f"--{key.replace('_', '-')}: expected {least} or more, got {flags.values[key]}")
    mode = flags.load_mode
    unified = n_slots is not None
    cont_batching = True
    if n_slots is None:
        given = flags.parallel
        if given == 0 or given < -1:
            raise FlagError(f"-np/--parallel: expected 1 or more, got {given}")
        # llama-server: an automatic number is 4 slots over one shared context; a given number divides the context.
        n_slots = 4 if given < 0 else given
        unified = given < 0 if flags.kv_unified is None else flags.kv_unified
        cont_batching = flags.cont_batching
    f32 = flags.values.get("memory_f32", False)
    return EngineOptions(
        n_ctx=flags.ctx_size,
        n_slots=n_slots,
        unified=unified,
        n_batch=flags.batch_size,
        n_ubatch=min(flags.ubatch_size, flags.batch_size),
        cont_batching=cont_batching,
        n_threads=_threads(flags.threads),
        n_threads_batch=_threads(flags.threads_batch),
        type_k="f32" if f32 else flags.cache_type_k,
        type_v="f32" if f32 else flags.cache_type_v,
        mmap=flags.mmap and mode not in ("none", "mlock"),
        mlock=flags.mlock or "mlock" in mode,
        numa=flags.numa,
        chat_template=_template(flags),
        split=split_options(flags),
        drafting={"none": False, "ngram-simple": True}.get(flags.values.get("spec_type", "auto")),
        slot_prompt_similarity=_similarity(flags.values.get("slot_prompt_similarity", 0.1)),
        context_shift=flags.values.get("context_shift", False),
        cache_ram=flags.values.get("cache_ram", 0),
        cache_idle_slots=flags.values.get("cache_idle_slots", False),
        max_queue=flags.values.get("max_queue", 1024),
        lora=_adapters(flags),
        lora_apply=not flags.values.get("lora_init_without_apply", False),
        embeddings=flags.values.get("embedding", False),
        reranking=flags.values.get("rerank", False),
        pooling="rank" if flags.values.get("rerank") and not flags.pooling else flags.values.get("pooling"),
        embd_normalize=flags.values.get("embd_normalize", 2),
        metadata=(*_rope(flags), *_metadata(flags.override_kv or [])),
    )


def _similarity(share: float) -> float:
    if not 0 <= share <= 1:
        raise FlagError(f"-sps/--slot-prompt-similarity: expected 0 to 1, got {share}")
    return share


def _adapters(flags: Parsed) -> tuple[tuple[str, float], ...]:
    adapters = [(path, 1.0) for path in _listed(flags.values.get("lora") or [])]
    for item in _listed(flags.values.get("lora_scaled") or []):
        path, _, text = item.rpartition(":")
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not path or not math.isfinite(scale):
            raise FlagError(f"--lora-scaled: expected FILE:SCALE, got {item!r}")
        adapters.append((path, scale))
    return tuple(adapters)


def _rope(flags: Parsed) -> list[tuple[str, int | float | bool | str]]:
    """What the flags of rotary embeddings say, as values of the metadata keys that say the same."""
    found: list[tuple[str, int | float | bool | str]] = []
    if flags.rope_scaling:
        found.append(("{arch}.rope.scaling.type", flags.rope_scaling))
    for key in ("rope_scale", "rope_freq_scale"):
        value = flags.values[key]
        if value is None or value == 0:
            continue
        if not 0 < value < math.inf:
            raise FlagError(f"--{key.replace('_', '-')}: expected a number above 0, got {value}")
        found.append(("{arch}.rope.scaling.factor", value if key == "rope_scale" else 1 / value))
    for key, name in (
        ("rope_freq_base", "rope.freq_base"),
        ("yarn_orig_ctx", "rope.scaling.original_context_length"),
        ("yarn_ext_factor", "rope.scaling.yarn_ext_factor"),
        ("yarn_attn_factor", "rope.scaling.yarn_attn_factor"),
        ("yarn_beta_slow", "rope.scaling.yarn_beta_slow"),
        ("yarn_beta_fast", "rope.scaling.yarn_beta_fast"),
    ):
        value = flags.values[key]
        if value is None or (value == 0 if key in ("rope_freq_base", "yarn_orig_ctx") else value < 0):
            continue
        if not 0 <= value < math.inf:
            raise FlagError(f"--{key.replace('_', '-')}: expected a number above 0, got {value}")
        found.append((f"{{arch}}.{name}", value))
    return found


def _metadata(given: list[str]) -> list[tuple[str, int | float | bool | str]]:
    found: list[tuple[str, int | float | bool | str]] = []
    for item in _listed(given):
        key, equals, rest = item.partition("=")
        kind, _, text = rest.partition(":")
        value: int | float | bool | str
        try:
            if kind == "int":
                value = int(text)
            elif kind == "float":
                value = float(text)
            elif kind == "bool" and text in ("true", "false"):
                value = text == "true"
            elif kind == "str":
                value = text
            else:
                raise ValueError
        except ValueError:
            key = ""
        if not key or not equals:
            raise FlagError(f"--override-kv: expected KEY=TYPE:VALUE with int, float, bool or str, got {item!r}")
        found.append((key, value))
    return found


def split_options(flags: Parsed) -> SplitOptions | None:
    """How the model is divided among machines; None without `--rpc`. Raises FlagError."""
    if not flags.rpc:
        return None
    from llamado.rpc.endpoint import Endpoint

    endpoints: dict[str, None] = {}
    for text in _listed(flags.rpc):
        try:
            endpoint = str(Endpoint.parse(text))
        except LlamadoError as error:
            raise FlagError(f"--rpc: {error}") from None
        if endpoint in endpoints:
            raise FlagError(f"--rpc: {endpoint} is named twice")
        endpoints[endpoint] = None
    if not endpoints:
        raise FlagError("--rpc: expected host:port, comma-separated, got an empty text")
    for key, least in (("rpc_failover", 0.0), ("rpc_wait", 0.0)):
        seconds = flags.values[key]
        if seconds is not None and not least <= seconds < math.inf:
            raise FlagError(f"--{key.replace('_', '-')}: expected seconds, 0 or more, got {seconds}")
    if bool(flags.rpc_cert) != bool(flags.rpc_key):
        raise FlagError("--rpc-cert and --rpc-key: give both or none")
    return SplitOptions(
        rpc=tuple(endpoints),
        tensor_split=_tensor_split(flags.tensor_split),
        n_gpu_layers=_gpu_layers(flags.gpu_layers),
        devices=_devices(flags),
        overrides=_overrides(flags.override_tensor or []),
        failover=flags.rpc_failover,
        wait=flags.rpc_wait,
        ca=flags.rpc_ca,
        cert=flags.rpc_cert,
        key=flags.rpc_key,
    )


def _listed(given: list[str]) -> list[str]:
    return [part.strip() for text in given for part in text.split(",") if part.strip()]


def _names(given: list[str]) -> tuple[str, ...]:
    """Each once and in the order of their bytes, as llama-server keeps them; the first alias is the model's id."""
    return tuple(sorted(set(_listed(given)), key=str.encode))


def _tensor_split(text: str) -> tuple[float, ...] | None:
    word = text.strip().lower()
    if word == "auto":
        return None
    if word == "memory":
        return ()
    try:
        shares = tuple(float(part) for part in re.split("[,/]+", word) if part.strip())
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share < math.inf for share in shares):
        raise FlagError(f"-ts/--tensor-split: expected auto, memory, or proportions of 0 or more as 3,1, got {text!r}")
    return shares if any(shares) else ()  # llama.cpp: nothing but zeros means by memory


def _gpu_layers(text: str) -> int | None:
    word = text.strip().lower()
    if word == "auto":
        return None
    if word == "all":
        return ALL_LAYERS
    try:
        n = int(word)
    except ValueError:
        raise FlagError(f"-ngl/--gpu-layers: expected a whole number, all or auto, got {text!r}") from None
    if n < 0:  # llama.cpp: -1 is auto, anything below all
        return None if n == -1 else ALL_LAYERS
    return n


def _devices(flags: Parsed) -> tuple[str, ...]:
    given = _listed([flags.device]) if flags.device is not None else []
    if flags.device is not None and not given:
        raise FlagError("-dev/--device: expected names of devices, comma-separated, got an empty text")
    if "none" in given and len(given) > 1:
        raise FlagError("-dev/--device: none stands alone")
    if flags.split_mode in ("row", "tensor"):
        raise FlagError(f"-sm/--split-mode {flags.split_mode}: devices share whole layers only; use layer or none")
    if flags.split_mode == "none" and "none" not in given:
        n, names = flags.main_gpu, given or [f"RPC{flags.main_gpu}"]
        if not 0 <= n < (len(given) if given else 10_000):
            among = f", a place in --device {','.join(given)}" if given else ""
            raise FlagError(f"-mg/--main-gpu: expected a device's number, counted from 0{among}, got {n}")
        return (names[n if given else 0],)
    return tuple(given)


def _overrides(given: list[str]) -> tuple[tuple[str, str], ...]:
    overrides = []
    for item in _split_overrides(given):
        pattern, equals, device = item.rpartition("=")
        if not equals or not pattern or not device:
            raise FlagError(f"-ot/--override-tensor: expected PATTERN=DEVICE, comma-separated, got {item!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise FlagError(f"-ot/--override-tensor: {pattern!r} is no regular expression: {error}") from None
        overrides.append((pattern, device))
    return tuple(overrides)


def _split_overrides(given: list[str]) -> list[str]:
    """Items between commas; a comma before anything without `=` belongs to the pattern (`blk\\.\\d{1,2}=CPU`)."""
    items: list[str] = []
    for text in given:
        pending = ""
        for part in text.split(","):
            pending = f"{pending},{part}" if pending else part
            if "=" in part:
                items.append(pending.strip())
                pending = ""
        if pending:
            items.append(pending.strip())
    return items


def _threads(given: int | None) -> int | None:
    return None if given is None or given < 0 else given  # llama-server: negative is automatic


def _template(flags: Parsed) -> str | None:
    file = flags.values.get("chat_template_file")
    if file:
        return _read("--chat-template-file", file)
    given: str | None = flags.values.get("chat_template")
    return given


def _keys(flags: Parsed) -> tuple[bytes, ...]:
    keys = [key.strip() for given in flags.api_key or [] for key in given.split(",")]
    if flags.api_key_file:
        lines = _read("--api-key-file", flags.api_key_file).splitlines()
        keys += [line.strip() for line in lines if not line.startswith("#")]
    found = tuple(key.encode() for key in keys if key)
    if not found and (flags.api_key or flags.api_key_file):
        # An empty list would leave the server open to everybody.
        raise FlagError("--api-key: no key in it; leave the flag out for a server without keys")
    return found


def _grammar(flags: Parsed) -> GrammarSource | None:
    """What all answers must look like. Raises FlagError."""
    given = [
        (name, value)
        for name, value in (
            ("--grammar", flags.grammar),
            ("--grammar-file", flags.grammar_file),
            ("-j/--json-schema", flags.json_schema),
            ("-jf/--json-schema-file", flags.json_schema_file),
        )
        if value
    ]
    if not given:
        return None
    if len(given) > 1:
        raise FlagError(f"{given[0][0]} and {given[1][0]}: give one of them")
    (name, text) = given[0]
    if name.endswith("-file"):
        text = _read(name, text)
    if "schema" not in name:
        return GrammarSource("gbnf", text)
    try:
        json.loads(text)
    except ValueError as error:
        raise FlagError(f"{name}: no JSON: {error}") from None
    return GrammarSource("json_schema", text)


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{flag} {path}: {error}") from None


def _folder(flag: str, path: str | None) -> str | None:
    if path is not None and not Path(path).is_dir():
        raise FlagError(f"{flag} {path}: there is no such folder")
    return path


_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = ("engine", "engine_version", "model_id")


def _labels(text: str | None) -> tuple[tuple[str, str], ...] | None:
    """Names and values of `--metrics-labels`; None where the flag is not given."""
    if text is None or text == "off":
        return None
    labels: dict[str, str] = {}
    for item in _listed([] if text == "on" else [text]):
        name, equals, value = item.partition("=")
        if not equals or not _LABEL.fullmatch(name) or name.startswith("__") or name in (*_OWN_LABELS, "le"):
            raise FlagError(f"--metrics-labels: expected NAME=VALUE, comma-separated, got {item!r}")
        labels[name] = value
    return tuple(labels.items())


def serve_settings(flags: Parsed) -> Settings:
    """Settings of `llamado serve`; with several models, or none, those of its router. Raises FlagError."""
    kwargs: dict[str, Any] = {}
    if flags.chat_template_kwargs:
        try:
            kwargs = json.loads(flags.chat_template_kwargs)
        except ValueError:
            kwargs = []  # type: ignore[assignment]
        if not isinstance(kwargs, dict):
            raise FlagError(f"--chat-template-kwargs: expected a JSON object, got {flags.chat_template_kwargs!r}")
    if not 0 <= flags.port <= 65535:
        raise FlagError(f"--port: expected 0 to 65535, got {flags.port}")
    try:
        predict = PredictRoutes.read(os.environ)
    except ValueError as error:
        raise FlagError(f"AIP_HTTP_PORT: expected 0 to 65535, got {os.environ['AIP_HTTP_PORT']!r}") from error
    if bool(flags.ssl_key_file) != bool(flags.ssl_cert_file):
        raise FlagError("--ssl-key-file and --ssl-cert-file: give both or none")
    hosts = tuple(host.strip() for host in flags.host.split(",") if host.strip())
    if not hosts:
        raise FlagError("--host: expected an address, got an empty text")
    for key, least in (("timeout", 1), ("max_prompts", 1), ("models_max", 0), ("reasoning_budget", -1)):
        if flags.values[key] < least:
            raise FlagError(f"--{key.replace('_', '-')}: expected {least} or more, got {flags.values[key]}")
    for key in ("threads_http", "max_connections", "sleep_idle_seconds"):
        if flags.values[key] == 0 or flags.values[key] < -1:
            raise FlagError(f"--{key.replace('_', '-')}: expected 1 or more, or -1, got {flags.values[key]}")
    prefix = flags.api_prefix.rstrip("/")
    if prefix and not re.fullmatch("(/[A-Za-z0-9._~-]+)+", prefix):
        raise FlagError(f"--api-prefix: expected a path as /llama, got {flags.api_prefix!r}")
    many = serves_many(flags)
    if many:
        _use_hub(flags)
    defaults = sampling_defaults(flags)
    return Settings(
        source=ModelSource() if many else model_source(flags),
        engine=engine_options(flags),
        access=AccessRules(
            api_keys=_keys(flags),
            cors_origins=flags.cors_origins,
            cors_methods=flags.cors_methods,
            cors_headers=flags.cors_headers,
            cors_credentials=flags.cors_credentials,
        ),
        switches=Switches(
            metrics=flags.metrics,
            metrics_labels=_labels(flags.metrics_labels),
            slots=flags.slots,
            props=flags.props,
            prefill_assistant=flags.prefill_assistant,
            sse_ping_interval=flags.sse_ping_interval,
            chat_template_kwargs=kwargs,
            jinja=flags.jinja,
            skip_chat_parsing=flags.skip_chat_parsing,
            reasoning_format=flags.reasoning_format,
            reasoning=flags.reasoning,
            reasoning_budget=flags.reasoning_budget,
            reasoning_budget_message=flags.reasoning_budget_message,
            reasoning_effort=flags.reasoning_effort,
            reasoning_preserve=flags.reasoning_preserve,
            slot_save_path=_folder("--slot-save-path", flags.slot_save_path),
            api_prefix=prefix,
            static_path=_folder("--path", flags.path),
            max_prompts=flags.max_prompts,
            sleep_idle_seconds=flags.sleep_idle_seconds,
            spm_infill=flags.spm_infill,
            predict=predict,
            verbose=flags.verbose or flags.log_verbosity >= VERBOSE,
            grammar=_grammar(flags),
        ),
        defaults=Defaults(
            sampling=defaults.sampling,
            n_predict=defaults.n_predict,
            n_keep=defaults.n_keep,
            stop=defaults.stop,
            cache_prompt=flags.cache_prompt,
            special=flags.special,
        ),
        hosts=hosts,
        port=flags.port if predict is None else predict.port,
        reuse_port=flags.reuse_port,
        ssl_key=flags.ssl_key_file,
        ssl_cert=flags.ssl_cert_file,
        aliases=() if many else _names(flags.alias or []),
        tags=_names([flags.tags]),
        notes=flags.notes,
        timeout=flags.timeout,
        threads_http=None if flags.threads_http < 0 else flags.threads_http,
        max_connections=None if flags.max_connections < 0 else flags.max_connections,
        otel=flags.otel,
    )
