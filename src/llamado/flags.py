"""The one table of flags: spellings, environment names, types, defaults and what each means here.

argparse, the environment, `--help` and `docs/flags.md` are all made from `FLAGS`. Spellings, environment names and
defaults are llama-server's (b11434, its `--help`); older guides' spellings are further names of the same rows.
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
    """What a flag does here."""

    USED = "used"
    MEANINGLESS = "meaningless"  # accepted, said once at start
    REFUSED = "refused"  # an error with the reason, unless its value means "off"


@dataclass(frozen=True)
class Flag:
    """One row: `names` turn the flag on or take its value, `off_names` turn it off."""

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
    bare: str | None = None  # value of a flag given without one, where the value may be left out
    off_values: tuple[str, ...] = ()  # values of a refused flag that ask for nothing
    many: bool = False
    secret: bool = False
    """Whether its value is a key or a token, which no child inherits."""
    words: int = 1  # how many values stand behind it
    needs: str = ""  # key of the flag without which this one says nothing
    group: str = ""
    commands: frozenset[str] = field(default_factory=lambda: frozenset({"serve"}))

    @cached_property
    def key(self) -> str:
        """Attribute of the parsed namespace."""
        longest = next((n for n in self.names if n.startswith("--")), self.names[0])
        return self.dest or longest.lstrip("-").replace("-", "_")

    @property
    def label(self) -> str:
        """How messages name the flag."""
        return "/".join(self.names[:2])


_TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a text"),
    "seed": (lambda text: int(text) if re.fullmatch(r"[+-]?[0-9]{1,4096}", text) else text, "a seed"),
}
# A parameter's type → a flag's, and whether the flag may be repeated.
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
DRAFTED = _SAMPLING | {"plan", "bench"}
"""The commands that take the flags of drafts."""
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
# With one of these, workers come by themselves: what `--rpc` needs to be of use has a use.
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
    """The flag that sets what requests get that do not say; its key is the parameter's name."""
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
_WHERE = "operations run where their weights are"
_LATER = "not supported yet"
_VISION = "multimodal models are not supported yet"
_DRAFT_ALIKE = "the draft model has what the model has"
_NGRAMS = "suffix drafts for llama.cpp's n-gram drafters; it finds matches of any length"
_ONE_DRAFT = "there is one draft, which is kept where it is what would have been chosen anyway"
_REMOVED = "llama-server has removed this flag, too; see --spec-type"

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
    _used("--offline", "never use the network for models", env="LLAMA_ARG_OFFLINE", default=False, commands=_ENGINE),
    _used("-a --alias", "names of the model in the API, comma-separated", type="str", metavar="NAME",
          env="LLAMA_ARG_ALIAS", many=True),
    _used("--tags", "tags of the model, comma-separated (informational)", type="str", default="", metavar="TAGS",
          env="LLAMA_ARG_TAGS"),
    _used("-mu --model-url", "URL of a GGUF file, fetched into the cache", type="str", metavar="URL",
          env="LLAMA_ARG_MODEL_URL", commands=_ENGINE),
    _refused("-dr --docker-repo", f"{_LATER}: use -hf", env="LLAMA_ARG_DOCKER_REPO"),
    _used("--lora", "LoRA adapters (GGUF), comma-separated; may be repeated", type="str", many=True, metavar="FILE",
          commands=_SAMPLING),
    _used("--lora-scaled", "LoRA adapters with their scales: FILE:SCALE, comma-separated; may be repeated", type="str",
          many=True, metavar="FILE:SCALE", commands=_SAMPLING),
    _used("--lora-init-without-apply", "load the adapters with scale 0: POST /lora-adapters applies them",
          default=False, commands=_SAMPLING),
    _used("--control-vector", "control vectors (GGUF), comma-separated; may be repeated", type="str", many=True,
          metavar="FILE", commands=_SAMPLING),
    _used("--control-vector-scaled", "control vectors with their scales: FILE:SCALE, comma-separated; may be repeated",
          type="str", many=True, metavar="FILE:SCALE", commands=_SAMPLING),
    _used("--control-vector-layer-range", "first and last layer that control vectors work on (1 and the last)",
          type="int", words=2, metavar="LAYER", commands=_SAMPLING),
    _used("--override-kv", "other values for the model's metadata: KEY=TYPE:VALUE, comma-separated; types int, float, "
          "bool, str; may be repeated", type="str", many=True, metavar="KEY=TYPE:VALUE", commands=_ENGINE),
    _refused("-mm --mmproj", _VISION, env="LLAMA_ARG_MMPROJ"),
    _refused("-mmu --mmproj-url", _VISION, env="LLAMA_ARG_MMPROJ_URL"),
    _none("--mmproj-auto", _VISION, type="bool", off_names="--no-mmproj --no-mmproj-auto",
          env="LLAMA_ARG_MMPROJ_AUTO"),
    _none("--mmproj-offload", _VISION, type="bool", off_names="--no-mmproj-offload", env="LLAMA_ARG_MMPROJ_OFFLOAD"),
    _none("-mmdev --mmproj-device", _VISION, env="MTMD_BACKEND_DEVICE"),
    _none("--image-min-tokens", _VISION, env="LLAMA_ARG_IMAGE_MIN_TOKENS"),
    _none("--image-max-tokens", _VISION, env="LLAMA_ARG_IMAGE_MAX_TOKENS"),
    _none("--mtmd-batch-max-tokens", _VISION, env="LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    _none("--media-path", _VISION),
    _none("--video-fps", _VISION, env="LLAMA_ARG_VIDEO_FPS"),
    _none("--video-timestamp-interval", _VISION, env="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
    _none("--video-ffmpeg-dir", _VISION, env="LLAMA_ARG_VIDEO_FFMPEG_DIR"),
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
    _none("--check-tensors", "every tensor's range is always checked", type="bool"),
)

COMPUTE = _group(
    "compute",
    _used("-t --threads", "CPU threads for decoding (default: one per core it may use)", type="int", metavar="N",
          env="LLAMA_ARG_THREADS LLAMA_N_THREADS", commands=_ENGINE),
    _used("-tb --threads-batch", "CPU threads for prompts (default: --threads)", type="int", metavar="N",
          env="LLAMA_ARG_THREADS_BATCH", commands=_ENGINE),
    _used("-c --ctx-size", "context size in tokens (0: the model's own, limited by memory)", type="int", default=0,
          metavar="N", env="LLAMA_ARG_CTX_SIZE LLAMA_N_CTX", commands=_ENGINE),
    _used("-b --batch-size", "tokens scheduled per step at most", type="int", default=2048, metavar="N",
          env="LLAMA_ARG_BATCH LLAMA_N_BATCH", commands=_ENGINE),
    _used("-ub --ubatch-size", "tokens per forward pass at most", type="int", default=512, metavar="N",
          env="LLAMA_ARG_UBATCH", commands=_ENGINE),
    _used("-np --parallel", "slots: requests decoded at the same time (-1: 4 slots sharing the whole context)",
          type="int", default=-1, metavar="N", env="LLAMA_ARG_N_PARALLEL", commands=_SLOTS),
    _used("-cb --cont-batching", "decode requests together as they come", default=True,
          off_names="-nocb --no-cont-batching", env="LLAMA_ARG_CONT_BATCHING", commands=_SLOTS),
    _used("-kvu --kv-unified", "slots share one context of --ctx-size (default: only when --parallel is automatic)",
          off_names="-no-kvu --no-kv-unified", env="LLAMA_ARG_KV_UNIFIED", commands=_SLOTS),
    _used("-ctk --cache-type-k", "type of the K cache", type="str", default="f16", choices=" ".join(KV_TYPES),
          metavar="TYPE", env="LLAMA_ARG_CACHE_TYPE_K", commands=_ENGINE),
    _used("-ctv --cache-type-v", "type of the V cache", type="str", default="f16", choices=" ".join(KV_TYPES),
          metavar="TYPE", env="LLAMA_ARG_CACHE_TYPE_V", commands=_ENGINE),
    _used("--attn-rot-disable", "keep keys and values in quantized caches as they are, not turned by a Hadamard matrix",
          default=False, env="LLAMA_ATTN_ROT_DISABLE", commands=_ENGINE - {"plan"}),
    _used("--memory-f32", "older spelling of -ctk f32 -ctv f32", default=False),
    _used("--mmap", "map the file into memory instead of reading it", default=True, off_names="--no-mmap",
          env="LLAMA_ARG_MMAP", commands=_ENGINE),
    _used("--mlock", "keep the weights in RAM", default=False, env="LLAMA_ARG_MLOCK", commands=_ENGINE),
    _used("-lm --load-mode", "auto, none (read the file), mmap, mlock, mmap+mlock", type="str", default="auto",
          choices="auto none mmap mlock mmap+mlock", metavar="MODE", env="LLAMA_ARG_LOAD_MODE", commands=_ENGINE),
    _used("--numa", "distribute, isolate or numactl: place threads by NUMA node", type="str", bare="distribute",
          choices="distribute isolate numactl", metavar="TYPE", env="LLAMA_ARG_NUMA", commands=_ENGINE),
    _none("-fa --flash-attn", "attention is always computed block by block", bare="on", choices="on off auto",
          env="LLAMA_ARG_FLASH_ATTN GGML_CUDA_NO_FA", off_names="--no-flash-attn", commands=_ENGINE,
          dest="flash_attn"),
    _none("--metal", _CPU, type="bool"),
    _used("-fit --fit", "where memory is short, cut the context, then batches and the type of the K/V cache where "
          "nobody gave them (on, auto); off: too little memory is an error, and a model is fetched whether it fits or "
          "not", type="str", default="on", bare="on", choices="on off auto", metavar="on|off|auto", env="LLAMA_ARG_FIT",
          commands=_FITTED),
    _used("-fitt --fit-target", "MiB that are to stay free where that is possible: on each worker, and of this "
          "machine's memory; comma-separated, one for all", type="str", default="1024", metavar="MIB",
          env="LLAMA_ARG_FIT_TARGET", commands=_FITTED),
    _used("-fitc --fit-ctx", "tokens to which a context is cut, and no further", type="int", default=4096, metavar="N",
          env="LLAMA_ARG_FIT_CTX", commands=_FITTED),
    _none("-kvo --kv-offload", "the cache lies where its layer is", type="bool",
          off_names="-nkvo --no-kv-offload", env="LLAMA_ARG_KV_OFFLOAD"),
    _none("--op-offload", _WHERE, type="bool", off_names="--no-op-offload"),
    _none("--no-host", _WHERE, type="bool", env="LLAMA_ARG_NO_HOST"),
    _none("--repack", "weights are never repacked", type="bool", off_names="-nr --no-repack", env="LLAMA_ARG_REPACK"),
    _none("-lzm --lazy-mode", "a mapped file is read on demand anyway", env="LLAMA_ARG_LAZY_MODE"),
    _none("-dt --defrag-thold", "a sequence's cells are never fragmented", env="LLAMA_ARG_DEFRAG_THOLD"),
    _none("--swa-full", "a sliding window holds what it shows, and answers are the same", type="bool",
          env="LLAMA_ARG_SWA_FULL"),
    _none("--kv-unified-per-slot", "use --ctx-size and --parallel", env="LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    _none("-C --cpu-mask", "threads are placed by the system; see --numa"),
    _none("-Cr --cpu-range", "threads are placed by the system; see --numa"),
    _none("--cpu-strict", "threads are placed by the system; see --numa"),
    _none("-Cb --cpu-mask-batch", "threads are placed by the system; see --numa"),
    _none("-Crb --cpu-range-batch", "threads are placed by the system; see --numa"),
    _none("--cpu-strict-batch", "threads are placed by the system; see --numa"),
    _none("--prio", "use nice"),
    _none("--prio-batch", "use nice"),
    _none("--poll", "threads spin briefly, then sleep"),
    _none("--poll-batch", "threads spin briefly, then sleep"),
    _none("--perf", "timings are always measured", type="bool", off_names="--no-perf", env="LLAMA_ARG_PERF"),
    _none("--warmup", "kernels are compiled while loading", type="bool", off_names="--no-warmup",
          env="LLAMA_ARG_WARMUP"),
    _used("--rope-scaling", "stretch the positions of rotary embeddings: none, linear, yarn (default: as the model "
          "says)", type="str", choices="none linear yarn", metavar="METHOD", env="LLAMA_ARG_ROPE_SCALING_TYPE",
          commands=_ENGINE),
    _used("--rope-scale", "stretch them by this factor", type="float", metavar="N", env="LLAMA_ARG_ROPE_SCALE",
          commands=_ENGINE),
    _used("--rope-freq-base", "base of the rotation's frequencies (0: the model's)", type="float", metavar="N",
          env="LLAMA_ARG_ROPE_FREQ_BASE", commands=_ENGINE),
    _used("--rope-freq-scale", "1 / --rope-scale (0: the model's)", type="float", metavar="N",
          env="LLAMA_ARG_ROPE_FREQ_SCALE", commands=_ENGINE),
    _used("--yarn-orig-ctx", "YaRN: context the model was trained with (0: the model's)", type="int", metavar="N",
          env="LLAMA_ARG_YARN_ORIG_CTX", commands=_ENGINE),
    _used("--yarn-ext-factor", "YaRN: share of extrapolation (-1: the model's, 0: none)", type="float", metavar="N",
          env="LLAMA_ARG_YARN_EXT_FACTOR", commands=_ENGINE),
    _used("--yarn-attn-factor", "YaRN: factor of the attention's magnitude (-1: the model's)", type="float",
          metavar="N", env="LLAMA_ARG_YARN_ATTN_FACTOR", commands=_ENGINE),
    _used("--yarn-beta-slow", "YaRN: rotations below which a dimension is stretched whole (-1: the model's)",
          type="float", metavar="N", env="LLAMA_ARG_YARN_BETA_SLOW", commands=_ENGINE),
    _used("--yarn-beta-fast", "YaRN: rotations above which a dimension is left as it is (-1: the model's)",
          type="float", metavar="N", env="LLAMA_ARG_YARN_BETA_FAST", commands=_ENGINE),
    _used("--spec-type",
          "where tokens come from that are evaluated along with the last one, comma-separated, answers are the same "
          "bytes: draft-simple (the model of -md), draft-mtp (the block behind the model's layers that predicts the "
          "token after next, in its file or that of -md), draft-eagle3 and draft-dflash (the EAGLE-3 or DFlash head of "
          "-md), suffix (what followed the longest end that was there before, in the sequence or in what this server "
          "said), ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod and ngram-cache (suffix under llama.cpp's names; "
          "ngram-cache also reads -lcs and -lcd), none, or auto: "
          "suffix with --rpc, where it hides the links, with -md that and what drafts in its file",
          type="str", default="auto", metavar="TYPES", env="LLAMA_ARG_SPEC_TYPE", commands=DRAFTED),
    _used("--spec-default", "the same as --spec-type ngram-mod", default=False, commands=DRAFTED),
    _used("-md --model-draft --spec-draft-model",
          "a smaller model with the same vocabulary, or a head for this one (see --spec-type), which drafts: as -m",
          type="str", metavar="MODEL", env="LLAMA_ARG_SPEC_DRAFT_MODEL", commands=DRAFTED),
    _used("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "the same from Hugging Face: as -hf", type="str",
          metavar="REPO", env="LLAMA_ARG_SPEC_DRAFT_HF_REPO", commands=DRAFTED),
    _used("-devd --spec-draft-device --device-draft", "workers of --rpc that the draft model is divided among, "
          "comma-separated (default: none, it is on this machine)", type="str", metavar="DEVICES",
          needs="rpc", commands=DRAFTED),
    _used("-ngld --spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft",
          "the draft model's last N layers go to those (auto: all)", type="str", default="auto", metavar="N",
          env="LLAMA_ARG_N_GPU_LAYERS_DRAFT", needs="spec_draft_device", commands=DRAFTED),
    _used("-td --spec-draft-threads --threads-draft", "CPU threads for drafting (default: --threads)", type="int",
          metavar="N", commands=DRAFTED),
    _used("-tbd --spec-draft-threads-batch --threads-batch-draft",
          "CPU threads for the draft model's prompts (default: --threads-draft, else --threads-batch)", type="int",
          metavar="N", commands=DRAFTED),
    _used("-ctkd --spec-draft-type-k --cache-type-k-draft", "type of the draft model's K cache", type="str",
          default="f16", choices=" ".join(KV_TYPES), metavar="TYPE", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
          commands=DRAFTED),
    _used("-ctvd --spec-draft-type-v --cache-type-v-draft", "type of the draft model's V cache", type="str",
          default="f16", choices=" ".join(KV_TYPES), metavar="TYPE", env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
          commands=DRAFTED),
    _used("--spec-draft-n-max", "drafted tokens at most (default: as many as pay, which is measured)", type="int",
          metavar="N", env="LLAMA_ARG_SPEC_DRAFT_N_MAX", commands=DRAFTED),
    _used("--spec-draft-n-min", "shorter drafts are not evaluated", type="int", default=0, metavar="N",
          env="LLAMA_ARG_SPEC_DRAFT_N_MIN", commands=DRAFTED),
    _used("--spec-draft-p-min --draft-p-min", "how probable the draft model must find a token that it drafts",
          type="float", default=0.0, metavar="P", env="LLAMA_ARG_SPEC_DRAFT_P_MIN", commands=DRAFTED),
    *(_none(f"--spec-ngram-mod-{name}", _NGRAMS, commands=DRAFTED) for name in ("n-match", "n-min", "n-max")),
    *(
        _none(f"--spec-ngram-{kind}-{name}", _NGRAMS, commands=DRAFTED)
        for kind in ("simple", "map-k", "map-k4v")
        for name in ("size-n", "size-m", "min-hits")
    ),
    _used("-lcs --lookup-cache-static", "ngram-cache: a file of llama-lookup-create", type="str", metavar="FILE",
          commands=DRAFTED),
    _used("-lcd --lookup-cache-dynamic", "ngram-cache: a second file, of earlier texts; it is only read",
          type="str", metavar="FILE", commands=DRAFTED),
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
    _refused("--spec-synth-len", "made-up acceptance rates are not supported", env="LLAMA_ARG_SPEC_SYNTH_LEN"),
    _refused("--spec-synth-rates", "made-up acceptance rates are not supported", env="LLAMA_ARG_SPEC_SYNTH_RATES"),
    _refused("--draft --draft-n --draft-max", _REMOVED, env="LLAMA_ARG_DRAFT_MAX"),
    _refused("--draft-min --draft-n-min", _REMOVED, env="LLAMA_ARG_DRAFT_MIN"),
    _refused("--spec-ngram-size-n", _REMOVED),
    _refused("--spec-ngram-size-m", _REMOVED),
    _refused("--spec-ngram-min-hits", _REMOVED),
)

SPLIT = _group(
    "several machines",
    _used("--rpc", "workers that share the model: host:port, tls://host:port, comma-separated; may be repeated",
          type="str", many=True, metavar="SERVERS", env="LLAMA_ARG_RPC", commands=_ENGINE),
    _used("-ts --tensor-split",
          "how layers are divided: auto (measure the devices, least time per token), memory (by free memory, as "
          "llama.cpp does), or proportions, one for each worker and if you like one more for this machine: 3,1",
          type="str", default="auto", metavar="N0,N1,…", env="LLAMA_ARG_TENSOR_SPLIT", commands=_ENGINE, needs="rpc"),
    _used("-ngl --gpu-layers --n-gpu-layers --ngl",
          "the last N layers go to the workers, the ones before stay on this machine; the head counts as one more; "
          "all, or auto: as --tensor-split says",
          type="str", default="auto", metavar="N", env="LLAMA_ARG_N_GPU_LAYERS LLAMA_N_GPU_LAYERS", commands=_ENGINE,
          needs="rpc"),
    _used("-dev --device",
          "devices that take layers, in this order: RPC0, RPC0[host:port], host:port, CPU (this machine), comma-"
          "separated; none: no worker", type="str", metavar="DEV,DEV", env="LLAMA_ARG_DEVICE", commands=_ENGINE,
          needs="rpc"),
    _used("--list-devices", "print the devices (this machine and the workers of --rpc) and exit", default=False,
          commands=_ENGINE),
    _used("-ot --override-tensor",
          "PATTERN=DEVICE, comma-separated: weights whose names match the regular expression go to the device",
          type="str", many=True, metavar="PATTERN=DEVICE", env="LLAMA_ARG_OVERRIDE_TENSOR", commands=_ENGINE,
          needs="rpc"),
    _used("-cmoe --cpu-moe", "the weights of experts stay on this machine", type="bool", default=False,
          env="LLAMA_ARG_CPU_MOE", commands=_ENGINE, needs="rpc"),
    _used("-ncmoe --n-cpu-moe", "the weights of experts of the first N layers stay on this machine", type="int",
          default=0, metavar="N", env="LLAMA_ARG_N_CPU_MOE", commands=_ENGINE, needs="rpc"),
    _used("-ncffn --n-cpu-ffn", "the feed-forward networks without experts of the first N layers stay on this machine",
          type="int", default=0, metavar="N", env="LLAMA_ARG_N_CPU_FFN", commands=_ENGINE, needs="rpc"),
    _used("-sm --split-mode", "layer: whole layers go to devices; none: one device takes all (--main-gpu)",
          type="str", default="layer", choices="none layer row tensor", metavar="MODE", env="LLAMA_ARG_SPLIT_MODE",
          commands=_ENGINE, needs="rpc"),
    _used("-mg --main-gpu", "the device of --split-mode none, counted from 0", type="int", default=0, metavar="INDEX",
          env="LLAMA_ARG_MAIN_GPU", commands=_ENGINE, needs="rpc"),
    _used("--rpc-failover",
          "when a worker has been gone for this long, go on with the devices left (default: wait for it)",
          type="float", metavar="SECONDS", env="LLAMA_ARG_RPC_FAILOVER", commands=_ENGINE, needs="rpc"),
    _used("--rpc-wait",
          "how long workers are waited for that are not there yet, or are lost while the model is loaded",
          type="float", default=60.0, metavar="SECONDS", env="LLAMA_ARG_RPC_WAIT", commands=_ENGINE, needs="rpc"),
    _used("--rpc-request-wait", "how long requests wait for a worker that is gone before they get 503", type="float",
          default=30.0, metavar="SECONDS", env="LLAMA_ARG_RPC_REQUEST_WAIT", commands=_ENGINE, needs="rpc"),
    _used("--rpc-connect-timeout", "how long connecting to a worker, and its greeting, may take", type="float",
          default=5.0, metavar="SECONDS", env="LLAMA_ARG_RPC_CONNECT_TIMEOUT", commands=_ENGINE, needs="rpc"),
    _used("--rpc-alive-timeout", "how long a worker may say nothing before it counts as gone", type="float",
          default=2.0, metavar="SECONDS", env="LLAMA_ARG_RPC_ALIVE_TIMEOUT", commands=_ENGINE, needs="rpc"),
    _used("--rpc-ring",
          "auto: workers of llamado pass what they compute straight to the next one, where they can reach it; off: all "
          "goes through this machine", type="str", default="auto", choices="auto off", metavar="auto|off",
          env="LLAMA_ARG_RPC_RING", commands=_ENGINE, needs="rpc"),
    _secret("--cluster-token",
          "workers that know this token may join and leave while the server runs (POST /cluster/join, /cluster/drain), "
          "and other machines may move layers",
          metavar="TOKEN", env="LLAMADO_CLUSTER_TOKEN"),
    _used("--discover", "take in workers that announce themselves in this network (`llamado worker --announce`)",
          default=False, env="LLAMADO_DISCOVER"),
    _used("--lab",
          "the latency lab of the page: links to the workers of --rpc, and to N more that start here, can be made "
          "slower while the server runs", type="int", bare="0", metavar="N", env="LLAMADO_LAB"),
    _used("--rpc-ca", "PEM file of the authority that tls:// workers' certificates come from", type="str",
          metavar="FILE", env="LLAMA_ARG_RPC_CA", commands=_ENGINE, needs="rpc"),
    _used("--rpc-cert", "PEM file of this machine's certificate for tls:// workers", type="str", metavar="FILE",
          env="LLAMA_ARG_RPC_CERT", commands=_ENGINE, needs="rpc"),
    _used("--rpc-key", "PEM file of the key of --rpc-cert", type="str", metavar="FILE", env="LLAMA_ARG_RPC_KEY",
          commands=_ENGINE, needs="rpc"),
)

SAMPLING = _group(
    "sampling (defaults of requests)",
    *(_default(row) for row in PARAMETERS if row.flags and not row.served),
    _used("--sampler-seq --sampling-seq", "samplers in order, one letter each (edskypmxt)", type="str",
          metavar="LETTERS", commands=_SAMPLING),
    _used("--grammar", "grammar of all answers (GBNF)", type="str", metavar="GBNF"),
    _used("--grammar-file", "file of a grammar of all answers", type="str", metavar="FILE"),
    _used("-j --json-schema", "JSON schema of all answers", type="str", metavar="SCHEMA"),
    _used("-jf --json-schema-file", "file of a JSON schema of all answers", type="str", metavar="FILE"),
    _none("-bs --backend-sampling", "sampling is done once, on the CPU", type="bool",
          env="LLAMA_ARG_BACKEND_SAMPLING"),
    _none("-e --escape", "requests carry their own escapes", type="bool", off_names="--no-escape"),
)

SERVER = _group(
    "server",
    _used("--host", "address to listen on", type="str", default="127.0.0.1", metavar="HOST", env="LLAMA_ARG_HOST",
          commands=_HTTP),
    _used("--port", "port to listen on (0: any free one)", type="int", default=8080, metavar="PORT",
          env="LLAMA_ARG_PORT", commands=_HTTP),
    _used("--reuse-port", "let several servers listen on the same port", default=False, env="LLAMA_ARG_REUSE_PORT"),
    _secret("--api-key", "keys that clients must send, comma-separated; may be repeated", many=True,
          metavar="KEY", env="LLAMA_API_KEY", commands=_HTTP),
    _used("--api-key-file", "file of keys, one a line, # for comments", type="str", metavar="FILE",
          env="LLAMA_ARG_API_KEY_FILE", commands=_HTTP),
    _used("--ssl-key-file", "PEM file of the TLS key", type="str", metavar="FILE", env="LLAMA_ARG_SSL_KEY_FILE",
          commands=_HTTP),
    _used("--ssl-cert-file", "PEM file of the TLS certificate", type="str", metavar="FILE",
          env="LLAMA_ARG_SSL_CERT_FILE", commands=_HTTP),
    _used("--cors-origins --cors-origin", "origins that browsers may call from, comma-separated (*: any; localhost)",
          type="str", default="localhost", metavar="ORIGINS", env="LLAMA_ARG_CORS_ORIGINS", commands=_HTTP),
    _used("--allowed-hosts", "host names (also .example.com for all below it; *: any) that are served without a key, "
          "besides addresses and localhost; comma-separated; may be repeated", type="str", many=True, metavar="NAMES",
          env="LLAMADO_ALLOWED_HOSTS", commands=_HTTP),
    _used("--cors-methods", "methods that browsers may use", type="str", default="GET, POST, DELETE, OPTIONS",
          metavar="METHODS", env="LLAMA_ARG_CORS_METHODS", commands=_HTTP),
    _used("--cors-headers", "headers that browsers may send", type="str", default="*", metavar="HEADERS",
          env="LLAMA_ARG_CORS_HEADERS", commands=_HTTP),
    _used("--cors-credentials", "let browsers send credentials", default=True, off_names="--no-cors-credentials",
          env="LLAMA_ARG_CORS_CREDENTIALS", commands=_HTTP),
    _used("--cors", "pages of any site may call, where --cors-origins does not say which", default=False,
          commands=_HTTP),
    _used("--metrics", "serve /metrics for Prometheus", default=False, env="LLAMA_ARG_ENDPOINT_METRICS"),
    _used("--metrics-labels",
          "labels on all metrics: engine, engine_version and model_id, and those given: pool_id=a,replica_id=b",
          type="str", bare="on", metavar="NAME=VALUE", env="LLAMADO_METRICS_LABELS", commands=_HTTP),
    _used("--slots", "serve /slots", default=True, off_names="--no-slots", env="LLAMA_ARG_ENDPOINT_SLOTS"),
    _used("--props", "accept POST /props", default=False, env="LLAMA_ARG_ENDPOINT_PROPS"),
    _default(BY_NAME["cache_prompt"]),
    _default(BY_NAME["sse_ping_interval"]),
    _used("--chat-template", "Jinja chat template instead of the model's (or: chatml)", type="str", metavar="JINJA",
          env="LLAMA_ARG_CHAT_TEMPLATE", commands=_SAMPLING),
    _used("--chat-template-file", "file of a Jinja chat template", type="str", metavar="FILE",
          env="LLAMA_ARG_CHAT_TEMPLATE_FILE", commands=_SAMPLING),
    _used("--chat-template-kwargs", "JSON object of further template variables", type="str", metavar="JSON",
          env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    _used("--prefill-assistant", "continue a last message of the assistant", default=True,
          off_names="--no-prefill-assistant", env="LLAMA_ARG_PREFILL_ASSISTANT"),
    _used("--jinja", "Jinja chat templates and tools (off: built-in templates only)", default=True,
          off_names="--no-jinja", env="LLAMA_ARG_JINJA"),
    _used("--skip-chat-parsing", "everything a model says is content: no reasoning, no tool calls", default=False,
          off_names="--no-skip-chat-parsing", env="LLAMA_ARG_SKIP_CHAT_PARSING"),
    _used("--reasoning-format", "where thoughts go: deepseek (reasoning_content), deepseek-legacy (there and in the "
          "content), none (left in the content), auto (deepseek)", type="str", default="auto",
          choices="auto none deepseek deepseek-legacy", metavar="FORMAT", env="LLAMA_ARG_THINK"),
    _used("-rea --reasoning", "whether models think: on, off, or auto (as the chat template does)", type="str",
          default="auto", choices="on off auto", bare="on", metavar="on|off|auto", env="LLAMA_ARG_REASONING"),
    _used("--reasoning-effort", "level of thinking given to the chat template (minimal, low, medium, high …)",
          type="str", default="default", metavar="LEVEL", env="LLAMA_ARG_REASONING_EFFORT"),
    _used("--reasoning-budget", "most tokens of thinking (-1: no limit, 0: none)", type="int", default=-1,
          metavar="N", env="LLAMA_ARG_THINK_BUDGET"),
    _used("--reasoning-budget-message", "text that ends the thinking when the budget is spent", type="str",
          default="", metavar="TEXT", env="LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    _used("--reasoning-preserve", "give thoughts of earlier turns to templates that take them", default=True,
          off_names="--no-reasoning-preserve", env="LLAMA_ARG_REASONING_PRESERVE"),
    _used("--ui --webui", "the page at / for browsers", default=True, off_names="--no-ui --no-webui",
          env="LLAMA_ARG_UI"),
    _used("--ui-config --webui-config", "settings the page begins with, as JSON", type="str", metavar="JSON",
          env="LLAMA_ARG_UI_CONFIG"),
    _used("--ui-config-file --webui-config-file", "file of such settings", type="str", metavar="FILE",
          env="LLAMA_ARG_UI_CONFIG_FILE"),
    _used("-to --timeout", "seconds a connection may rest while a request is read or an answer written", type="int",
          default=3600, metavar="N", env="LLAMA_ARG_TIMEOUT", commands=_HTTP),
    _used("--threads-http", "threads that read long prompts (-1: automatic)", type="int", default=-1, metavar="N",
          env="LLAMA_ARG_THREADS_HTTP"),
    _used("--max-queue", "requests that may wait for a slot; more are turned away with 503", type="int", default=1024,
          metavar="N", env="LLAMADO_MAX_QUEUE"),
    _used("--max-prompts", "prompts in one request at most", type="int", default=1024, metavar="N",
          env="LLAMADO_MAX_PROMPTS"),
    _used("--max-connections", "connections that may be open; more wait to be let in (-1: as the system allows)",
          type="int", default=-1, metavar="N", env="LLAMADO_MAX_CONNECTIONS"),
    _used("-sps --slot-prompt-similarity", "share of a prompt that a slot must hold to be preferred (0: any slot)",
          type="float", default=0.1, metavar="X"),
    _used("-cram --cache-ram", "MiB for prompts that no slot holds, at most half of the memory (-1: no limit, 0: none)",
          type="int", default=8192, metavar="N", env="LLAMA_ARG_CACHE_RAM"),
    _used("--cache-disk", "folder for prompts that --cache-ram has no room for, and for all when the server ends: "
          "they are read from there instead of computed, also by other servers that use it",
          type="str", metavar="FOLDER", env="LLAMADO_CACHE_DISK"),
    _used("--cache-disk-size", "size of that folder at most (10G, 500M); what was used longest ago goes first",
          type="str", default="10G", metavar="SIZE", env="LLAMADO_CACHE_DISK_SIZE"),
    _used("-ctxcp --ctx-checkpoints --swa-checkpoints", "snapshots of a sequence kept there at most, of a model with "
          "sliding windows or recurrent states: where messages begin and end, and where prompts branched off",
          type="int", default=32, metavar="N", env="LLAMA_ARG_CTX_CHECKPOINTS"),
    _used("-cms --checkpoint-min-step", "tokens of a prompt from one regular snapshot to the next, beside those (0: "
          "--ubatch-size)", type="int", default=8192, metavar="N", env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"),
    _used("--cache-idle-slots", "when a request starts, prompts of idle slots are kept (--cache-ram), and their cells "
          "are free where slots share a context; else this waits until the room is needed", default=False,
          off_names="--no-cache-idle-slots", env="LLAMA_ARG_CACHE_IDLE_SLOTS"),
    _default(BY_NAME["special"]),
    _used("--spm-infill", "infill with the suffix first, as some models prefer", default=False),
    _none("--cache-reuse", "a common prefix is always reused; shifted pieces would change answers",
          env="LLAMA_ARG_CACHE_REUSE"),
    _used("--context-shift", "a full context drops its older half instead of ending the answer", default=False,
          off_names="--no-context-shift", env="LLAMA_ARG_CONTEXT_SHIFT"),
    _used("--embedding --embeddings", "serve embeddings only", default=False, env="LLAMA_ARG_EMBEDDINGS"),
    _used("--rerank --reranking", "serve /rerank", default=False, env="LLAMA_ARG_RERANKING"),
    _used("--pooling", "how the tokens' embeddings become one: none, mean, cls, last, rank (default: the model's)",
          type="str", choices="none mean cls last rank", metavar="KIND", env="LLAMA_ARG_POOLING"),
    _used("--embd-normalize", "norm of embeddings: -1 none, 0 largest absolute, 1 taxicab, 2 Euclidean, above: p",
          type="int", default=2, metavar="N"),
    _used("--slot-save-path", "folder for /slots/{id}?action=save and restore", type="str", metavar="FOLDER"),
    _used("--api-prefix", "path before all paths, without the slash at its end", type="str", default="",
          metavar="PREFIX", env="LLAMA_ARG_API_PREFIX"),
    _used("--path", "folder of files to serve in place of the page", type="str", metavar="FOLDER",
          env="LLAMA_ARG_STATIC_PATH"),
    _used("--sleep-idle-seconds", "unload the model after this long without a request; the next one loads it again "
          "(-1: never)", type="int", default=-1, metavar="SECONDS"),
    _used("--hang-timeout", "after how long in one step /livez says that the engine hangs (0: never)", type="float",
          default=600.0, metavar="SECONDS", env="LLAMADO_HANG_TIMEOUT"),
    _used("--tools", "tools that clients may call for a model, comma-separated: read_file, file_glob_search, "
          "grep_search, exec_shell_command, write_file, edit_file, get_info, or all", type="str", metavar="TOOLS",
          env="LLAMA_ARG_TOOLS"),
    _used("--tools-folder", "folder that these tools are kept in; commands can leave it (default: the working folder)",
          type="str", default=".", metavar="FOLDER", env="LLAMADO_TOOLS_FOLDER"),
    _used("--tools-runtime", "where these tools work instead: docker:IMAGE, podman:IMAGE (a container of their own), "
          "docker-container:ID, podman-container:ID (one that runs), ssh:TARGET", type="str", metavar="WHERE",
          env="LLAMA_ARG_TOOLS_RUNTIME"),
    _used("--mcp-servers-config", "JSON file of MCP servers whose tools clients may call, in Cursor's form",
          type="str", metavar="FILE", env="LLAMA_ARG_MCP_SERVERS_CONFIG"),
    _secret("--mcp-servers-json", "the same, as JSON", metavar="JSON", env="LLAMA_ARG_MCP_SERVERS_JSON"),
    _used("-ag --agent", "all built-in tools (--tools all) and the MCP proxy (--ui-mcp-proxy)", default=False,
          off_names="-no-ag --no-agent", env="LLAMA_ARG_AGENT"),
    _used("--ui-mcp-proxy --webui-mcp-proxy", "pass a page's requests to MCP servers on (/cors-proxy)", default=False,
          off_names="--no-ui-mcp-proxy --no-webui-mcp-proxy", env="LLAMA_ARG_UI_MCP_PROXY"),
)

ROUTER = _group(
    "several models",
    _used("--models-dir", "folder of models (GGUF files, or a folder for each) to serve by name", type="str",
          metavar="FOLDER", env="LLAMA_ARG_MODELS_DIR"),
    _used("--models-preset", "INI file of models and their flags", type="str", metavar="FILE",
          env="LLAMA_ARG_MODELS_PRESET"),
    _used("--llama-swap --config", "config.yaml of llama-swap: models and their commands", type="str",
          metavar="FILE", env="LLAMADO_CONFIG"),
    _used("--models-max", "models loaded at the same time (0: no limit)", type="int", default=4, metavar="N",
          env="LLAMA_ARG_MODELS_MAX"),
    _used("--models-memory", "memory of all models loaded at the same time (24G, 800M; 0: no limit): those unused "
          "for longest make room (default: this machine's)", type="str", metavar="SIZE", env="LLAMADO_MODELS_MEMORY"),
    _used("--models-autoload", "load a model when a request names it", default=True,
          off_names="--no-models-autoload", env="LLAMA_ARG_MODELS_AUTOLOAD"),
)

LOGGING = _group(
    "logging and tracing",
    _used("-v --verbose --log-verbose", "log everything", default=False, commands=_ENGINE | _WORKER | _TAP | _GATEWAY),
    _used("-lv --verbosity --log-verbosity",
          "0 nothing but output, 1 errors, 2 warnings, 3 info, 4 and up debug, 10 also the device of each layer",
          type="int", default=3, metavar="N", env="LLAMA_ARG_LOG_VERBOSITY LLAMA_LOG_VERBOSITY", dest="log_verbosity",
          commands=_ENGINE | _GATEWAY),
    _used("--log-file", "write the log to a file as well, from info on at least",
          type="str", metavar="FILE", env="LLAMA_ARG_LOG_FILE", commands=_HTTP),
    _used("--log-disable", "log nothing", default=False, commands=_HTTP),
    _used("--log-jsonl", "one JSON object a line", default=False, off_names="--no-log-jsonl",
          env="LLAMA_ARG_LOG_JSONL", commands=_HTTP),
    _used("--log-format", "older spelling: text or json", type="str", default="text", choices="text json",
          metavar="FORMAT", commands=_HTTP),
    _used("--log-timestamps", "time of each line", default=True, off_names="--no-log-timestamps",
          env="LLAMA_ARG_LOG_TIMESTAMPS", commands=_HTTP | _WORKER | _TAP),
    _used("--log-prefix", "level of each line", default=False, off_names="--no-log-prefix",
          env="LLAMA_ARG_LOG_PREFIX", commands=_HTTP),
    _used("--log-colors", "colors in the log: on, off, or auto (on a terminal)", type="str", default="auto",
          choices="on off auto", bare="on", metavar="on|off|auto", env="LLAMA_ARG_LOG_COLORS", commands=_HTTP),
    _used("--otel", "send OpenTelemetry traces to $OTEL_EXPORTER_OTLP_ENDPOINT (also when only that is set)",
          default=False, env="LLAMADO_OTEL"),
    _none("--log-prompts-dir", "prompts are never logged"),
)

GATEWAY = _group(
    "replicas",
    _used("--replica", "address of a server (http://host:port), comma-separated; may be repeated", type="str",
          many=True, metavar="URL", commands=_GATEWAY),
    _used("--backup", "address of a server that is used while no other is up; may be repeated", type="str",
          many=True, metavar="URL", commands=_GATEWAY),
    _used("--config", "YAML file: replicas, backups, keys, quota_file, admin_key, labels and the times below",
          type="str", metavar="FILE", commands=_GATEWAY, dest="gateway_config"),
    _secret("--replica-key", "API key that the replicas ask for", metavar="KEY", env="LLAMADO_REPLICA_KEY",
          commands=_GATEWAY),
    _secret("--admin-key", "key of /gateway/replicas and /gateway/drain (default: these are refused)", metavar="KEY",
          env="LLAMADO_ADMIN_KEY", commands=_GATEWAY | {"drain"}),
    _used("--key-file", "YAML file of clients' keys and what each may use (requests_per_minute, tokens_per_minute, "
          "requests_per_day, tokens_per_day)", type="str", metavar="FILE", commands=_GATEWAY),
    _used("--quota-file", "file that keeps what keys have used of their day, so that a restart does not forget it "
          "(one for each gateway)", type="str", metavar="FILE", env="LLAMADO_QUOTA_FILE", commands=_GATEWAY),
    _used("--health-interval", "seconds from one look at a replica's /health to the next", type="float", default=1.0,
          metavar="SECONDS", commands=_GATEWAY),
    _used("--health-timeout", "seconds after which a replica that does not answer /health is taken for frozen",
          type="float", default=5.0, metavar="SECONDS", commands=_GATEWAY),
    _used("--stall-timeout", "seconds a frozen replica may keep answers that it has begun", type="float", default=120.0,
          metavar="SECONDS", commands=_GATEWAY),
    _used("--patience", "seconds a request waits while no replica can take it", type="float", default=10.0,
          metavar="SECONDS", commands=_GATEWAY),
)

VERIFY = _group(
    "comparing",
    _used("--prompts", "file of prompts, one a line (default: made ones)", type="str", metavar="FILE",
          commands=_VERIFY),
    _used("-n --count", "prompts to ask", type="int", default=200, metavar="N", commands=_VERIFY),
    _used("--parallel", "requests to each server at the same time", type="int", default=8, metavar="N",
          commands=_VERIFY),
    _used("--n-predict", "tokens of each answer", type="int", default=64, metavar="N", commands=_VERIFY,
          dest="verify_tokens"),
    _used("--temp --temperature", "temperature of the answers", type="float", default=0.8, metavar="X",
          commands=_VERIFY, dest="verify_temperature"),
    _secret("--api-key", "key that the servers ask for", metavar="KEY", commands=_VERIFY, dest="verify_key"),
    _used("--json", "the result as JSON", default=False, commands=_VERIFY),
)

WAIT = _group(
    "waiting",
    _used("--timeout", "seconds to wait at most", type="float", default=300.0, metavar="SECONDS", commands=_WAIT),
    _used("--interval", "seconds between two tries, at most", type="float", default=2.0, metavar="SECONDS",
          commands=_WAIT),
    _used("--pid", "process of llamado to wait for, in place of a URL: its command line names its address, prefix and "
          "certificate", type="int", metavar="PID", commands=_WAIT),
)

UP = _group(
    "cluster",
    _used("-m --model", "model: a GGUF path, a catalog name (smollm2, gemma3), hf:user/repo[:quant], "
          "ollama:name[:tag] (default: smollm2)", type="str", metavar="MODEL", many=True, commands=_UP),
    _used("--nodes", "machines to play, the server's counted: 3 are two workers and a server that share the model "
          "evenly", type="int", default=1, metavar="N", commands=_UP),
    _used("--latency", "delay of each worker's link in ms, comma-separated (20,30); without --nodes there are as many "
          "workers", type="str", metavar="MS,MS", commands=_UP),
    _used("--host", "address on which requests are answered", type="str", default="127.0.0.1", metavar="HOST",
          commands=_UP),
    _used("--port", "port on which requests are answered (0: any free one)", type="int", default=8080, metavar="PORT",
          commands=_UP),
    _used("--replicas", "servers, each with its own workers; a gateway stands before several", type="int", default=1,
          metavar="R", commands=_UP),
    _used("--engine", "whose programs: llamado's, or llama-server and ggml-rpc-server from PATH", type="str",
          default="llamado", choices="llamado llama.cpp", metavar="ENGINE", commands=_UP),
    _used("--on", "where servers and workers run: here, or ray (where Ray has room)",
          type="str", default="here", choices="here ray", metavar="PLACE", commands=_UP),
    _used("-d --detach", "return when all is ready, and leave it running", default=False, commands=_UP),
    _used("--name", "how ps, down, logs and drain know the cluster", type="str", default="default", metavar="NAME",
          commands=_UP),
    _used("--log-folder", "folder for the logs of all processes (default: in the folder of the state)", type="str",
          metavar="FOLDER", commands=_UP),
)

RUN = _group(
    "chat",
    _used("-p --prompt", "ask this once and exit; what a pipe or a file on standard input holds is put "
          "behind it (-: ask that alone)",
          type="str", metavar="TEXT", commands=frozenset({"run"})),
    _used("-sys --system-prompt", "system message", type="str", metavar="TEXT", commands=frozenset({"run"}),
          dest="system_prompt"),
    _used("--url", "converse with a running server of OpenAI's API, ours or another's; -m names the model", type="str",
          metavar="URL", commands=frozenset({"run"})),
    _secret("--api-key", "key that the server of --url wants", metavar="KEY", env="LLAMA_API_KEY",
          commands=frozenset({"run"}), dest="api_key"),
    _used("--markdown", "show Markdown as it is meant, on a terminal", default=True, off_names="--no-markdown",
          commands=frozenset({"run"})),
)

BENCH = _group(
    "benchmark",
    _used("-p --n-prompt", "prompt lengths, comma-separated", type="str", default="512", metavar="N,N",
          commands=frozenset({"bench"})),
    _used("-n --n-gen", "generation lengths, comma-separated", type="str", default="128", metavar="N,N",
          commands=frozenset({"bench"})),
    _used("-d --n-depth", "tokens that each test begins behind, comma-separated", type="str", default="0",
          metavar="N,N", commands=frozenset({"bench"})),
    _used("--profile", "also show where the time of a pass goes, operation by operation", type="bool", default=False,
          commands=frozenset({"bench"})),
    _used("--roofline", "what the kernels of a prompt and of a token reach of this machine's limits, which are "
          "measured in the same minute", type="bool", default=False, commands=frozenset({"bench"})),
    _used("-npl --n-parallel", "sequences that generate at once, comma-separated: a table as llama-batched-bench makes "
          "it, of -p and -n tokens each", type="str", default="", metavar="N,N", commands=frozenset({"bench"}),
          dest="n_parallel"),
    _used("-r --repetitions", "repetitions", type="int", default=5, metavar="N", commands=frozenset({"bench"})),
    _used("-o --output", "md (a table) or json", type="str", default="md", choices="md json", metavar="FORMAT",
          commands=frozenset({"bench"})),
    _used("--latency",
          "delays of each graph command in ms, comma-separated: a table of decoding speeds through delayed workers, "
          "without drafts (0,5,10,20)",
          type="str", metavar="MS,MS", commands=frozenset({"bench"})),
    _used("--nodes", "machines in that table, this one counted, comma-separated (3,4,5)", type="str", metavar="N,N",
          commands=frozenset({"bench"})),
    _used("--compare", "further columns of that table, comma-separated: ring (workers pass what they compute straight "
          "to the next one), drafts (those of --spec-type, which adds the column by itself), streams (8 answers at "
          "once), predicted (compute + (N-1) * latency)", type="str", metavar="COLUMNS", commands=frozenset({"bench"})),
    _used("--both-ways", "delay every message of the workers both ways, as links do, instead of graph commands alone",
          default=False, commands=frozenset({"bench"})),
    _used("--out", "folder for the table's drawings", type="str", metavar="FOLDER", commands=frozenset({"bench"})),
    _used("-f --file", "text to score", type="str", metavar="FILE", commands=frozenset({"perplexity"})),
    _used("--chunks", "chunks to score at most (-1: all)", type="int", default=-1, metavar="N",
          commands=frozenset({"perplexity"})),
)

QUANTIZE = _group(
    "quantize",
    _used("--allow-requantize", "take tensors that are quantized already, too (what is lost twice is worse)",
          default=False, commands=_QUANTIZE),
    _used("--leave-output-tensor", "keep the output matrix as it is", default=False, commands=_QUANTIZE),
    _used("--pure", "the same type for all tensors, not more bits for some", default=False, commands=_QUANTIZE),
    _used("--imatrix", "importance matrix of llamado imatrix or llama-imatrix", type="str", metavar="FILE",
          commands=_QUANTIZE),
    _used("--include-weights", "use the importance matrix for tensors with this in their names alone", type="str",
          metavar="NAME", many=True, commands=_QUANTIZE),
    _used("--exclude-weights", "do not use the importance matrix for tensors with this in their names", type="str",
          metavar="NAME", many=True, commands=_QUANTIZE),
    _used("--output-tensor-type", "type of the output matrix", type="str", metavar="TYPE", commands=_QUANTIZE),
    _used("--token-embedding-type", "type of the token embeddings", type="str", metavar="TYPE", commands=_QUANTIZE),
    _used("--tensor-type", "type of the tensors in whose names the regular expression is found", type="str",
          metavar="NAME=TYPE", many=True, commands=_QUANTIZE),
    _used("--tensor-type-file", "file of such NAME=TYPE, with spaces or line ends between", type="str",
          metavar="FILE", commands=_QUANTIZE),
    _used("--prune-layers", "layers to leave out, comma-separated", type="str", metavar="N,N", commands=_QUANTIZE),
    _used("--keep-split", "as many files as the model has", default=False, commands=_QUANTIZE),
    _used("--override-kv", "set a key-value: KEY=int:N, float:N, bool:true, str:TEXT", type="str",
          metavar="KEY=TYPE:VALUE", many=True, commands=_QUANTIZE),
    _used("--dry-run", "only say how large it will be", default=False, commands=_QUANTIZE),
    _none("--max-buffer-size", "a tensor goes through in small pieces", commands=_QUANTIZE),
)

IMATRIX = _group(
    "imatrix",
    _used("-m --model", "model: a GGUF path, a catalog name (smollm2, gemma3), hf:user/repo[:quant]", type="str",
          default="smollm2", metavar="MODEL", commands=_IMATRIX),
    _used("-f --file", "text that the model reads", type="str", metavar="FILE", commands=_IMATRIX),
    _used("-o --output --output-file", "file to write", type="str", default="imatrix.gguf", metavar="FILE",
          commands=_IMATRIX),
    _used("-c --ctx-size", "tokens of a chunk", type="int", default=512, metavar="N", commands=_IMATRIX),
    _used("-t --threads", "threads (default: one per core)", type="int", metavar="N", commands=_IMATRIX),
    _used("--rpc", "workers that share the model: host:port, tls://host:port, comma-separated; may be repeated",
          type="str", many=True, metavar="SERVERS", commands=_IMATRIX),
    _used("--chunk --from-chunk", "chunk of the text to begin with", type="int", default=0, metavar="N",
          commands=_IMATRIX),
    _used("--chunks", "chunks to read at most (-1: all)", type="int", default=-1, metavar="N", commands=_IMATRIX),
    _used("--ppl", "say how well the model predicts the text", default=True, off_names="--no-ppl", commands=_IMATRIX),
    _used("--process-output", "also what goes through the output matrix", default=False, commands=_IMATRIX),
    _used("--parse-special", "take <|im_end|> and the like in the text for special tokens", default=False,
          commands=_IMATRIX),
    _used("-ofreq --output-frequency", "write the file every so many chunks", type="int", default=10, metavar="N",
          commands=_IMATRIX),
    _used("--save-frequency", "keep a copy every so many chunks (0: none)", type="int", default=0, metavar="N",
          commands=_IMATRIX),
    _used("--output-format", "gguf, or dat, which older programs read", type="str", default="gguf",
          choices="gguf dat", metavar="FORMAT", commands=_IMATRIX),
    _used("--in-file", "files whose sums are added, comma-separated", type="str", metavar="FILE", many=True,
          commands=_IMATRIX),
    _used("--show-statistics", "say what is in the first --in-file, and end", default=False, commands=_IMATRIX),
)

WORKER = _group(
    "worker",
    _used("-H --host", "address to listen on", type="str", default="127.0.0.1", metavar="HOST", commands=_WORKER),
    _used("-p --port", "port to listen on (0: any free one)", type="int", default=50052, metavar="PORT",
          commands=_WORKER),
    _used("-t --threads", "threads of the CPU device (default: one per core it may use)", type="int", metavar="N",
          commands=_WORKER),
    _used("-d --device", "devices to offer, comma-separated (default: CPU)", type="str", metavar="DEV,DEV",
          commands=_WORKER),
    _used("-c --cache", "keep weights on disk, each client's apart ($LLAMADO_CACHE or ~/.cache/llamado, rpc/)",
          default=False, commands=_WORKER),
    _used("-m --mem", "most memory that all clients together may take: MiB (bytes from 1048576 on), or 512K, 800M, 16G "
          "(default: what is free)", type="str", metavar="SIZE", commands=_WORKER),
    _used("--models-dir", "folder with models; may be repeated: a server whose model is there sends no weights, they "
          "are mapped here, if their SHA-256 is the same (folders that `llamado pull` fills are always looked at)",
          type="str", many=True, metavar="DIR", env="LLAMADO_MODELS_DIR", commands=_WORKER),
    _used("--no-own-files", "have all weights sent, whatever is on this disk", default=False,
          env="LLAMADO_NO_OWN_FILES", commands=_WORKER),
    _used("--protocol", "RPC version to greet unknown clients of llama.cpp with: 7 (before b11450) or 8 (from b11450 "
          "on); a client that hangs up is greeted with the other one next time", type="str", default="7",
          choices="7 8", metavar="N", commands=_WORKER),
    _used("--no-ring", "do not connect to other workers to pass on what is computed, where clients ask for it (with "
          "--allow: only in those networks)", default=False, env="LLAMADO_NO_RING", commands=_WORKER),
    _used("--tls-cert", "PEM file of the TLS certificate: clients then come by tls://", type="str", metavar="FILE",
          commands=_WORKER),
    _used("--tls-key", "PEM file of the key of --tls-cert", type="str", metavar="FILE", commands=_WORKER),
    _used("--tls-client-ca", "PEM file of the authority that clients' certificates must come from", type="str",
          metavar="FILE", commands=_WORKER),
    _used("--join", "servers to join, comma-separated; may be repeated: HOST:PORT, or https://HOST:PORT, checked by "
          "--tls-client-ca; SIGTERM leaves them again, once they have moved the layers", type="str", many=True,
          metavar="SERVER", env="LLAMADO_JOIN", commands=_WORKER),
    _secret("--token", "the servers' --cluster-token", metavar="TOKEN", env="LLAMADO_CLUSTER_TOKEN",
          commands=_WORKER),
    _used("--share", "part of the layers to ask for, where a server of --join divides by proportions", type="float",
          default=1.0, metavar="N", commands=_WORKER),
    _used("--announce", "tell this network of the worker (mDNS), for servers with --discover", default=False,
          env="LLAMADO_ANNOUNCE", commands=_WORKER),
    _used("--allow", "networks that may connect (CIDR, 10.0.0.0/8), comma-separated; may be repeated (default: all)",
          type="str", many=True, metavar="CIDR", commands=_WORKER),
)

TOP = _group(
    "top",
    _used("--once", "show it once", default=False, commands=_TOP),
    _used("--json", "print what /cluster says, once", default=False, commands=_TOP),
    _used("--interval", "seconds between two looks", type="float", default=1.0, metavar="SECONDS", commands=_TOP),
    _secret("--api-key", "key that the server wants", many=True, metavar="KEY", env="LLAMA_API_KEY",
          commands=_TOP),
)

CLUSTER = _group(
    "cluster",
    _used("--out", "folder for keys and certificates", type="str", default="cluster-tls", metavar="FOLDER",
          commands=_CLUSTER),
    _used("--server", "names and addresses by which the server is reached, comma-separated", type="str", default="",
          metavar="NAMES", commands=_CLUSTER),
    _used("--worker", "names and addresses of a worker, comma-separated; once for each", type="str", many=True,
          metavar="NAMES", commands=_CLUSTER),
    _used("--workers", "number of workers, where no names are given (they are reached by localhost)", type="int",
          default=1, metavar="N", commands=_CLUSTER),
    _used("--days", "days until the certificates expire", type="int", default=825, metavar="N", commands=_CLUSTER),
)

TAP = _group(
    "tap",
    _used("--listen-host", "address to listen on", type="str", default="127.0.0.1", metavar="HOST", commands=_TAP),
    _used("--listen-port", "port to listen on (0: any free one)", type="int", default=60052, metavar="PORT",
          commands=_TAP),
    _used("--target-host", "where the worker is", type="str", default="127.0.0.1", metavar="HOST", commands=_TAP),
    _used("--target-port", "the worker's port", type="int", default=50052, metavar="PORT", commands=_TAP),
    _used("--latency-ms", "delay of each graph command (GRAPH_COMPUTE, GRAPH_RECOMPUTE) in ms", type="float",
          default=0.0, metavar="MS", commands=_TAP),
    _used("--jitter-ms", "random part of the delay: up to this much more, in ms", type="float", default=0.0,
          metavar="MS", commands=_TAP),
    _used("--bandwidth", "most bits a second each way: 1G, 100M, 64k (default: no limit)",
          type="str", metavar="BITS", commands=_TAP),
    _used("--all", "delay every command, not only graphs", default=False, commands=_TAP),
    _used("--trace", "write the decoded traffic to a file, a JSON object a line", type="str", metavar="FILE",
          commands=_TAP),
)

DOCTOR = _group(
    "doctor",
    _used("-m --model", "a model's file, or ollama:NAME: is it whole, does it run and fit", type="str", many=True,
          metavar="MODEL", commands=_DOCTOR),
    _used("--rpc", "workers: host:port, tls://host:port, comma-separated; may be repeated", type="str", many=True,
          metavar="SERVERS", commands=_DOCTOR),
    _used("--rpc-ca", "PEM file of the authority that tls:// workers' certificates come from", type="str",
          metavar="FILE", commands=_DOCTOR),
    _used("--rpc-cert", "PEM file of this machine's certificate for tls:// workers", type="str", metavar="FILE",
          commands=_DOCTOR),
    _used("--rpc-key", "PEM file of the key of --rpc-cert", type="str", metavar="FILE", commands=_DOCTOR),
    _used("--host", "address on which a server is to listen", type="str", default="127.0.0.1", metavar="HOST",
          commands=_DOCTOR),
    _used("--port", "port on which a server is to listen: is it free, who has it", type="int", metavar="PORT",
          commands=_DOCTOR),
    _secret("--api-key", "key that the server asks for", metavar="KEY", commands=_DOCTOR,
          env="LLAMA_API_KEY"),
    _used("-t --threads", "threads that are planned", type="int", metavar="N", commands=_DOCTOR),
    _used("-c --ctx-size", "context that is planned, in tokens (0: what fits)", type="int", default=0, metavar="N",
          commands=_DOCTOR),
    _used("-np --parallel", "slots that are planned (-1: 4 that share the context)", type="int", default=-1,
          metavar="N", commands=_DOCTOR),
    _used("-ctk --cache-type-k", "type of the K cache that is planned", type="str", default="f16",
          choices=" ".join(KV_TYPES), metavar="TYPE", commands=_DOCTOR),
    _used("-ctv --cache-type-v", "type of the V cache that is planned", type="str", default="f16",
          choices=" ".join(KV_TYPES), metavar="TYPE", commands=_DOCTOR),
    _used("--mlock", "the weights are to be locked in RAM", default=False, commands=_DOCTOR),
    _used("--timeout", "seconds that one answer may take", type="float", default=5.0, metavar="SECONDS",
          commands=_DOCTOR),
    _used("--patience", "seconds that a server which loads is watched for progress", type="float", default=10.0,
          metavar="SECONDS", commands=_DOCTOR),
    _used("--json", "print JSON", default=False, commands=_DOCTOR),
)

DEPLOY = _group(
    "deploy",
    _used("--name", "name of everything that is made", type="str", default="llamado", metavar="NAME",
          commands=_DEPLOY),
    _used("--replicas", "servers", type="int", default=1, metavar="N", commands=_DEPLOY),
    _used("--workers", "workers that share the model", type="int", default=0, metavar="N", commands=_DEPLOY),
    _used("--port", "port of the (first) server", type="int", default=8080, metavar="PORT", commands=_DEPLOY),
    _used("--worker-port", "port of the (first) worker", type="int", default=50052, metavar="PORT", commands=_DEPLOY),
    _used("--image", "image of containers", type="str", default="llamado:latest", metavar="IMAGE", commands=_DEPLOY),
    _used("--program", "where llamado is installed (systemd)", type="str", default="/usr/local/bin/llamado",
          metavar="PATH", commands=_DEPLOY),
    _used("--models", "folder of models, /models in containers (compose)", type="str", default="/srv/models",
          metavar="FOLDER", commands=_DEPLOY),
    _used("--memory", "most memory of each process: 16G (default: what the model takes, if its file is on this "
          "machine)", type="str", metavar="SIZE", commands=_DEPLOY),
    _used("--cpus", "most processors of each process", type="float", metavar="N", commands=_DEPLOY),
    _used("--tls", "servers and workers are reached by TLS (servers also with --ssl-key-file and --ssl-cert-file "
          "behind the --)", default=False, commands=_DEPLOY),
    _used("--key", "clients need a key, which the target keeps (also with --api-key or --api-key-file behind the --)",
          default=False, commands=_DEPLOY),
    _used("--domain", "name by which clients come (nginx)", type="str", default="_", metavar="NAME",
          commands=_DEPLOY),
    _used("--gateway", "llamado gateway stands before the servers (a cluster.yaml with several replicas has one)",
          default=False, commands=_DEPLOY),
    _used("--lws", "group a server with its workers by LeaderWorkerSet (kubernetes, helm)", default=False,
          commands=_DEPLOY),
    _used("--out", "folder to write the files to (default: print those that hold no secrets)", type="str",
          metavar="FOLDER", commands=_DEPLOY),
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
OFTEN = frozenset({
    "model", "hf_repo", "alias", "model_draft", "threads", "ctx_size", "parallel", "cache_type_k", "cache_type_v",
    "rpc", "tensor_split", "gpu_layers", "rpc_failover", "discover", "seed", "temperature", "top_k", "top_p", "min_p",
    "n_predict", "host", "port", "api_key", "ssl_key_file", "ssl_cert_file", "cors_origins", "metrics",
    "chat_template_file", "reasoning", "embedding", "cache_disk", "slot_save_path", "models_dir", "models_preset",
    "verbose", "log_file", "log_jsonl",
})
# fmt: on
"""Keys of the flags that `--help` shows of commands that have many; `--help-all` shows the others, too."""

_MANY = 40


@dataclass(frozen=True)
class Parsed:
    """Values of all used flags of a command (by `Flag.key`) and the notes about flags that have no meaning here."""

    values: Mapping[str, Any]
    given: frozenset[str]
    notes: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


def memory_size(text: str, name: str = "-m/--mem") -> int:
    """Bytes of a size, of which `name` begins messages: a plain number is MiB, as older rpc-servers took it; from a TiB
    on, which would be in MiB, it is bytes, as others took it. Raises FlagError.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?)?", text.strip(), re.IGNORECASE)
    unit = found[2] if found else None
    number = float(found[1]) if found else 0.0
    size = int(number * units[unit.upper()]) if unit else int(number) if number >= 1 << 20 else int(number * (1 << 20))
    if size <= 0:
        raise FlagError(f"{name}: expected MiB as a number, or a size as 512K, 800M, 16G; got {text!r}")
    return size


def api_prefix(text: str) -> str:
    """Return the path of `--api-prefix` without the slash at its end. Raises FlagError."""
    prefix = text.rstrip("/")
    if prefix and not re.fullmatch("(/[A-Za-z0-9._~-]+)+", prefix):
        raise FlagError(f"--api-prefix: expected a path as /llama, got {text!r}")
    return prefix


def check_port(flag: str, port: int) -> int:
    """A port, or 0 for any free one. Raises FlagError."""
    if not 0 <= port <= 65535:
        raise FlagError(f"{flag}: expected 0 to 65535, got {port}")
    return port


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises `FlagError` instead of leaving the process.

    `rare`: what its help leaves out, unless all is asked for.
    """

    def __init__(self, **options: Any) -> None:
        self.rare: list[argparse.Action] = []
        super().__init__(**options)
        # Values that begin with a minus are values, as in `-ts -1,1`: no flag's name begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.add_argument("--help-all", action=_WholeHelp, nargs=0, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        told = [action.help for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, help in zip(self.rare, told, strict=True):
                action.help = help
        n = len([help for help in told if help is not argparse.SUPPRESS])
        return f"{text}\n{n} flags more: {self.prog} --help-all\n" if n else text

    def error(self, message: str) -> NoReturn:
        raise FlagError(message.replace("argument ", "", 1))


class _WholeHelp(argparse.Action):
    """Prints the help with all flags, and ends."""

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
    """Add every flag of a command; the parser's own `-h` stays."""
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
            if flag.words > 1:
                extra["nargs"] = flag.words
            if flag.many:
                extra["action"] = "append"
            made = group.add_argument(*flag.names, **common, **extra)
        if many and flag.key not in OFTEN and (command == "serve" or len(flag.commands) > 1):
            parser.rare.append(made)
        if flag.off_names:
            off = False if flag.type == "bool" else "off"
            hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            group.add_argument(*flag.off_names, action="store_const", dest=flag.key, const=off, **hidden)


SECRET_FLAGS = frozenset(name for flag in FLAGS if flag.secret for name in flag.names)
UP_SERVER_FLAGS = "LLAMADO_UP_SERVER_FLAGS"
"""Variable by which `llamado up` in the background is given flags of the server."""
secret_values.declare([UP_SERVER_FLAGS, *(name for flag in FLAGS if flag.secret for name in flag.env)])


def secrets_of(command: str) -> dict[str, str]:
    """Return the secrets of this process that a command takes from its environment."""
    names = {name for flag in FLAGS if flag.secret and command in flag.commands for name in flag.env}
    return {name: value for name in sorted(names) if (value := secret_values.secret(name))}


def split_flags(
    arguments: Sequence[str], command: str, keys: Collection[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Divide arguments into those without the flags of `keys`, and the values of these by their keys.

    Only for flags that take one value; it follows its flag, or an equals sign.
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
    """Divide arguments into those without secrets and an environment with these."""
    flags = {flag.key: flag for flag in FLAGS if flag.secret and command in flag.commands}
    plain, found = split_flags(arguments, command, flags)
    return plain, {
        flags[key].env[0]: ",".join(values) if flags[key].many else values[-1] for key, values in found.items()
    }


def spell(argument: str) -> str:
    """An argument with dashes for underscores in a long flag's name, as llama.cpp reads it."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _from_environment(flag: Flag, environ: Mapping[str, str]) -> tuple[Any, str]:
    """The value and the variable it comes from; None where no variable is set."""
    for name in flag.env:
        negative = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
        if flag.type == "bool" and negative != name and negative in environ:
            # llama.cpp takes the mere presence of the negative form as "off".
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
    """The error for an argument that no flag of the command takes, naming the nearest one."""
    if not argument.startswith("-") or argument == "-":
        takes = any(command in flag.commands and flag.key == "model" for flag in FLAGS)
        model = f"a model is given with -m {argument}; " if takes else ""
        return FlagError(f"unexpected argument {argument!r}: {model}see llamado {command} --help")
    name = argument.partition("=")[0]
    known = [n for f in FLAGS if command in f.commands for n in f.names + f.off_names]
    # A long name is compared without its dashes too, so that `-ctx-size` finds `--ctx-size`.
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.6)
    # Among names equally near, letters that changed places are likelier than others: --prot is --port, not --prio.
    near.sort(key=lambda n: (difflib.SequenceMatcher(None, n, name).ratio(), sorted(n) == sorted(name)), reverse=True)
    if not near:
        bare = {n.lstrip("-"): n for n in known}
        near = [bare[m] for m in difflib.get_close_matches(name.lstrip("-"), list(bare), n=1, cutoff=0.5)]
    hint = f"did you mean {near[0]}? " if near else ""
    return FlagError(f"unknown flag {name}: {hint}(all flags: llamado {command} --help-all)")


def refuse_broken_lines(arguments: Sequence[str], with_value: Collection[str]) -> None:
    r"""Raise FlagError if the command ended at a `\` that something follows on its line.

    A shell makes the word " " of the space behind the `\` in `-m x \    # a comment`, or " #" if there is but one, and
    ends the command with the line; a shell that does not join lines with `\` gives it alone. The next line is another
    command to them, so its flags are lost. Any of these words may be the value of a flag in `with_value`.
    """
    for i, argument in enumerate(arguments):
        blank = argument.isspace() and "\n" not in argument
        comment = argument.lstrip().startswith("#")
        if not comment and not (i == len(arguments) - 1 and (blank or argument == "\\")):
            continue
        if i and arguments[i - 1] in with_value:
            continue
        if argument == "\\":
            what = "the \\ at a line's end, which does not join lines in this shell,"
        elif comment:
            what = f"the comment {' '.join(arguments[i:]).strip()!r} behind the \\ at a line's end"
        else:
            what = "a space, or a comment, behind the \\ at a line's end"
        raise FlagError(
            f"{what} ended the command: the flags of the lines below it are missing. A \\ joins two lines only as the "
            "last character of the first: put comments on lines of their own, before the command"
        )


def parse(
    parser: argparse.ArgumentParser, command: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Parsed, argparse.Namespace]:
    """Parse a command's arguments; a flag wins over the environment, the environment over the default.

    Returns the flags' values and argparse's own namespace (positionals). Raises FlagError.
    """
    environ = os.environ if environ is None else environ
    spelled = [spell(a) for a in arguments]
    known = parser._option_string_actions
    refuse_broken_lines(spelled, {name for name, action in known.items() if action.nargs not in (0, "?")})
    for argument in spelled:
        # argparse would read `-ctx-size 4` as `-c` with the value "tx-size".
        if argument[:1] == "-" and argument[1:2].isalpha() and argument not in known:
            raise unknown_flag(argument, command)
    # Several words with flags between them are too much for argparse's plain way.
    read = parser.parse_known_intermixed_args if command == "gguf" else parser.parse_known_args
    namespace, extra = read(spelled)
    if extra:
        raise unknown_flag(extra[0], command)
    values: dict[str, Any] = {}
    given: set[str] = set()
    notes: dict[str, list[str]] = {}
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
                notes.setdefault(flag.help, []).append(label)
        if flag.kind is Kind.USED:
            values[flag.key] = flag.default if value is None else value
    for flag in FLAGS:
        if command in flag.commands and flag.needs and flag.key in given and not given & {flag.needs, *_JOINED}:
            needed = "--" + flag.needs.replace("_", "-")
            notes.setdefault(f"{_CPU}; {needed} names others", []).append(flag.label)
    said = tuple(f"{', '.join(names)}: accepted, no effect here ({why})" for why, names in notes.items())
    return Parsed(values, frozenset(given), said), namespace


def markdown() -> str:
    """The flags of all commands as a Markdown page (`docs/flags.md`): `serve` first, then what others have besides."""
    lines = [
        "# Flags of `llamado serve`",
        "",
        "Made from `src/llamado/flags.py` by `python -m llamado.flags`. A flag wins over its environment variable.",
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
                f"Those of `llamado serve` that make sense for it (`llamado {command} --help-all`)",
                "",
            ]
            if own:
                lines[-2] += " and these:"
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
