"""Table of all command-line flags: spellings, environment variables, types, defaults and help texts.

The argparse parsers, the environment lookup, `--help` and `docs/flags.md` are generated from `FLAGS`. Spellings,
variables and defaults are those of llama-server (b11434, `--help`); spellings from older guides are additional names.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from llamado.engine.parameters import BY_NAME, PARAMETERS, Parameter
from llamado.errors import LlamadoError
from llamado.processes import secret_values


class FlagError(LlamadoError):
    """A flag or environment variable that is unknown, refused, or has a bad value."""


class Kind(enum.Enum):
    """Treatment of a flag."""

    USED = "used"
    MEANINGLESS = "meaningless"  # accepted, with a warning at start
    REFUSED = "refused"  # rejected with the reason, unless its value means "off"


@dataclass(frozen=True)
class Flag:
    """One row of the table. `names` turn the flag on or take its value, `off_names` turn it off."""

    names: tuple[str, ...]
    help: str
    type: str = "bool"
    default: Any = None
    env: tuple[str, ...] = ()
    off_names: tuple[str, ...] = ()
    kind: Kind = Kind.USED
    dest: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    bare: str | None = None  # value of a flag given without one, if the value is optional
    off_values: tuple[str, ...] = ()  # values of a refused flag that mean "off"
    many: bool = False
    secret: bool = False
    """True if the value is a key or token, which child processes must not inherit."""
    n_values: int = 1
    requires: str = ""  # key of the flag without which this one has no effect
    group: str = ""
    commands: frozenset[str] = field(default_factory=lambda: frozenset({"serve"}))

    @cached_property
    def key(self) -> str:
        """Attribute name in the parsed namespace."""
        longest = next((n for n in self.names if n.startswith("--")), self.names[0])
        return self.dest or longest.lstrip("-").replace("-", "_")

    @property
    def label(self) -> str:
        """Name of the flag in messages."""
        return "/".join(self.names[:2])


_TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a text"),
    "seed": (lambda text: int(text) if re.fullmatch(r"[+-]?[0-9]{1,4096}", text) else text, "a seed"),
}
# Parameter type → flag type, and True if the flag may be repeated.
_OF_PARAMETERS = {
    "boolean": ("bool", False),
    "integer": ("int", False),
    "number": ("float", False),
    "seed": ("seed", False),
    "samplers": ("str", False),
    "texts": ("str", True),
    "breakers": ("str", True),
    "biases": ("str", True),
}
_TRUE = {"1", "true", "on", "enabled", "yes"}
_FALSE = {"0", "false", "off", "disabled", "no"}
_SAMPLING = frozenset({"serve", "run"})
DRAFT_COMMANDS = _SAMPLING | {"plan", "bench"}
"""Commands that accept the flags of speculative decoding."""
_ENGINE = frozenset({"serve", "run", "perplexity", "bench", "plan"})
_FITTED = _ENGINE | {"pull"}
_SLOTS = frozenset({"serve", "plan"})
_WORKER = frozenset({"worker"})
_TAP = frozenset({"tap"})
_WAIT = frozenset({"wait"})
_DOCTOR = frozenset({"doctor"})
_GATEWAY = frozenset({"gateway"})
_VERIFY = frozenset({"verify"})
_HTTP = frozenset({"serve", "gateway"})
_TOP = frozenset({"top"})
_CLUSTER = frozenset({"cluster"})
# With one of these, workers join a running server, so flags that require `--rpc` have an effect without it.
_JOINED = ("cluster_token", "discover", "lab")
_DEPLOY = frozenset({"deploy"})
_UP = frozenset({"up"})
_QUANTIZE = frozenset({"quantize"})
_IMATRIX = frozenset({"imatrix"})
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _used(names: str, help: str, **kw: Any) -> Flag:
    return Flag(tuple(names.split()), help, **_split(kw))


def _secret(names: str, help: str, **kw: Any) -> Flag:
    return _used(names, help, type="str", secret=True, **kw)


def _none(names: str, why: str, **kw: Any) -> Flag:
    kw.setdefault("type", "str")
    return Flag(tuple(names.split()), why, kind=Kind.MEANINGLESS, **_split(kw))


def _refused(names: str, why: str, **kw: Any) -> Flag:
    kw.setdefault("type", "str")
    return Flag(tuple(names.split()), why, kind=Kind.REFUSED, **_split(kw))


def _split(kw: dict[str, Any]) -> dict[str, Any]:
    for key in ("env", "off_names", "off_values", "choices"):
        if isinstance(kw.get(key), str):
            kw[key] = tuple(kw[key].split())
    return kw


def _default(row: Parameter) -> Flag:
    """Make the flag for the default of a request parameter. Its key is the name of the parameter."""
    type, many = _OF_PARAMETERS[row.type]
    return _used(
        row.flags,
        row.help,
        type=type,
        default=-1 if type == "seed" else None if type == "str" else row.default,
        env=row.env,
        off_names=row.off_flags,
        dest=row.name,
        metavar=row.metavar,
        many=many,
        commands=frozenset({"serve"}) if row.served else _SAMPLING,
    )


def _group(title: str, *flags: Flag) -> tuple[Flag, ...]:
    return tuple(Flag(**{**f.__dict__, "group": title}) for f in flags)


_CPU = "the model runs on this machine's CPU"
_WHERE = "operations run on the device of their weights"
_LATER = "not supported yet"
_VIDEO = "video is not supported yet"
_DRAFT_ALIKE = "the draft model uses the settings of the model"
_NGRAMS = "the suffix drafter replaces llama.cpp's n-gram drafters; it finds matches of any length"
_ONE_DRAFT = "there is one draft per step, and a draft token is kept if the model samples the same token"
_REMOVED = "llama-server has removed this flag as well; see --spec-type"

# fmt: off
MODEL = _group(
    "model",
    _used("-m --model",
          "model: a GGUF path, a catalog name (smollm2, gemma3), hf:user/repo[:quant], ollama:name[:tag]",
          type="str", metavar="MODEL", env="LLAMA_ARG_MODEL LLAMA_MODEL_PATH", many=True, commands=_ENGINE),
    _used("-hf -hfr --hf-repo", "model from Hugging Face: user/repo[:quant]", type="str", metavar="REPO",
          env="LLAMA_ARG_HF_REPO", commands=_ENGINE),
    _used("-hff --hf-file", "file inside --hf-repo", type="str", metavar="FILE", env="LLAMA_ARG_HF_FILE",
          commands=_ENGINE),
    _secret("-hft --hf-token", "Hugging Face access token", metavar="TOKEN", env="HF_TOKEN",
          commands=_ENGINE),
    _used("-cl --cache-list", "list the models in the cache and exit", default=False),
    _used("--offline", "use only models that are already on disk; never access the network", env="LLAMA_ARG_OFFLINE",
          default=False, commands=_ENGINE),
    _used("-a --alias", "model names in the API, comma-separated", type="str", metavar="NAME", env="LLAMA_ARG_ALIAS",
          many=True),
    _used("--tags", "tags of the model, comma-separated (informational)", type="str", default="", metavar="TAGS",
          env="LLAMA_ARG_TAGS"),
    _used("-mu --model-url", "URL of a GGUF file to download into the cache", type="str", metavar="URL",
          env="LLAMA_ARG_MODEL_URL", commands=_ENGINE),
    _refused("-dr --docker-repo", f"{_LATER}: use -hf", env="LLAMA_ARG_DOCKER_REPO"),
    _used("--lora", "LoRA adapters (GGUF), comma-separated; may be repeated", type="str", many=True, metavar="FILE",
          commands=_SAMPLING),
    _used("--lora-scaled", "LoRA adapters with their scales: FILE:SCALE, comma-separated; may be repeated", type="str",
          many=True, metavar="FILE:SCALE", commands=_SAMPLING),
    _used("--lora-init-without-apply", "load LoRA adapters with scale 0; apply them later with POST /lora-adapters",
          default=False, commands=_SAMPLING),
    _used("--control-vector", "control vectors (GGUF), comma-separated; may be repeated", type="str", many=True,
          metavar="FILE", commands=_SAMPLING),
    _used("--control-vector-scaled", "control vectors with their scales: FILE:SCALE, comma-separated; may be repeated",
          type="str", many=True, metavar="FILE:SCALE", commands=_SAMPLING),
    _used("--control-vector-layer-range",
          "first and last layer that control vectors apply to (default: 1 and the last)", type="int", n_values=2,
          metavar="LAYER", commands=_SAMPLING),
    _used("--override-kv",
          "override model metadata: KEY=TYPE:VALUE, comma-separated (types: int, float, bool, str); may be repeated",
          type="str", many=True, metavar="KEY=TYPE:VALUE", commands=_ENGINE),
    _used("-mm --mmproj",
          "projector file (mmproj GGUF) for pictures and sounds; accepts the same forms as -m (default: the one that "
          "comes with a model of the hub or of Ollama)", type="str", metavar="FILE", env="LLAMA_ARG_MMPROJ",
          commands=_SAMPLING),
    _used("-mmu --mmproj-url", "URL of a projector file to download into the cache", type="str", metavar="URL",
          env="LLAMA_ARG_MMPROJ_URL", commands=_SAMPLING),
    _used("--mmproj-auto", "use the projector file that comes with a model of the hub or of Ollama", default=True,
          off_names="--no-mmproj --no-mmproj-auto", env="LLAMA_ARG_MMPROJ_AUTO", commands=_SAMPLING | {"pull"}),
    _used("--mmproj-offload", "encode pictures and sounds on a graphics card that the model may use", default=True,
          off_names="--no-mmproj-offload", env="LLAMA_ARG_MMPROJ_OFFLOAD", commands=_SAMPLING),
    _used("-mmdev --mmproj-device",
          "graphics card that encodes pictures and sounds, such as CUDA1; none: the CPU (default: as --device)",
          type="str", metavar="DEV", env="MTMD_BACKEND_DEVICE", commands=_SAMPLING),
    _used("--image-min-tokens", "least tokens of a picture, for models with a variable number (default: the model's)",
          type="int", metavar="N", env="LLAMA_ARG_IMAGE_MIN_TOKENS", commands=_SAMPLING),
    _used("--image-max-tokens", "most tokens of a picture, for models with a variable number (default: the model's)",
          type="int", metavar="N", env="LLAMA_ARG_IMAGE_MAX_TOKENS", commands=_SAMPLING),
    _none("--mtmd-batch-max-tokens", "pictures are encoded one by one", env="LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    _used("--media-path",
          "folder of pictures and sounds that requests may name as file:// URLs, relative to it (default: none)",
          type="str", metavar="PATH"),
    _used("--media-url",
          "fetch pictures and sounds from http(s) URLs in requests; addresses of this machine and its network are "
          "refused", default=False),
    _none("--video-fps", _VIDEO, env="LLAMA_ARG_VIDEO_FPS"),
    _none("--video-timestamp-interval", _VIDEO, env="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
    _none("--video-ffmpeg-dir", _VIDEO, env="LLAMA_ARG_VIDEO_FFMPEG_DIR"),
    *(
        _refused(f"--{name}", f"this preset is {_LATER}: give the model with -hf {repo}", type="bool")
        for name, repo in {
            "embd-gemma-default": "ggml-org/embeddinggemma-300M-qat-q4_0-GGUF",
            "fim-qwen-1.5b-default": "ggml-org/Qwen2.5-Coder-1.5B-Q8_0-GGUF",
            "fim-qwen-3b-default": "ggml-org/Qwen2.5-Coder-3B-Q8_0-GGUF",
            "fim-qwen-7b-default": "ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF",
            "fim-qwen-7b-spec": "ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF",
            "fim-qwen-14b-spec": "ggml-org/Qwen2.5-Coder-14B-Q8_0-GGUF",
            "fim-qwen-30b-default": "ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF",
            "gpt-oss-20b-default": "ggml-org/gpt-oss-20b-GGUF",
            "gpt-oss-120b-default": "ggml-org/gpt-oss-120b-GGUF",
            "vision-gemma-4b-default": "ggml-org/gemma-3-4b-it-qat-GGUF",
            "vision-gemma-12b-default": "ggml-org/gemma-3-12b-it-qat-GGUF",
        }.items()
    ),
    _none("--check-tensors", "tensor ranges are always checked", type="bool"),
)

COMPUTE = _group(
    "compute",
    _used("-t --threads", "CPU threads for decoding (default: one per available core)", type="int", metavar="N",
          env="LLAMA_ARG_THREADS LLAMA_N_THREADS", commands=_ENGINE),
    _used("-tb --threads-batch", "CPU threads for prompt processing (default: same as --threads)", type="int",
          metavar="N", env="LLAMA_ARG_THREADS_BATCH", commands=_ENGINE),
    _used("-c --ctx-size", "context size in tokens (0: the model's training context, limited by memory)", type="int",
          default=0, metavar="N", env="LLAMA_ARG_CTX_SIZE LLAMA_N_CTX", commands=_ENGINE),
    _used("-b --batch-size", "maximum number of tokens scheduled per step", type="int", default=2048, metavar="N",
          env="LLAMA_ARG_BATCH LLAMA_N_BATCH", commands=_ENGINE),
    _used("-ub --ubatch-size", "maximum number of tokens per forward pass", type="int", default=512, metavar="N",
          env="LLAMA_ARG_UBATCH", commands=_ENGINE),
    _used("-np --parallel", "number of slots: requests decoded concurrently (-1: 4 slots sharing one context)",
          type="int", default=-1, metavar="N", env="LLAMA_ARG_N_PARALLEL", commands=_SLOTS),
    _used("-cb --cont-batching", "continuous batching: decode requests together as they arrive", default=True,
          off_names="-nocb --no-cont-batching", env="LLAMA_ARG_CONT_BATCHING", commands=_SLOTS),
    _used("-kvu --kv-unified",
          "share one KV cache of --ctx-size tokens among all slots (default: only if --parallel is automatic)",
          off_names="-no-kvu --no-kv-unified", env="LLAMA_ARG_KV_UNIFIED", commands=_SLOTS),
    _used("-ctk --cache-type-k", "data type of the K cache", type="str", default="f16", choices=" ".join(KV_TYPES),
          metavar="TYPE", env="LLAMA_ARG_CACHE_TYPE_K", commands=_ENGINE),
    _used("-ctv --cache-type-v", "data type of the V cache", type="str", default="f16", choices=" ".join(KV_TYPES),
          metavar="TYPE", env="LLAMA_ARG_CACHE_TYPE_V", commands=_ENGINE),
    _used("--attn-rot-disable",
          "do not rotate keys and values by a Hadamard matrix before quantizing them for the KV cache", default=False,
          env="LLAMA_ATTN_ROT_DISABLE", commands=_ENGINE - {"plan"}),
    _used("--memory-f32", "older spelling of -ctk f32 -ctv f32", default=False),
    _used("--mmap", "memory-map the model file instead of reading it", default=True, off_names="--no-mmap",
          env="LLAMA_ARG_MMAP", commands=_ENGINE),
    _used("--mlock", "lock the weights in RAM, so that they are never swapped out", default=False,
          env="LLAMA_ARG_MLOCK", commands=_ENGINE),
    _used("-lm --load-mode", "how to load the weights: auto, none (read the file), mmap, mlock, mmap+mlock", type="str",
          default="auto", choices="auto none mmap mlock mmap+mlock", metavar="MODE", env="LLAMA_ARG_LOAD_MODE",
          commands=_ENGINE),
    _used("--numa", "NUMA placement of threads: distribute, isolate or numactl", type="str", bare="distribute",
          choices="distribute isolate numactl", metavar="TYPE", env="LLAMA_ARG_NUMA", commands=_ENGINE),
    _none("-fa --flash-attn", "attention is always computed block by block", bare="on", choices="on off auto",
          env="LLAMA_ARG_FLASH_ATTN GGML_CUDA_NO_FA", off_names="--no-flash-attn", commands=_ENGINE, dest="flash_attn"),
    _none("--metal", _CPU, type="bool"),
    _used("-fit --fit",
          "if memory is short: on, auto: reduce the context, then the batch sizes and the KV cache type, except those "
          "set explicitly; off: fail, and download models without checking whether they fit", type="str", default="on",
          bare="on", choices="on off auto", metavar="on|off|auto", env="LLAMA_ARG_FIT", commands=_FITTED),
    _used("-fitt --fit-target",
          "memory to leave free if possible, in MiB: one value for all devices, or one for each worker, one for each "
          "GPU and one for the CPU, comma-separated", type="str", default="1024", metavar="MIB",
          env="LLAMA_ARG_FIT_TARGET", commands=_FITTED),
    _used("-fitc --fit-ctx", "minimum context size to which --fit reduces the context", type="int", default=4096,
          metavar="N", env="LLAMA_ARG_FIT_CTX", commands=_FITTED),
    _none("--op-offload", _WHERE, type="bool", off_names="--no-op-offload"),
    _none("--no-host", _WHERE, type="bool", env="LLAMA_ARG_NO_HOST"),
    _none("--repack", "weights are never repacked", type="bool", off_names="-nr --no-repack", env="LLAMA_ARG_REPACK"),
    _none("-lzm --lazy-mode", "mapped files are always read on demand", env="LLAMA_ARG_LAZY_MODE"),
    _none("-dt --defrag-thold", "KV cells of a sequence are never fragmented", env="LLAMA_ARG_DEFRAG_THOLD"),
    _none("--swa-full", "a sliding-window cache keeps only the cells in the window; the output is the same",
          type="bool", env="LLAMA_ARG_SWA_FULL"),
    _none("--kv-unified-per-slot", "use --ctx-size and --parallel", env="LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    _none("-C --cpu-mask", "threads are placed by the system; see --numa"),
    _none("-Cr --cpu-range", "threads are placed by the system; see --numa"),
    _none("--cpu-strict", "threads are placed by the system; see --numa"),
    _none("-Cb --cpu-mask-batch", "threads are placed by the system; see --numa"),
    _none("-Crb --cpu-range-batch", "threads are placed by the system; see --numa"),
    _none("--cpu-strict-batch", "threads are placed by the system; see --numa"),
    _none("--prio", "set the priority with nice"),
    _none("--prio-batch", "set the priority with nice"),
    _none("--poll", "threads always spin briefly, then sleep"),
    _none("--poll-batch", "threads always spin briefly, then sleep"),
    _none("--perf", "timings are always measured", type="bool", off_names="--no-perf", env="LLAMA_ARG_PERF"),
    _none("--warmup", "kernels are compiled while the model loads", type="bool", off_names="--no-warmup",
          env="LLAMA_ARG_WARMUP"),
    _used("--rope-scaling", "RoPE scaling method: none, linear, yarn (default: the model's)", type="str",
          choices="none linear yarn", metavar="METHOD", env="LLAMA_ARG_ROPE_SCALING_TYPE", commands=_ENGINE),
    _used("--rope-scale", "RoPE context scaling factor: positions are divided by it", type="float", metavar="N",
          env="LLAMA_ARG_ROPE_SCALE", commands=_ENGINE),
    _used("--rope-freq-base", "RoPE base frequency (0: the model's)", type="float", metavar="N",
          env="LLAMA_ARG_ROPE_FREQ_BASE", commands=_ENGINE),
    _used("--rope-freq-scale", "RoPE frequency scaling factor: 1 / --rope-scale (0: the model's)", type="float",
          metavar="N", env="LLAMA_ARG_ROPE_FREQ_SCALE", commands=_ENGINE),
    _used("--yarn-orig-ctx", "YaRN: original context size of the model (0: the model's)", type="int", metavar="N",
          env="LLAMA_ARG_YARN_ORIG_CTX", commands=_ENGINE),
    _used("--yarn-ext-factor", "YaRN: extrapolation mix factor (-1: the model's, 0: full interpolation)", type="float",
          metavar="N", env="LLAMA_ARG_YARN_EXT_FACTOR", commands=_ENGINE),
    _used("--yarn-attn-factor", "YaRN: scaling factor of the attention magnitude (-1: the model's)", type="float",
          metavar="N", env="LLAMA_ARG_YARN_ATTN_FACTOR", commands=_ENGINE),
    _used("--yarn-beta-slow",
          "YaRN: dimensions with fewer rotations than this are fully interpolated (-1: the model's)", type="float",
          metavar="N", env="LLAMA_ARG_YARN_BETA_SLOW", commands=_ENGINE),
    _used("--yarn-beta-fast", "YaRN: dimensions with more rotations than this are not interpolated (-1: the model's)",
          type="float", metavar="N", env="LLAMA_ARG_YARN_BETA_FAST", commands=_ENGINE),
    _used("--spec-type",
          "speculative decoding methods, comma-separated; output bytes are the same with each: draft-simple (the "
          "draft model of -md), draft-mtp (the model's multi-token prediction block, in its file or that of -md), "
          "draft-eagle3 and draft-dflash (the EAGLE-3 or DFlash head of -md), suffix (tokens that followed the "
          "longest matching suffix, in this sequence or in earlier outputs of this server), ngram-simple, ngram-map-k, "
          "ngram-map-k4v, ngram-mod and ngram-cache (llama.cpp's names of suffix; ngram-cache also reads -lcs and "
          "-lcd), none, or auto: suffix with --rpc (to hide the latency of links) or -md, and with -md also the method "
          "that its file is made for", type="str", default="auto", metavar="TYPES", env="LLAMA_ARG_SPEC_TYPE",
          commands=DRAFT_COMMANDS),
    _used("--spec-default", "same as --spec-type ngram-mod", default=False, commands=DRAFT_COMMANDS),
    _used("-md --model-draft --spec-draft-model",
          "draft model for speculative decoding (same vocabulary), or an MTP, EAGLE-3 or DFlash head (see "
          "--spec-type); accepts the same forms as -m", type="str", metavar="MODEL", env="LLAMA_ARG_SPEC_DRAFT_MODEL",
          commands=DRAFT_COMMANDS),
    _used("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "draft model from Hugging Face; accepts the same forms as -hf",
          type="str", metavar="REPO", env="LLAMA_ARG_SPEC_DRAFT_HF_REPO", commands=DRAFT_COMMANDS),
    _used("-devd --spec-draft-device --device-draft",
          "devices to put the draft model on: CUDA0, or workers of --rpc, comma-separated; none: the CPU (default: the "
          "GPUs of the model, or the CPU)", type="str", metavar="DEVICES", commands=DRAFT_COMMANDS),
    _used("-ngld --spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft",
          "number of the draft model's layers, counted from the last, to put on GPUs, or on the workers of "
          "--spec-draft-device (auto: as many as fit, or all)", type="str", default="auto", metavar="N",
          env="LLAMA_ARG_N_GPU_LAYERS_DRAFT", commands=DRAFT_COMMANDS),
    _used("-td --spec-draft-threads --threads-draft", "CPU threads for the draft model (default: --threads)",
          type="int", metavar="N", commands=DRAFT_COMMANDS),
    _used("-tbd --spec-draft-threads-batch --threads-batch-draft",
          "CPU threads for the draft model's prompts (default: --threads-draft, else --threads-batch)", type="int",
          metavar="N", commands=DRAFT_COMMANDS),
    _used("-ctkd --spec-draft-type-k --cache-type-k-draft", "data type of the draft model's K cache", type="str",
          default="f16", choices=" ".join(KV_TYPES), metavar="TYPE", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
          commands=DRAFT_COMMANDS),
    _used("-ctvd --spec-draft-type-v --cache-type-v-draft", "data type of the draft model's V cache", type="str",
          default="f16", choices=" ".join(KV_TYPES), metavar="TYPE", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
          commands=DRAFT_COMMANDS),
    _used("--spec-draft-n-max",
          "maximum number of draft tokens (default: adapted to the measured speed and acceptance rate)", type="int",
          metavar="N", env="LLAMA_ARG_SPEC_DRAFT_N_MAX", commands=DRAFT_COMMANDS),
    _used("--spec-draft-n-min", "minimum number of draft tokens; shorter drafts are discarded", type="int", default=0,
          metavar="N", env="LLAMA_ARG_SPEC_DRAFT_N_MIN", commands=DRAFT_COMMANDS),
    _used("--spec-draft-p-min --draft-p-min", "minimum probability of a draft token, as computed by the draft model",
          type="float", default=0.0, metavar="P", env="LLAMA_ARG_SPEC_DRAFT_P_MIN", commands=DRAFT_COMMANDS),
    *(_none(f"--spec-ngram-mod-{name}", _NGRAMS, commands=DRAFT_COMMANDS) for name in ("n-match", "n-min", "n-max")),
    *(
        _none(f"--spec-ngram-{kind}-{name}", _NGRAMS, commands=DRAFT_COMMANDS)
        for kind in ("simple", "map-k", "map-k4v")
        for name in ("size-n", "size-m", "min-hits")
    ),
    _used("-lcs --lookup-cache-static", "ngram-cache: static lookup file made by llama-lookup-create", type="str",
          metavar="FILE", commands=DRAFT_COMMANDS),
    _used("-lcd --lookup-cache-dynamic",
          "ngram-cache: dynamic lookup file of earlier outputs; it is read, but not updated", type="str",
          metavar="FILE", commands=DRAFT_COMMANDS),
    _none("-Cd --spec-draft-cpu-mask --cpu-mask-draft", _DRAFT_ALIKE),
    _none("-Crd --spec-draft-cpu-range --cpu-range-draft", _DRAFT_ALIKE),
    _none("--spec-draft-cpu-strict --cpu-strict-draft", _DRAFT_ALIKE),
    _none("--spec-draft-prio --prio-draft", _DRAFT_ALIKE),
    _none("--spec-draft-poll --poll-draft", _DRAFT_ALIKE),
    _none("-Cbd --spec-draft-cpu-mask-batch --cpu-mask-batch-draft", _DRAFT_ALIKE),
    _none("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft", _DRAFT_ALIKE),
    _none("--spec-draft-prio-batch --prio-batch-draft", _DRAFT_ALIKE),
    _none("--spec-draft-poll-batch --poll-batch-draft", _DRAFT_ALIKE),
    _none("-otd --spec-draft-override-tensor --override-tensor-draft", _DRAFT_ALIKE),
    _none("-cmoed --spec-draft-cpu-moe --cpu-moe-draft", _DRAFT_ALIKE, type="bool",
          env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE"),
    _none("-ncmoed --spec-draft-n-cpu-moe --spec-draft-ncmoe --n-cpu-moe-draft", _DRAFT_ALIKE,
          env="LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE"),
    _none("--spec-draft-p-split --draft-p-split", _ONE_DRAFT, env="LLAMA_ARG_SPEC_DRAFT_P_SPLIT"),
    _none("--spec-draft-backend-sampling", _ONE_DRAFT, type="bool", off_names="--no-spec-draft-backend-sampling",
          env="LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING"),
    _none("--spec-draft-sampling", _ONE_DRAFT, env="LLAMA_ARG_SPEC_DRAFT_SAMPLING"),
    _refused("--spec-synth-len", "synthetic acceptance rates are not supported", env="LLAMA_ARG_SPEC_SYNTH_LEN"),
    _refused("--spec-synth-rates", "synthetic acceptance rates are not supported", env="LLAMA_ARG_SPEC_SYNTH_RATES"),
    _refused("--draft --draft-n --draft-max", _REMOVED, env="LLAMA_ARG_DRAFT_MAX"),
    _refused("--draft-min --draft-n-min", _REMOVED, env="LLAMA_ARG_DRAFT_MIN"),
    _refused("--spec-ngram-size-n", _REMOVED),
    _refused("--spec-ngram-size-m", _REMOVED),
    _refused("--spec-ngram-min-hits", _REMOVED),
)

SPLIT = _group(
    "graphics cards and several machines",
    _used("--rpc",
          "RPC workers to split the model across: host:port or tls://host:port, comma-separated; may be repeated",
          type="str", many=True, metavar="SERVERS", env="LLAMA_ARG_RPC", commands=_ENGINE),
    _used("-ts --tensor-split",
          "how layers are divided among the devices: auto (fill the GPUs of this machine; with --rpc, measure all "
          "devices and minimize the time per token), memory (by free memory, as llama.cpp does), or proportions, one "
          "for each worker, then one for each GPU, and optionally one more for the CPU: 3,1", type="str",
          default="auto", metavar="N0,N1,…", env="LLAMA_ARG_TENSOR_SPLIT", commands=_ENGINE),
    _used("-ngl --gpu-layers --n-gpu-layers --ngl",
          "number of layers, counted from the last, to put on GPUs and workers; the output head counts as one more, "
          "the first layers stay with the CPU; all, or auto: as many as fit the GPUs, or as --tensor-split decides",
          type="str", default="auto", metavar="N", env="LLAMA_ARG_N_GPU_LAYERS LLAMA_N_GPU_LAYERS", commands=_ENGINE),
    _used("-dev --device",
          "devices to put layers on, in this order: CUDA0, RPC0, RPC0[host:port], host:port, CPU, comma-separated; "
          "none: only the CPU", type="str", metavar="DEV,DEV", env="LLAMA_ARG_DEVICE", commands=_ENGINE),
    _used("--list-devices", "list the devices (CPU, GPUs and the workers of --rpc) and exit", default=False,
          commands=_ENGINE),
    _used("-ot --override-tensor",
          "device of the weights whose names match a regular expression: PATTERN=DEVICE, comma-separated", type="str",
          many=True, metavar="PATTERN=DEVICE", env="LLAMA_ARG_OVERRIDE_TENSOR", commands=_ENGINE),
    _used("-cmoe --cpu-moe", "keep all expert weights (MoE) with the CPU", type="bool", default=False,
          env="LLAMA_ARG_CPU_MOE", commands=_ENGINE),
    _used("-ncmoe --n-cpu-moe", "keep the expert weights (MoE) of the first N layers with the CPU", type="int",
          default=0, metavar="N", env="LLAMA_ARG_N_CPU_MOE", commands=_ENGINE),
    _used("-ncffn --n-cpu-ffn", "keep the dense feed-forward weights of the first N layers with the CPU", type="int",
          default=0, metavar="N", env="LLAMA_ARG_N_CPU_FFN", commands=_ENGINE),
    _used("-kvo --kv-offload",
          "keep the KV cache of a layer on the device of the layer; --no-kv-offload keeps it with the CPU, which then "
          "computes attention", type="bool", default=True, off_names="-nkvo --no-kv-offload",
          env="LLAMA_ARG_KV_OFFLOAD", commands=_ENGINE),
    _used("-sm --split-mode",
          "layer: split by whole layers; none: use one device (--main-gpu); row and tensor are not supported",
          type="str", default="layer", choices="none layer row tensor", metavar="MODE", env="LLAMA_ARG_SPLIT_MODE",
          commands=_ENGINE),
    _used("-mg --main-gpu",
          "device to use with --split-mode none, counted from 0 over the workers and then the GPUs, or in --device",
          type="int", default=0, metavar="INDEX", env="LLAMA_ARG_MAIN_GPU", commands=_ENGINE),
    _used("--rpc-failover",
          "seconds after which generation continues on the remaining devices if a worker stays unreachable (default: "
          "wait for the worker)", type="float", metavar="SECONDS", env="LLAMA_ARG_RPC_FAILOVER", commands=_ENGINE,
          requires="rpc"),
    _used("--rpc-wait", "seconds to wait for workers that are unreachable at the start or lost while the model loads",
          type="float", default=60.0, metavar="SECONDS", env="LLAMA_ARG_RPC_WAIT", commands=_ENGINE, requires="rpc"),
    _used("--rpc-request-wait", "seconds that requests wait for a lost worker before they fail with 503", type="float",
          default=30.0, metavar="SECONDS", env="LLAMA_ARG_RPC_REQUEST_WAIT", commands=_ENGINE, requires="rpc"),
    _used("--rpc-connect-timeout", "seconds to wait for a connection to a worker, handshake included", type="float",
          default=5.0, metavar="SECONDS", env="LLAMA_ARG_RPC_CONNECT_TIMEOUT", commands=_ENGINE, requires="rpc"),
    _used("--rpc-alive-timeout", "seconds without a message after which a worker counts as lost", type="float",
          default=2.0, metavar="SECONDS", env="LLAMA_ARG_RPC_ALIVE_TIMEOUT", commands=_ENGINE, requires="rpc"),
    _used("--rpc-ring",
          "auto: llamado workers send results straight to the next worker if they can reach it; off: results pass "
          "through this machine", type="str", default="auto", choices="auto off", metavar="auto|off",
          env="LLAMA_ARG_RPC_RING", commands=_ENGINE, requires="rpc"),
    _secret("--cluster-token",
          "shared secret with which workers join and leave a running server (POST /cluster/join, /cluster/drain) and "
          "other machines move layers", metavar="TOKEN", env="LLAMADO_CLUSTER_TOKEN"),
    _used("--discover", "add workers that announce themselves on the local network (llamado worker --announce)",
          default=False, env="LLAMADO_DISCOVER"),
    _used("--lab",
          "enable the latency lab in the web UI: change the latency of the links to the workers of --rpc, and to N "
          "more workers started on this machine, while the server runs", type="int", bare="0", metavar="N",
          env="LLAMADO_LAB"),
    _used("--rpc-ca", "PEM file of the certificate authority of tls:// workers", type="str", metavar="FILE",
          env="LLAMA_ARG_RPC_CA", commands=_ENGINE, requires="rpc"),
    _used("--rpc-cert", "PEM file of the client certificate for tls:// workers", type="str", metavar="FILE",
          env="LLAMA_ARG_RPC_CERT", commands=_ENGINE, requires="rpc"),
    _used("--rpc-key", "PEM file of the private key of --rpc-cert", type="str", metavar="FILE", env="LLAMA_ARG_RPC_KEY",
          commands=_ENGINE, requires="rpc"),
)

SAMPLING = _group(
    "sampling (defaults for requests)",
    *(_default(row) for row in PARAMETERS if row.flags and not row.served),
    _used("--sampler-seq --sampling-seq", "order of the samplers, one letter each (edskypmxt)", type="str",
          metavar="LETTERS", commands=_SAMPLING),
    _used("--grammar", "grammar for all outputs (GBNF)", type="str", metavar="GBNF"),
    _used("--grammar-file", "file of a grammar for all outputs", type="str", metavar="FILE"),
    _used("-j --json-schema", "JSON schema for all outputs", type="str", metavar="SCHEMA"),
    _used("-jf --json-schema-file", "file of a JSON schema for all outputs", type="str", metavar="FILE"),
    _none("-bs --backend-sampling", "sampling always runs on this machine's CPU", type="bool",
          env="LLAMA_ARG_BACKEND_SAMPLING"),
    _none("-e --escape", "requests are JSON, which has escapes of its own", type="bool", off_names="--no-escape"),
)

SERVER = _group(
    "server",
    _used("--host", "address to listen on", type="str", default="127.0.0.1", metavar="HOST", env="LLAMA_ARG_HOST",
          commands=_HTTP),
    _used("--port", "port to listen on (0: any free one)", type="int", default=8080, metavar="PORT",
          env="LLAMA_ARG_PORT", commands=_HTTP),
    _used("--reuse-port", "allow several servers to listen on the same port", default=False,
          env="LLAMA_ARG_REUSE_PORT"),
    _secret("--api-key", "keys that clients must send, comma-separated; may be repeated", many=True,
          metavar="KEY", env="LLAMA_API_KEY", commands=_HTTP),
    _used("--api-key-file", "file of API keys, one per line; # starts a comment", type="str", metavar="FILE",
          env="LLAMA_ARG_API_KEY_FILE", commands=_HTTP),
    _used("--ssl-key-file", "PEM file of the TLS private key", type="str", metavar="FILE", env="LLAMA_ARG_SSL_KEY_FILE",
          commands=_HTTP),
    _used("--ssl-cert-file", "PEM file of the TLS certificate", type="str", metavar="FILE",
          env="LLAMA_ARG_SSL_CERT_FILE", commands=_HTTP),
    _used("--cors-origins --cors-origin",
          "origins that browsers may call from (CORS), comma-separated; localhost: pages of this machine; *: any",
          type="str", default="localhost", metavar="ORIGINS", env="LLAMA_ARG_CORS_ORIGINS", commands=_HTTP),
    _used("--allowed-hosts",
          "host names accepted in requests without an API key, besides IP addresses and localhost, comma-separated "
          "(.example.com: the domain and its subdomains; *: any); may be repeated", type="str", many=True,
          metavar="NAMES", env="LLAMADO_ALLOWED_HOSTS", commands=_HTTP),
    _used("--cors-methods", "methods that browsers may use (CORS)", type="str", default="GET, POST, DELETE, OPTIONS",
          metavar="METHODS", env="LLAMA_ARG_CORS_METHODS", commands=_HTTP),
    _used("--cors-headers", "request headers that browsers may send (CORS)", type="str", default="*", metavar="HEADERS",
          env="LLAMA_ARG_CORS_HEADERS", commands=_HTTP),
    _used("--cors-credentials", "allow browsers to send credentials (CORS)", default=True,
          off_names="--no-cors-credentials", env="LLAMA_ARG_CORS_CREDENTIALS", commands=_HTTP),
    _used("--cors", "accept browser requests from any origin, unless --cors-origins is given", default=False,
          commands=_HTTP),
    _used("--metrics", "enable /metrics (Prometheus)", default=False, env="LLAMA_ARG_ENDPOINT_METRICS"),
    _used("--metrics-labels",
          "add labels to all metrics: engine, engine_version, model_id and those given, comma-separated: "
          "pool_id=a,replica_id=b", type="str", bare="on", metavar="NAME=VALUE", env="LLAMADO_METRICS_LABELS",
          commands=_HTTP),
    _used("--slots", "enable /slots", default=True, off_names="--no-slots", env="LLAMA_ARG_ENDPOINT_SLOTS"),
    _used("--props", "enable POST /props", default=False, env="LLAMA_ARG_ENDPOINT_PROPS"),
    _default(BY_NAME["cache_prompt"]),
    _default(BY_NAME["sse_ping_interval"]),
    _used("--chat-template", "Jinja chat template to use instead of the model's (or: chatml)", type="str",
          metavar="JINJA", env="LLAMA_ARG_CHAT_TEMPLATE", commands=_SAMPLING),
    _used("--chat-template-file", "file of a Jinja chat template", type="str", metavar="FILE",
          env="LLAMA_ARG_CHAT_TEMPLATE_FILE", commands=_SAMPLING),
    _used("--chat-template-kwargs", "additional variables for the chat template, as a JSON object", type="str",
          metavar="JSON", env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    _used("--prefill-assistant", "if the last message is the assistant's, continue it", default=True,
          off_names="--no-prefill-assistant", env="LLAMA_ARG_PREFILL_ASSISTANT"),
    _used("--jinja", "use Jinja chat templates and tools (off: built-in templates only)", default=True,
          off_names="--no-jinja", env="LLAMA_ARG_JINJA"),
    _used("--skip-chat-parsing", "return the whole output as content; do not extract reasoning or tool calls",
          default=False, off_names="--no-skip-chat-parsing", env="LLAMA_ARG_SKIP_CHAT_PARSING"),
    _used("--reasoning-format",
          "where reasoning is returned: deepseek (reasoning_content), deepseek-legacy (reasoning_content and "
          "content), none (left in content), auto (deepseek)", type="str", default="auto",
          choices="auto none deepseek deepseek-legacy", metavar="FORMAT", env="LLAMA_ARG_THINK"),
    _used("-rea --reasoning", "reasoning of the model: on, off, or auto (as the chat template decides)", type="str",
          default="auto", choices="on off auto", bare="on", metavar="on|off|auto", env="LLAMA_ARG_REASONING"),
    _used("--reasoning-effort", "reasoning effort passed to the chat template (minimal, low, medium, high …)",
          type="str", default="default", metavar="LEVEL", env="LLAMA_ARG_REASONING_EFFORT"),
    _used("--reasoning-budget", "maximum number of reasoning tokens (-1: no limit, 0: none)", type="int", default=-1,
          metavar="N", env="LLAMA_ARG_THINK_BUDGET"),
    _used("--reasoning-budget-message", "text inserted to end the reasoning when the budget is spent", type="str",
          default="", metavar="TEXT", env="LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    _used("--reasoning-preserve", "pass the reasoning of earlier turns to chat templates that support it", default=True,
          off_names="--no-reasoning-preserve", env="LLAMA_ARG_REASONING_PRESERVE"),
    _used("--ui --webui", "serve the web UI at /", default=True, off_names="--no-ui --no-webui", env="LLAMA_ARG_UI"),
    _used("--ui-config --webui-config", "initial settings of the web UI, as JSON", type="str", metavar="JSON",
          env="LLAMA_ARG_UI_CONFIG"),
    _used("--ui-config-file --webui-config-file", "JSON file of initial settings of the web UI", type="str",
          metavar="FILE", env="LLAMA_ARG_UI_CONFIG_FILE"),
    _used("--chats",
          "folder in which the server stores the chats of the web UI, separately for each API key, so that all devices "
          "show the same; created if necessary (default: only browsers store chats)", type="str",
          metavar="FOLDER", env="LLAMADO_CHATS"),
    _used("-to --timeout",
          "seconds without progress after which a connection is closed while a request is read or a response is "
          "written", type="int", default=3600, metavar="N", env="LLAMA_ARG_TIMEOUT", commands=_HTTP),
    _used("--threads-http", "threads that prepare requests, such as tokenizing long prompts (-1: automatic)",
          type="int", default=-1, metavar="N", env="LLAMA_ARG_THREADS_HTTP"),
    _used("--max-queue", "maximum number of requests that wait for a slot; further ones are rejected with 503",
          type="int", default=1024, metavar="N", env="LLAMADO_MAX_QUEUE"),
    _used("--max-prompts", "maximum number of prompts in one request", type="int", default=1024, metavar="N",
          env="LLAMADO_MAX_PROMPTS"),
    _used("--max-connections", "maximum number of open connections; further ones wait (-1: the system's limit)",
          type="int", default=-1, metavar="N", env="LLAMADO_MAX_CONNECTIONS"),
    _used("-sps --slot-prompt-similarity",
          "minimum share of the prompt that a slot must hold to be preferred (0: any slot)", type="float", default=0.1,
          metavar="X"),
    _used("-cram --cache-ram", "size of the prompt cache in MiB, at most half of the memory (-1: no limit, 0: off)",
          type="int", default=8192, metavar="N", env="LLAMA_ARG_CACHE_RAM"),
    _used("--cache-disk",
          "folder of the persistent prompt cache: stores prompts that --cache-ram evicts, and all of them at "
          "shutdown, so that they are read instead of computed; servers may share it", type="str", metavar="FOLDER",
          env="LLAMADO_CACHE_DISK"),
    _used("--cache-disk-size",
          "maximum size of --cache-disk (10G, 500M); the least recently used prompts are deleted first", type="str",
          default="10G", metavar="SIZE", env="LLAMADO_CACHE_DISK_SIZE"),
    _used("-ctxcp --ctx-checkpoints --swa-checkpoints",
          "maximum number of checkpoints per sequence in the prompt cache, for models with sliding windows or "
          "recurrent states; they are taken where messages begin and end and where prompts diverged", type="int",
          default=32, metavar="N", env="LLAMA_ARG_CTX_CHECKPOINTS"),
    _used("-cms --checkpoint-min-step",
          "prompt tokens between regular checkpoints, which are taken in addition (0: --ubatch-size)", type="int",
          default=8192, metavar="N", env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"),
    _used("--cache-idle-slots",
          "when a request starts, move the prompts of idle slots to the prompt cache (--cache-ram), and free their "
          "cells if slots share a context (off: only when the space is needed)", default=False,
          off_names="--no-cache-idle-slots", env="LLAMA_ARG_CACHE_IDLE_SLOTS"),
    _default(BY_NAME["special"]),
    _used("--spm-infill", "infill with the suffix before the prefix, as some models prefer", default=False),
    _none("--cache-reuse", "common prefixes are always reused; reusing shifted chunks would change outputs",
          env="LLAMA_ARG_CACHE_REUSE"),
    _used("--context-shift", "when the context is full, drop its older half and continue, instead of ending the output",
          default=False, off_names="--no-context-shift", env="LLAMA_ARG_CONTEXT_SHIFT"),
    _used("--embedding --embeddings", "serve embeddings only", default=False, env="LLAMA_ARG_EMBEDDINGS"),
    _used("--rerank --reranking", "enable /rerank", default=False, env="LLAMA_ARG_RERANKING"),
    _used("--pooling", "pooling of token embeddings: none, mean, cls, last, rank (default: the model's)", type="str",
          choices="none mean cls last rank", metavar="KIND", env="LLAMA_ARG_POOLING"),
    _used("--embd-normalize",
          "normalization of embeddings: -1 none, 0 maximum absolute, 1 taxicab, 2 Euclidean, above 2: p-norm",
          type="int", default=2, metavar="N"),
    _used("--slot-save-path", "folder of the files that /slots/{id}?action=save and restore use", type="str",
          metavar="FOLDER"),
    _used("--api-prefix", "prefix of all URL paths, without the trailing slash", type="str", default="",
          metavar="PREFIX", env="LLAMA_ARG_API_PREFIX"),
    _used("--path", "folder of static files to serve instead of the web UI", type="str", metavar="FOLDER",
          env="LLAMA_ARG_STATIC_PATH"),
    _used("--sleep-idle-seconds",
          "unload the model after this many seconds without a request; the next request reloads it (-1: never)",
          type="int", default=-1, metavar="SECONDS"),
    _used("--hang-timeout", "seconds in one step after which /livez reports that the engine hangs (0: never)",
          type="float", default=600.0, metavar="SECONDS", env="LLAMADO_HANG_TIMEOUT"),
    _used("--tools",
          "built-in tools that clients may call on behalf of the model, comma-separated: read_file, file_glob_search, "
          "grep_search, exec_shell_command, write_file, edit_file, get_info, or all", type="str", metavar="TOOLS",
          env="LLAMA_ARG_TOOLS"),
    _used("--tools-folder",
          "folder that the file tools are confined to; shell commands can leave it (default: the working directory)",
          type="str", default=".", metavar="FOLDER", env="LLAMADO_TOOLS_FOLDER"),
    _used("--tools-runtime",
          "run the tools elsewhere: docker:IMAGE, podman:IMAGE (a new container), docker-container:ID, "
          "podman-container:ID (a running container), ssh:TARGET", type="str", metavar="WHERE",
          env="LLAMA_ARG_TOOLS_RUNTIME"),
    _used("--mcp-servers-config", "JSON file of MCP servers whose tools clients may call, in the format of Cursor",
          type="str", metavar="FILE", env="LLAMA_ARG_MCP_SERVERS_CONFIG"),
    _secret("--mcp-servers-json", "MCP servers as JSON, in the same format", metavar="JSON",
          env="LLAMA_ARG_MCP_SERVERS_JSON"),
    _used("-ag --agent", "enable all built-in tools (--tools all) and the MCP proxy (--ui-mcp-proxy)", default=False,
          off_names="-no-ag --no-agent", env="LLAMA_ARG_AGENT"),
    _used("--ui-mcp-proxy --webui-mcp-proxy", "forward requests of the web UI to MCP servers (/cors-proxy)",
          default=False, off_names="--no-ui-mcp-proxy --no-webui-mcp-proxy", env="LLAMA_ARG_UI_MCP_PROXY"),
)

ROUTER = _group(
    "several models",
    _used("--models-dir", "folder of models to serve by name: GGUF files, or a folder for each model", type="str",
          metavar="FOLDER", env="LLAMA_ARG_MODELS_DIR"),
    _used("--models-preset", "INI file of models and their flags", type="str", metavar="FILE",
          env="LLAMA_ARG_MODELS_PRESET"),
    _used("--llama-swap --config", "config.yaml of llama-swap: models and the commands that serve them", type="str",
          metavar="FILE", env="LLAMADO_CONFIG"),
    _used("--models-max", "maximum number of models loaded at the same time (0: no limit)", type="int", default=4,
          metavar="N", env="LLAMA_ARG_MODELS_MAX"),
    _used("--models-memory",
          "maximum memory of all loaded models (24G, 800M; 0: no limit); the least recently used are unloaded first "
          "(default: this machine's memory)", type="str", metavar="SIZE", env="LLAMADO_MODELS_MEMORY"),
    _used("--models-autoload", "load a model when a request names it", default=True,
          off_names="--no-models-autoload", env="LLAMA_ARG_MODELS_AUTOLOAD"),
)

LOGGING = _group(
    "logging and tracing",
    _used("-v --verbose --log-verbose", "log everything", default=False, commands=_ENGINE | _WORKER | _TAP | _GATEWAY),
    _used("-lv --verbosity --log-verbosity",
          "log level: 0 output only, 1 errors, 2 warnings, 3 info, 4 and above debug, 10 also the device of each layer",
          type="int", default=3, metavar="N", env="LLAMA_ARG_LOG_VERBOSITY LLAMA_LOG_VERBOSITY", dest="log_verbosity",
          commands=_ENGINE | _GATEWAY),
    _used("--log-file", "also write the log to this file, at least at level info", type="str", metavar="FILE",
          env="LLAMA_ARG_LOG_FILE", commands=_HTTP),
    _used("--log-disable", "disable the log", default=False, commands=_HTTP),
    _used("--log-jsonl", "log one JSON object per line", default=False, off_names="--no-log-jsonl",
          env="LLAMA_ARG_LOG_JSONL", commands=_HTTP),
    _used("--log-format", "older spelling of --log-jsonl: text or json", type="str", default="text",
          choices="text json", metavar="FORMAT", commands=_HTTP),
    _used("--log-timestamps", "log the time of each line", default=True, off_names="--no-log-timestamps",
          env="LLAMA_ARG_LOG_TIMESTAMPS", commands=_HTTP | _WORKER | _TAP),
    _used("--log-prefix", "log the level of each line", default=False, off_names="--no-log-prefix",
          env="LLAMA_ARG_LOG_PREFIX", commands=_HTTP),
    _used("--log-colors", "colors in the log: on, off, or auto (on a terminal)", type="str", default="auto",
          choices="on off auto", bare="on", metavar="on|off|auto", env="LLAMA_ARG_LOG_COLORS", commands=_HTTP),
    _used("--otel", "send OpenTelemetry traces to $OTEL_EXPORTER_OTLP_ENDPOINT (on if that variable is set)",
          default=False, env="LLAMADO_OTEL"),
    _none("--log-prompts-dir", "prompts are never logged"),
)

GATEWAY = _group(
    "replicas",
    _used("--replica", "URL of a server (http://host:port), comma-separated; may be repeated", type="str", many=True,
          metavar="URL", commands=_GATEWAY),
    _used("--backup", "URL of a server to use while no replica is up; may be repeated", type="str", many=True,
          metavar="URL", commands=_GATEWAY),
    _used("--config", "YAML file: replicas, backups, keys, quota_file, admin_key, labels and the timeouts below",
          type="str", metavar="FILE", commands=_GATEWAY, dest="gateway_config"),
    _secret("--replica-key", "API key to send to the replicas", metavar="KEY", env="LLAMADO_REPLICA_KEY",
          commands=_GATEWAY),
    _secret("--admin-key", "key for /gateway/replicas and /gateway/drain (default: both reject all requests)",
          metavar="KEY", env="LLAMADO_ADMIN_KEY", commands=_GATEWAY | {"drain"}),
    _used("--key-file",
          "YAML file of API keys and their limits (requests_per_minute, tokens_per_minute, requests_per_day, "
          "tokens_per_day)", type="str", metavar="FILE", commands=_GATEWAY),
    _used("--quota-file", "file that keeps the daily usage of keys across restarts (one per gateway)", type="str",
          metavar="FILE", env="LLAMADO_QUOTA_FILE", commands=_GATEWAY),
    _used("--health-interval", "seconds between two checks of a replica's /health", type="float", default=1.0,
          metavar="SECONDS", commands=_GATEWAY),
    _used("--health-timeout", "seconds without an answer to /health after which a replica counts as frozen",
          type="float", default=5.0, metavar="SECONDS", commands=_GATEWAY),
    _used("--stall-timeout", "seconds after which responses in progress at a frozen replica are aborted",
          type="float", default=120.0, metavar="SECONDS", commands=_GATEWAY),
    _used("--patience", "seconds that a request waits for an available replica", type="float", default=10.0,
          metavar="SECONDS", commands=_GATEWAY),
)

VERIFY = _group(
    "verify",
    _used("--prompts", "file of prompts, one per line (default: generated prompts)", type="str", metavar="FILE",
          commands=_VERIFY),
    _used("-n --count", "number of prompts", type="int", default=200, metavar="N", commands=_VERIFY),
    _used("--parallel", "concurrent requests to each server", type="int", default=8, metavar="N", commands=_VERIFY),
    _used("--n-predict", "tokens to generate for each prompt", type="int", default=64, metavar="N", commands=_VERIFY,
          dest="verify_tokens"),
    _used("--temp --temperature", "sampling temperature", type="float", default=0.8, metavar="X", commands=_VERIFY,
          dest="verify_temperature"),
    _secret("--api-key", "API key to send to the servers", metavar="KEY", commands=_VERIFY, dest="verify_key"),
    _used("--json", "print the result as JSON", default=False, commands=_VERIFY),
)

WAIT = _group(
    "wait",
    _used("--timeout", "maximum seconds to wait", type="float", default=300.0, metavar="SECONDS", commands=_WAIT),
    _used("--interval", "maximum seconds between two attempts", type="float", default=2.0, metavar="SECONDS",
          commands=_WAIT),
    _used("--pid",
          "process of llamado to wait for, instead of a URL: address, prefix and certificate are read from its "
          "command line", type="int", metavar="PID", commands=_WAIT),
)

UP = _group(
    "cluster",
    _used("-m --model", "model: a GGUF path, a catalog name (smollm2, gemma3), hf:user/repo[:quant], "
          "ollama:name[:tag] (default: smollm2)", type="str", metavar="MODEL", many=True, commands=_UP),
    _used("--nodes",
          "number of machines to simulate, including the server's: 3 means two workers and a server that share the "
          "model evenly", type="int", default=1, metavar="N", commands=_UP),
    _used("--latency",
          "latency of each worker's link in ms, comma-separated (20,30); without --nodes, one worker for each value",
          type="str", metavar="MS,MS", commands=_UP),
    _used("--host", "address to listen on for requests", type="str", default="127.0.0.1", metavar="HOST", commands=_UP),
    _used("--port", "port to listen on for requests (0: any free one)", type="int", default=8080, metavar="PORT",
          commands=_UP),
    _used("--replicas", "number of servers, each with its own workers; a gateway is started in front of several",
          type="int", default=1, metavar="R", commands=_UP),
    _used("--engine", "programs to run: llamado, or llama.cpp (llama-server and ggml-rpc-server from PATH)", type="str",
          default="llamado", choices="llamado llama.cpp", metavar="ENGINE", commands=_UP),
    _used("--on", "where servers and workers run: here, or ray (on the nodes of a Ray cluster)", type="str",
          default="here", choices="here ray", metavar="PLACE", commands=_UP),
    _used("-d --detach", "return when everything is ready, and keep it running in the background", default=False,
          commands=_UP),
    _used("--name", "name of the cluster for ps, down, logs and drain", type="str", default="default", metavar="NAME",
          commands=_UP),
    _used("--log-folder", "folder for the logs of all processes (default: inside the cluster's state folder)",
          type="str", metavar="FOLDER", commands=_UP),
)

RUN = _group(
    "chat",
    _used("-p --prompt",
          "send this prompt, print the answer and exit; input from a pipe or file is appended (-: send standard input "
          "only)", type="str", metavar="TEXT", commands=frozenset({"run"})),
    _used("--image", "pictures for the first prompt, comma-separated; may be repeated", type="str", many=True,
          metavar="FILE", commands=frozenset({"run"})),
    _used("--audio", "sounds for the first prompt, comma-separated; may be repeated", type="str", many=True,
          metavar="FILE", commands=frozenset({"run"})),
    _used("-sys --system-prompt", "system message", type="str", metavar="TEXT", commands=frozenset({"run"}),
          dest="system_prompt"),
    _used("--url", "chat with a running server that has the OpenAI API; -m names the model", type="str", metavar="URL",
          commands=frozenset({"run"})),
    _secret("--api-key", "API key for the server of --url", metavar="KEY", env="LLAMA_API_KEY",
          commands=frozenset({"run"}), dest="api_key"),
    _used("--markdown", "render Markdown on a terminal", default=True, off_names="--no-markdown",
          commands=frozenset({"run"})),
)

BENCH = _group(
    "benchmark",
    _used("-p --n-prompt", "prompt lengths in tokens, comma-separated", type="str", default="512", metavar="N,N",
          commands=frozenset({"bench"})),
    _used("-n --n-gen", "generation lengths in tokens, comma-separated", type="str", default="128", metavar="N,N",
          commands=frozenset({"bench"})),
    _used("-d --n-depth", "context depths in tokens, comma-separated: each test starts after this many tokens",
          type="str", default="0", metavar="N,N", commands=frozenset({"bench"})),
    _used("--profile", "also show the time of each operation of a forward pass", type="bool", default=False,
          commands=frozenset({"bench"})),
    _used("--roofline",
          "compare the kernels' speed for a prompt and for a token with this machine's limits, measured in the same "
          "run", type="bool", default=False, commands=frozenset({"bench"})),
    _used("-npl --n-parallel",
          "numbers of concurrent sequences, comma-separated: prints the table of llama-batched-bench, for -p and -n "
          "tokens per sequence", type="str", default="", metavar="N,N", commands=frozenset({"bench"}),
          dest="n_parallel"),
    _used("-r --repetitions", "repetitions of each test", type="int", default=5, metavar="N",
          commands=frozenset({"bench"})),
    _used("-o --output", "output format: md (a table) or json", type="str", default="md", choices="md json",
          metavar="FORMAT", commands=frozenset({"bench"})),
    _used("--latency",
          "delays of graph commands in ms, comma-separated (0,5,10,20): prints a table of decoding speeds through "
          "delayed workers, without drafts", type="str", metavar="MS,MS", commands=frozenset({"bench"})),
    _used("--nodes", "numbers of machines in that table, including this one, comma-separated (3,4,5)", type="str",
          metavar="N,N", commands=frozenset({"bench"})),
    _used("--compare",
          "additional columns of that table, comma-separated: ring (workers send results straight to the next "
          "worker), drafts (methods of --spec-type; giving that flag is enough), streams (8 concurrent answers), "
          "predicted (compute + (N-1) * latency)", type="str", metavar="COLUMNS", commands=frozenset({"bench"})),
    _used("--both-ways", "delay every message in both directions, as a real link does, instead of graph commands only",
          default=False, commands=frozenset({"bench"})),
    _used("--out", "folder for plots of the table", type="str", metavar="FOLDER", commands=frozenset({"bench"})),
    _used("-f --file", "text file to score", type="str", metavar="FILE", commands=frozenset({"perplexity"})),
    _used("--chunks", "maximum number of chunks to score (-1: all)", type="int", default=-1, metavar="N",
          commands=frozenset({"perplexity"})),
)

QUANTIZE = _group(
    "quantize",
    _used("--allow-requantize", "also convert tensors that are already quantized (loses quality twice)", default=False,
          commands=_QUANTIZE),
    _used("--leave-output-tensor", "do not quantize the output tensor", default=False, commands=_QUANTIZE),
    _used("--pure", "use the same type for all tensors, without mixtures", default=False, commands=_QUANTIZE),
    _used("--imatrix", "importance matrix made by llamado imatrix or llama-imatrix", type="str", metavar="FILE",
          commands=_QUANTIZE),
    _used("--include-weights", "use the importance matrix only for tensors whose names contain this; may be repeated",
          type="str", metavar="NAME", many=True, commands=_QUANTIZE),
    _used("--exclude-weights", "do not use the importance matrix for tensors whose names contain this; may be repeated",
          type="str", metavar="NAME", many=True, commands=_QUANTIZE),
    _used("--output-tensor-type", "type of the output tensor", type="str", metavar="TYPE", commands=_QUANTIZE),
    _used("--token-embedding-type", "type of the token embedding tensor", type="str", metavar="TYPE",
          commands=_QUANTIZE),
    _used("--tensor-type", "type of the tensors whose names match a regular expression; may be repeated", type="str",
          metavar="NAME=TYPE", many=True, commands=_QUANTIZE),
    _used("--tensor-type-file", "file of NAME=TYPE entries as for --tensor-type, separated by spaces or line breaks",
          type="str", metavar="FILE", commands=_QUANTIZE),
    _used("--prune-layers", "layers to omit, comma-separated", type="str", metavar="N,N", commands=_QUANTIZE),
    _used("--keep-split", "write as many files as the input has", default=False, commands=_QUANTIZE),
    _used("--override-kv", "set a metadata key: KEY=int:N, float:N, bool:true, str:TEXT; may be repeated", type="str",
          metavar="KEY=TYPE:VALUE", many=True, commands=_QUANTIZE),
    _used("--dry-run", "print the size of the result without writing it", default=False, commands=_QUANTIZE),
    _none("--max-buffer-size", "tensors are always converted in small pieces", commands=_QUANTIZE),
)

IMATRIX = _group(
    "imatrix",
    _used("-m --model", "model: a GGUF path, a catalog name (smollm2, gemma3), hf:user/repo[:quant]", type="str",
          default="smollm2", metavar="MODEL", commands=_IMATRIX),
    _used("-f --file", "calibration text", type="str", metavar="FILE", commands=_IMATRIX),
    _used("-o --output --output-file", "output file", type="str", default="imatrix.gguf", metavar="FILE",
          commands=_IMATRIX),
    _used("-c --ctx-size", "tokens per chunk", type="int", default=512, metavar="N", commands=_IMATRIX),
    _used("-t --threads", "threads (default: one per core)", type="int", metavar="N", commands=_IMATRIX),
    _used("--rpc",
          "RPC workers to split the model across: host:port or tls://host:port, comma-separated; may be repeated",
          type="str", many=True, metavar="SERVERS", commands=_IMATRIX),
    _used("--chunk --from-chunk", "first chunk to process", type="int", default=0, metavar="N", commands=_IMATRIX),
    _used("--chunks", "maximum number of chunks to process (-1: all)", type="int", default=-1, metavar="N",
          commands=_IMATRIX),
    _used("--ppl", "compute the perplexity", default=True, off_names="--no-ppl", commands=_IMATRIX),
    _used("--process-output", "also collect data for the output tensor", default=False, commands=_IMATRIX),
    _used("--parse-special", "parse special tokens such as <|im_end|> in the text", default=False, commands=_IMATRIX),
    _used("-ofreq --output-frequency", "write the output file every N chunks", type="int", default=10, metavar="N",
          commands=_IMATRIX),
    _used("--save-frequency", "save a copy of the output file every N chunks (0: never)", type="int", default=0,
          metavar="N", commands=_IMATRIX),
    _used("--output-format", "format of the output file: gguf, or dat for older programs", type="str", default="gguf",
          choices="gguf dat", metavar="FORMAT", commands=_IMATRIX),
    _used("--in-file", "importance matrices to add up, comma-separated; may be repeated", type="str", metavar="FILE",
          many=True, commands=_IMATRIX),
    _used("--show-statistics", "print statistics of the first --in-file and exit", default=False, commands=_IMATRIX),
)

WORKER = _group(
    "worker",
    _used("-H --host", "address to listen on", type="str", default="127.0.0.1", metavar="HOST", commands=_WORKER),
    _used("-p --port", "port to listen on (0: any free one)", type="int", default=50052, metavar="PORT",
          commands=_WORKER),
    _used("-t --threads", "threads of the CPU device (default: one per available core)", type="int", metavar="N",
          commands=_WORKER),
    _used("-d --device",
          "devices to offer, in this order: CUDA0, CUDA1, CPU, comma-separated (default: the GPUs, or CPU without one)",
          type="str", metavar="DEV,DEV", commands=_WORKER),
    _used("-c --cache", "cache weights on disk, separately for each client ($LLAMADO_CACHE or ~/.cache/llamado, rpc/)",
          default=False, commands=_WORKER),
    _used("-m --mem",
          "maximum memory of all clients together: MiB (bytes from 1048576 on), or 512K, 800M, 16G (default: all free "
          "memory)", type="str", metavar="SIZE", commands=_WORKER),
    _used("--models-dir",
          "folder of models; may be repeated. If the server's model is found there with the same SHA-256, it is "
          "mapped from this disk instead of being sent (folders of `llamado pull` are always searched)", type="str",
          many=True, metavar="DIR", env="LLAMADO_MODELS_DIR", commands=_WORKER),
    _used("--no-own-files", "receive all weights over the network, even if this disk has the model", default=False,
          env="LLAMADO_NO_OWN_FILES", commands=_WORKER),
    _used("--protocol",
          "RPC version offered to unknown clients of llama.cpp: 7 (before b11450) or 8 (since b11450); a client that "
          "disconnects is offered the other one next time", type="str", default="7", choices="7 8", metavar="N",
          commands=_WORKER),
    _used("--no-ring",
          "do not connect to other workers to send them results, even if clients request it (with --allow: only in "
          "those networks)", default=False, env="LLAMADO_NO_RING", commands=_WORKER),
    _used("--tls-cert", "PEM file of the TLS certificate; clients then connect with tls://", type="str", metavar="FILE",
          commands=_WORKER),
    _used("--tls-key", "PEM file of the private key of --tls-cert", type="str", metavar="FILE", commands=_WORKER),
    _used("--tls-client-ca", "PEM file of the certificate authority that must have signed client certificates",
          type="str", metavar="FILE", commands=_WORKER),
    _used("--join",
          "servers to join: HOST:PORT, or https://HOST:PORT (verified with --tls-client-ca), comma-separated; may be "
          "repeated. On SIGTERM the worker leaves them after they have moved its layers", type="str", many=True,
          metavar="SERVER", env="LLAMADO_JOIN", commands=_WORKER),
    _secret("--token", "the --cluster-token of the servers", metavar="TOKEN", env="LLAMADO_CLUSTER_TOKEN",
          commands=_WORKER),
    _used("--share", "share of the layers to request from a server of --join that divides by proportions", type="float",
          default=1.0, metavar="N", commands=_WORKER),
    _used("--announce", "announce the worker on the local network (mDNS) for servers with --discover", default=False,
          env="LLAMADO_ANNOUNCE", commands=_WORKER),
    _used("--allow",
          "networks that may connect (CIDR, such as 10.0.0.0/8), comma-separated; may be repeated (default: all)",
          type="str", many=True, metavar="CIDR", commands=_WORKER),
)

TOP = _group(
    "top",
    _used("--once", "print the current state and exit", default=False, commands=_TOP),
    _used("--json", "print the response of /cluster and exit", default=False, commands=_TOP),
    _used("--interval", "seconds between updates", type="float", default=1.0, metavar="SECONDS", commands=_TOP),
    _secret("--api-key", "API key to send to the server", many=True, metavar="KEY", env="LLAMA_API_KEY", commands=_TOP),
)

CLUSTER = _group(
    "cluster",
    _used("--out", "folder for keys and certificates", type="str", default="cluster-tls", metavar="FOLDER",
          commands=_CLUSTER),
    _used("--server", "DNS names and addresses of the server, comma-separated", type="str", default="", metavar="NAMES",
          commands=_CLUSTER),
    _used("--worker", "DNS names and addresses of one worker, comma-separated; repeat for each worker", type="str",
          many=True, metavar="NAMES", commands=_CLUSTER),
    _used("--workers", "number of workers if none is given by --worker (their certificates are for localhost only)",
          type="int", default=1, metavar="N", commands=_CLUSTER),
    _used("--days", "days until the certificates expire", type="int", default=825, metavar="N", commands=_CLUSTER),
)

TAP = _group(
    "tap",
    _used("--listen-host", "address to listen on", type="str", default="127.0.0.1", metavar="HOST", commands=_TAP),
    _used("--listen-port", "port to listen on (0: any free one)", type="int", default=60052, metavar="PORT",
          commands=_TAP),
    _used("--target-host", "address of the worker", type="str", default="127.0.0.1", metavar="HOST", commands=_TAP),
    _used("--target-port", "port of the worker", type="int", default=50052, metavar="PORT", commands=_TAP),
    _used("--latency-ms", "delay of each graph command (GRAPH_COMPUTE, GRAPH_RECOMPUTE), in ms", type="float",
          default=0.0, metavar="MS", commands=_TAP),
    _used("--jitter-ms", "maximum random addition to the delay, in ms", type="float", default=0.0, metavar="MS",
          commands=_TAP),
    _used("--bandwidth", "maximum bits per second in each direction: 1G, 100M, 64k (default: no limit)", type="str",
          metavar="BITS", commands=_TAP),
    _used("--all", "delay all commands instead of graph commands only", default=False, commands=_TAP),
    _used("--trace", "write the decoded traffic to a file, one JSON object per line", type="str", metavar="FILE",
          commands=_TAP),
)

DOCTOR = _group(
    "doctor",
    _used("-m --model", "model file, or ollama:NAME: check that it is complete, supported, and fits", type="str",
          many=True, metavar="MODEL", commands=_DOCTOR),
    _used("--rpc", "RPC workers to check: host:port or tls://host:port, comma-separated; may be repeated", type="str",
          many=True, metavar="SERVERS", commands=_DOCTOR),
    _used("--rpc-ca", "PEM file of the certificate authority of tls:// workers", type="str", metavar="FILE",
          commands=_DOCTOR),
    _used("--rpc-cert", "PEM file of the client certificate for tls:// workers", type="str", metavar="FILE",
          commands=_DOCTOR),
    _used("--rpc-key", "PEM file of the private key of --rpc-cert", type="str", metavar="FILE", commands=_DOCTOR),
    _used("--host", "address that a planned server will listen on", type="str", default="127.0.0.1", metavar="HOST",
          commands=_DOCTOR),
    _used("--port",
          "port that a planned server will listen on: check that it is free, or find the process that uses it",
          type="int", metavar="PORT", commands=_DOCTOR),
    _secret("--api-key", "API key to send to the server", metavar="KEY", commands=_DOCTOR, env="LLAMA_API_KEY"),
    _used("-t --threads", "threads of a planned server", type="int", metavar="N", commands=_DOCTOR),
    _used("-c --ctx-size", "context size of a planned server in tokens (0: as much as fits)", type="int", default=0,
          metavar="N", commands=_DOCTOR),
    _used("-np --parallel", "slots of a planned server (-1: 4 slots sharing one context)", type="int", default=-1,
          metavar="N", commands=_DOCTOR),
    _used("-ctk --cache-type-k", "data type of the K cache of a planned server", type="str", default="f16",
          choices=" ".join(KV_TYPES), metavar="TYPE", commands=_DOCTOR),
    _used("-ctv --cache-type-v", "data type of the V cache of a planned server", type="str", default="f16",
          choices=" ".join(KV_TYPES), metavar="TYPE", commands=_DOCTOR),
    _used("--mlock", "check that the weights can be locked in RAM", default=False, commands=_DOCTOR),
    _used("--timeout", "seconds to wait for one response", type="float", default=5.0, metavar="SECONDS",
          commands=_DOCTOR),
    _used("--patience", "seconds to watch a loading server for progress", type="float", default=10.0, metavar="SECONDS",
          commands=_DOCTOR),
    _used("--json", "print JSON", default=False, commands=_DOCTOR),
)

DEPLOY = _group(
    "deploy",
    _used("--name", "name of the deployment and all its parts", type="str", default="llamado", metavar="NAME",
          commands=_DEPLOY),
    _used("--replicas", "number of servers", type="int", default=1, metavar="N", commands=_DEPLOY),
    _used("--workers", "number of workers that share the model", type="int", default=0, metavar="N", commands=_DEPLOY),
    _used("--port", "port of the (first) server", type="int", default=8080, metavar="PORT", commands=_DEPLOY),
    _used("--worker-port", "port of the (first) worker", type="int", default=50052, metavar="PORT", commands=_DEPLOY),
    _used("--image", "container image", type="str", default="llamado:latest", metavar="IMAGE", commands=_DEPLOY),
    _used("--program", "path of the llamado program (systemd)", type="str", default="/usr/local/bin/llamado",
          metavar="PATH", commands=_DEPLOY),
    _used("--models", "folder of models, mounted as /models in containers (compose)", type="str", default="/srv/models",
          metavar="FOLDER", commands=_DEPLOY),
    _used("--memory", "memory limit of each process: 16G (default: as the model needs, if its file is on this machine)",
          type="str", metavar="SIZE", commands=_DEPLOY),
    _used("--cpus", "CPU limit of each process", type="float", metavar="N", commands=_DEPLOY),
    _used("--tls",
          "use TLS for servers and workers (servers also with --ssl-key-file and --ssl-cert-file after the --)",
          default=False, commands=_DEPLOY),
    _used("--key",
          "require an API key from clients, stored by the target (also with --api-key or --api-key-file after the --)",
          default=False, commands=_DEPLOY),
    _used("--domain", "host name for clients (nginx)", type="str", default="_", metavar="NAME", commands=_DEPLOY),
    _used("--gateway",
          "put llamado gateway in front of the servers (always so for a cluster.yaml with several replicas)",
          default=False, commands=_DEPLOY),
    _used("--lws", "group each server with its workers in a LeaderWorkerSet (kubernetes, helm)", default=False,
          commands=_DEPLOY),
    _used("--out", "folder to write the files to (default: print those without secrets)", type="str", metavar="FOLDER",
          commands=_DEPLOY),
)
# fmt: on

FLAGS: tuple[Flag, ...] = (
    MODEL
    + COMPUTE
    + SPLIT
    + SAMPLING
    + SERVER
    + ROUTER
    + LOGGING
    + RUN
    + BENCH
    + QUANTIZE
    + IMATRIX
    + WORKER
    + TAP
    + WAIT
    + DOCTOR
    + DEPLOY
    + GATEWAY
    + VERIFY
    + TOP
    + CLUSTER
    + UP
)


# fmt: off
COMMON = frozenset({
    "model", "hf_repo", "alias", "model_draft", "threads", "ctx_size", "parallel", "cache_type_k", "cache_type_v",
    "rpc", "tensor_split", "gpu_layers", "rpc_failover", "discover", "seed", "temperature", "top_k", "top_p", "min_p",
    "n_predict", "host", "port", "api_key", "ssl_key_file", "ssl_cert_file", "cors_origins", "metrics",
    "chat_template_file", "reasoning", "embedding", "cache_disk", "slot_save_path", "models_dir", "models_preset",
    "verbose", "log_file", "log_jsonl",
})
# fmt: on
"""Keys of flags that `--help` shows for commands with many flags; `--help-all` shows all."""

_MANY = 40  # flags of a command from which `--help` is abridged


@dataclass(frozen=True)
class ParsedFlags:
    """Values of all flags of a command by `Flag.key`, the keys given, and warnings about flags without effect."""

    values: Mapping[str, Any]
    given: frozenset[str]
    warnings: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


def memory_size(text: str, name: str = "-m/--mem") -> int:
    """Return a size such as 16G in bytes. Raises FlagError, whose message starts with `name`.

    A plain number is in MiB, as in older rpc-servers, but in bytes from 1048576 on, as in others.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?)?", text.strip(), re.IGNORECASE)
    unit = found[2] if found else None
    number = float(found[1]) if found else 0.0
    size = int(number * units[unit.upper()]) if unit else int(number) if number >= 1 << 20 else int(number * (1 << 20))
    if size <= 0:
        raise FlagError(f"{name}: expected a number of MiB or a size such as 512K, 800M, 16G; got {text!r}")
    return size


def api_prefix(text: str) -> str:
    """Return the path of `--api-prefix` without its trailing slash. Raises FlagError."""
    prefix = text.rstrip("/")
    if prefix and not re.fullmatch("(/[A-Za-z0-9._~-]+)+", prefix):
        raise FlagError(f"--api-prefix: expected a path such as /llama, got {text!r}")
    return prefix


def check_port(flag: str, port: int) -> int:
    """Return a port, or 0 for any free one. Raises FlagError."""
    if not 0 <= port <= 65535:
        raise FlagError(f"{flag}: expected 0 to 65535, got {port}")
    return port


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser that raises `FlagError` instead of exiting. `rare`: actions that only `--help-all` shows."""

    def __init__(self, **options: Any) -> None:
        self.rare: list[argparse.Action] = []
        super().__init__(**options)
        # A minus and a digit start a value, as in `-ts -1,1`: no flag's name begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.add_argument("--help-all", action=_WholeHelp, nargs=0, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        texts = [action.help for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, help in zip(self.rare, texts, strict=True):
                action.help = help
        n = len([text for text in texts if text is not argparse.SUPPRESS])
        return f"{text}\n{n} more flags: {self.prog} --help-all\n" if n else text

    def error(self, message: str) -> NoReturn:
        raise FlagError(message.replace("argument ", "", 1))


class _WholeHelp(argparse.Action):
    """Print the help with all flags and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, FlagParser)
        parser.rare.clear()
        parser.print_help()
        parser.exit()


def _converter(flag: Flag) -> Callable[[str], Any]:
    parse, expected = _TYPES[flag.type]

    def convert(text: str) -> Any:
        try:
            value = parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
        if flag.choices and value not in flag.choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(flag.choices)}, got {text!r}")
        return value

    convert.__name__ = expected
    return convert


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected on or off, got {text!r}")


def add_flags(parser: FlagParser, command: str) -> None:
    """Add every flag of a command to its parser."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    many = len([flag for flag in FLAGS if flag.kind is Kind.USED and command in flag.commands]) > _MANY
    for flag in FLAGS:
        if command not in flag.commands:
            continue
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        group = groups[flag.group]
        help = flag.help
        if flag.kind is not Kind.USED:
            help = argparse.SUPPRESS
        elif flag.default not in (None, "", False) or flag.type in ("int", "float"):
            shown = "on" if flag.default is True else flag.default  # 1 is equal to True, and not on
            if shown is not None and "default" not in help:
                help += f" (default: {shown})"
        common: dict[str, Any] = {"dest": flag.key, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
        if flag.type == "bool":
            made = group.add_argument(*flag.names, action="store_const", const=True, **common)
        else:
            extra: dict[str, Any] = {"type": _converter(flag), "metavar": flag.metavar or "VALUE"}
            if flag.bare is not None:
                extra |= {"nargs": "?", "const": flag.bare}
            if flag.n_values > 1:
                extra["nargs"] = flag.n_values
            if flag.many:
                extra["action"] = "append"
            made = group.add_argument(*flag.names, **common, **extra)
        if many and flag.key not in COMMON and (command == "serve" or len(flag.commands) > 1):
            parser.rare.append(made)
        if flag.off_names:
            off = False if flag.type == "bool" else "off"
            hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            group.add_argument(*flag.off_names, action="store_const", dest=flag.key, const=off, **hidden)


SECRET_FLAGS = frozenset(name for flag in FLAGS if flag.secret for name in flag.names)
UP_SERVER_FLAGS = "LLAMADO_UP_SERVER_FLAGS"
"""Environment variable that passes the server's flags to `llamado up` in the background."""
secret_values.declare([UP_SERVER_FLAGS, *(name for flag in FLAGS if flag.secret for name in flag.env)])


def secrets_of(command: str) -> dict[str, str]:
    """Return those secrets of this process that a command reads from its environment."""
    names = {name for flag in FLAGS if flag.secret and command in flag.commands for name in flag.env}
    return {name: value for name in sorted(names) if (value := secret_values.secret(name))}


def split_flags(
    arguments: Sequence[str], command: str, keys: Collection[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Split arguments into those without the flags of `keys`, and the values of these flags by key.

    The flags must take one value, given as the next argument or after an equals sign.
    """
    flags = {name: flag.key for flag in FLAGS if command in flag.commands and flag.key in keys for name in flag.names}
    plain: list[str] = []
    found: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = spell(word).partition("=")
        key = flags.get(name)
        if key is None:
            plain.append(word)
        else:
            found.setdefault(key, []).append(value if equals else next(words))
    return plain, found


def split_secrets(arguments: Sequence[str], command: str) -> tuple[list[str], dict[str, str]]:
    """Split arguments into those without secrets, and an environment that holds the secrets."""
    flags = {flag.key: flag for flag in FLAGS if flag.secret and command in flag.commands}
    plain, found = split_flags(arguments, command, flags)
    return plain, {
        flags[key].env[0]: ",".join(values) if flags[key].many else values[-1] for key, values in found.items()
    }


def spell(argument: str) -> str:
    """Replace underscores in the name of a long flag by dashes, as llama.cpp does."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _from_environment(flag: Flag, environ: Mapping[str, str]) -> tuple[Any, str]:
    """Return the value of a flag and the variable it comes from, or (None, "") if no variable is set."""
    for name in flag.env:
        negative = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
        if flag.type == "bool" and negative != name and negative in environ:
            # In llama.cpp the negative form means "off" whatever its value is.
            return False, negative
        text = environ.get(name)
        if text is None:
            continue
        try:
            if flag.type == "bool":
                return _switch(text), name
            if flag.bare is not None and text.strip().lower() in _TRUE | _FALSE and text not in flag.choices:
                text = "on" if text.strip().lower() in _TRUE else "off"
            value = _converter(flag)(text)
            return [value] if flag.many else value, name
        except argparse.ArgumentTypeError as error:
            raise FlagError(f"{name} (environment): {error}") from None
    return None, ""


def _is_off(flag: Flag, value: Any) -> bool:
    if value is False:
        return True
    if value is True:
        return False
    last = value[-1] if isinstance(value, list) else value
    for off in flag.off_values:
        try:
            if float(last) == float(off):
                return True
        except ValueError:
            if last == off:
                return True
    return False


def unknown_flag(argument: str, command: str) -> FlagError:
    """Return the error for an unknown argument of a command, which suggests the most similar flag."""
    if not argument.startswith("-") or argument == "-":
        takes = any(command in flag.commands and flag.key == "model" for flag in FLAGS)
        model = f"to give a model, use -m {argument}; " if takes else ""
        return FlagError(f"unexpected argument {argument!r}: {model}see llamado {command} --help")
    name = argument.partition("=")[0]
    known = [n for f in FLAGS if command in f.commands for n in f.names + f.off_names]
    # Long names are compared without dashes as well, so that `-ctx-size` finds `--ctx-size`.
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.6)
    # Of equally similar names, prefer the one with the same letters: --prot is --port, not --prio.
    near.sort(key=lambda n: (difflib.SequenceMatcher(None, n, name).ratio(), sorted(n) == sorted(name)), reverse=True)
    if not near:
        bare = {n.lstrip("-"): n for n in known}
        near = [bare[m] for m in difflib.get_close_matches(name.lstrip("-"), list(bare), n=1, cutoff=0.5)]
    hint = f"did you mean {near[0]}? " if near else ""
    return FlagError(f"unknown flag {name}: {hint}(all flags: llamado {command} --help-all)")


def refuse_broken_lines(arguments: Sequence[str], with_value: Collection[str]) -> None:
    r"""Raise FlagError if a line of the command ended in a `\` that did not continue it.

    In `-m x \    # a comment` the shell turns the space after the `\` into the word " " (or " #" if there is one space)
    and ends the command. A shell that does not continue lines with `\` passes it as a word. In both cases the flags on
    the next line are lost. The value of a flag in `with_value` may be any of these words.
    """
    for i, argument in enumerate(arguments):
        blank = argument.isspace() and "\n" not in argument
        comment = argument.lstrip().startswith("#")
        if not comment and not (i == len(arguments) - 1 and (blank or argument == "\\")):
            continue
        if i and arguments[i - 1] in with_value:
            continue
        if argument == "\\":
            what = "the \\ at the end of a line, which does not continue lines in this shell,"
        elif comment:
            what = f"the comment {' '.join(arguments[i:]).strip()!r} after the \\ at the end of a line"
        else:
            what = "a space or comment after the \\ at the end of a line"
        raise FlagError(
            f"{what} ended the command, so the flags on the following lines are missing. A \\ continues a line only as "
            "its last character: put comments on lines of their own, before the command"
        )


def parse(
    parser: argparse.ArgumentParser, command: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[ParsedFlags, argparse.Namespace]:
    """Parse the arguments of a command: a flag takes precedence over the environment, that over the default.

    Return the values of flags, and argparse's namespace with the positional arguments. Raises FlagError.
    """
    environ = os.environ if environ is None else environ
    spelled = [spell(a) for a in arguments]
    known = parser._option_string_actions
    refuse_broken_lines(spelled, {name for name, action in known.items() if action.nargs not in (0, "?")})
    for argument in spelled:
        # argparse would read `-ctx-size 4` as `-c` with the value "tx-size".
        if argument[:1] == "-" and argument[1:2].isalpha() and argument not in known:
            raise unknown_flag(argument, command)
    # Only the intermixed variant accepts flags between several positional arguments.
    read = parser.parse_known_intermixed_args if command == "gguf" else parser.parse_known_args
    namespace, extra = read(spelled)
    if extra:
        raise unknown_flag(extra[0], command)
    values: dict[str, Any] = {}
    given: set[str] = set()
    warnings: dict[str, list[str]] = {}
    for flag in FLAGS:
        if command not in flag.commands:
            continue
        value, label = getattr(namespace, flag.key, None), flag.label
        if value is None:
            value, variable = _from_environment(flag, environ)
            label = variable or label
        if value is not None:
            given.add(flag.key)
            if flag.kind is Kind.REFUSED and not _is_off(flag, value):
                raise FlagError(f"{label}: {flag.help}")
            if flag.kind is Kind.MEANINGLESS:
                warnings.setdefault(flag.help, []).append(label)
        if flag.kind is Kind.USED:
            values[flag.key] = flag.default if value is None else value
    for flag in FLAGS:
        if command in flag.commands and flag.requires and flag.key in given and not given & {flag.requires, *_JOINED}:
            required = "--" + flag.requires.replace("_", "-")
            warnings.setdefault(f"{_CPU}; {required} adds others", []).append(flag.label)
    texts = tuple(f"{', '.join(names)}: accepted, no effect here ({why})" for why, names in warnings.items())
    return ParsedFlags(values, frozenset(given), texts), namespace


def markdown() -> str:
    """Return the Markdown page `docs/flags.md`: the flags of `serve`, then additional flags of the other commands."""
    lines = [
        "# Flags of `llamado serve`",
        "",
        "Generated from `src/llamado/flags.py` by `python -m llamado.flags`. A flag takes precedence over its "
        "environment variable.",
        "",
    ]
    titles = {
        Kind.USED: "In use",
        Kind.MEANINGLESS: "Accepted without effect",
        Kind.REFUSED: "Refused, with the reason",
    }
    for kind, title in titles.items():
        lines += _table(f"## {title}", [f for f in FLAGS if f.kind is kind and "serve" in f.commands])
    for command in (
        "run",
        "bench",
        "perplexity",
        "quantize",
        "imatrix",
        "plan",
        "worker",
        "tap",
        "wait",
        "doctor",
        "gateway",
        "verify",
        "deploy",
        "up",
        "top",
        "cluster",
    ):
        own = [f for f in FLAGS if f.kind is Kind.USED and command in f.commands and "serve" not in f.commands]
        shared = any(command in f.commands and "serve" in f.commands for f in FLAGS if f.kind is not Kind.USED)
        title = f"# Flags of `llamado {command}`"
        if shared:
            lines += [
                title,
                "",
                f"The flags of `llamado serve` that apply to it (`llamado {command} --help-all`)",
                "",
            ]
            if own:
                lines[-2] += ", and these:"
                lines += _table("", own)[2:]
            else:
                lines[-2] += "."
        else:
            lines += _table(title, own)
    return "\n".join(lines)


def _table(title: str, flags: Sequence[Flag]) -> list[str]:
    lines = [title, "", "| flag | environment | default | |", "|---|---|---|---|"]
    for flag in flags:
        names = ", ".join(f"`{n}`" for n in flag.names + flag.off_names)
        env = ", ".join(f"`{e}`" for e in flag.env)
        default = "" if flag.default in (None, "") else f"`{flag.default}`"
        lines.append(f"| {names} | {env} | {default} | {flag.help.replace('|', '&#124;')} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.stdout.write(markdown())
