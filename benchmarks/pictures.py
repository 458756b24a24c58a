"""Time from a request with a picture to its first token, and peak memory, of `llamado serve` and llama-server.

The encoders have the shapes of real ones and random F16 weights: SigLIP-400M (Gemma 3: 4,096 patches of an 896 × 896
picture, 256 tokens) and that of Qwen2.5-VL (the same picture: 4,096 patches, 1,024 tokens). The text models are Gemma 3
270M, and two layers of Qwen2.5-VL's width. Every picture is new, so that nothing comes from a cache.

usage: pictures.py [siglip-400m qwen2.5-vl] [--repeats 3] [--threads 2] [--side 896] [--json FILE]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from PIL import Image
from sides import HOST, SIDES, Server, model_path, server, settle
from synthetic import kept, random_rows, write_vocabulary

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name, in ggml's order."""


class Encoder(NamedTuple):
    """Shape of a vision encoder and its projector."""

    projector: str
    keys: dict[str, Any]
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    layer: Callable[[int, int], Shapes]
    tensors: Shapes


def siglip_layer(n: int, n_ff: int) -> Shapes:
    """Return the tensors of a layer of SigLIP."""
    found: Shapes = {f"{norm}.{which}": (n,) for norm in ("ln1", "ln2") for which in ("weight", "bias")}
    found |= {f"attn_{name}.weight": (n, n) for name in ("q", "k", "v", "out")}
    found |= {f"attn_{name}.bias": (n,) for name in ("q", "k", "v", "out")}
    return found | {
        "ffn_up.weight": (n, n_ff), "ffn_up.bias": (n_ff,), "ffn_down.weight": (n_ff, n), "ffn_down.bias": (n,),
    }  # fmt: skip


def qwen_layer(n: int, n_ff: int) -> Shapes:
    """Return the tensors of a layer of Qwen2.5-VL's encoder."""
    found: Shapes = {"ln1.weight": (n,), "ln2.weight": (n,)}
    found |= {f"attn_{name}.weight": (n, n) for name in ("q", "k", "v", "out")}
    found |= {f"attn_{name}.bias": (n,) for name in ("q", "k", "v", "out")}
    for name in ("ffn_up", "ffn_gate"):
        found |= {f"{name}.weight": (n, n_ff), f"{name}.bias": (n_ff,)}
    return found | {"ffn_down.weight": (n_ff, n), "ffn_down.bias": (n,)}


ENCODERS = {
    "siglip-400m": Encoder(
        "gemma3", {"image_size": 896, "patch_size": 14, "projection_dim": 640, "clip.use_gelu": True},
        1152, 4304, 27, 16, siglip_layer,
        {
            "v.patch_embd.weight": (14, 14, 3, 1152), "v.patch_embd.bias": (1152,),
            "v.position_embd.weight": (1152, 4096), "v.post_ln.weight": (1152,), "v.post_ln.bias": (1152,),
            "mm.soft_emb_norm.weight": (1152,), "mm.input_projection.weight": (640, 1152),
        },
    ),
    "qwen2.5-vl": Encoder(
        "qwen2.5vl_merger",
        {"image_size": 560, "patch_size": 14, "projection_dim": 2048, "n_wa_pattern": 8, "clip.use_silu": True},
        1280, 3420, 32, 16, qwen_layer,
        {
            "v.patch_embd.weight": (14, 14, 3, 1280), "v.patch_embd.weight.1": (14, 14, 3, 1280),
            "v.post_ln.weight": (1280,), "mm.0.weight": (5120, 5120), "mm.0.bias": (5120,),
            "mm.2.weight": (5120, 2048), "mm.2.bias": (2048,),
        },
    ),
}  # fmt: skip


def write_tensors(writer: GGUFWriter, shapes: Shapes) -> None:
    """Write random tensors: matrices and convolutions in F16, norms of 1, all else of small numbers in F32."""
    random = np.random.default_rng(0)
    for name, ne in shapes.items():
        if len(ne) > 1 and "position" not in name:
            rows = random_rows(random, Type.F16, prod(ne[1:]), ne[0])
            writer.add_tensor(name, rows.view(np.float16).reshape(ne[::-1]))
        elif name.endswith((".bias", "position_embd.weight")):
            writer.add_tensor(name, random.standard_normal(ne[::-1], np.float32) * np.float32(0.02))
        else:
            writer.add_tensor(name, np.ones(ne[::-1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_encoder(path: Path, encoder: Encoder) -> None:
    """Write a projector file."""
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", encoder.projector)
    keys = {
        "embedding_length": encoder.n_embd, "feed_forward_length": encoder.n_ff, "block_count": encoder.n_layer,
        "attention.head_count": encoder.n_head, "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], **encoder.keys,
    }  # fmt: skip
    for key, value in keys.items():
        name = key if key.startswith("clip.") else f"clip.vision.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_array(name, value)
    layer = encoder.layer(encoder.n_embd, encoder.n_ff)
    layers = {f"v.blk.{i}.{name}": ne for i in range(encoder.n_layer) for name, ne in layer.items()}
    write_tensors(writer, encoder.tensors | layers)


def write_qwen_text(path: Path, *, n: int = 2048, n_ff: int = 11008, n_layer: int = 2) -> None:
    """Write a text model of the shape of Qwen2.5-VL 3B with few layers."""
    writer = GGUFWriter(path, "qwen2vl")
    writer.add_name(path.stem)
    writer.add_context_length(32768)
    writer.add_embedding_length(n)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(16)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_array("qwen2vl.rope.dimension_sections", [16, 24, 24, 0])
    n_vocab = write_vocabulary(writer, model_path("smollm2"))
    shapes: Shapes = {"token_embd.weight": (n, n_vocab), "output_norm.weight": (n,)}
    for i in range(n_layer):
        layer: Shapes = {"attn_norm.weight": (n,), "ffn_norm.weight": (n,), "attn_output.weight": (n, n)}
        for name, n_out in (("attn_q", n), ("attn_k", 256), ("attn_v", 256)):
            layer |= {f"{name}.weight": (n, n_out), f"{name}.bias": (n_out,)}
        layer |= {"ffn_gate.weight": (n, n_ff), "ffn_up.weight": (n, n_ff), "ffn_down.weight": (n_ff, n)}
        shapes |= {f"blk.{i}.{name}": ne for name, ne in layer.items()}
    write_tensors(writer, shapes)


def files(name: str) -> tuple[Path, Path]:
    """Return the text model and the projector of a comparison."""
    projector = kept(f"mmproj-{name}-f16.gguf", lambda path: write_encoder(path, ENCODERS[name]))
    return model_path("gemma3") if name == "siglip-400m" else kept("qwen2vl-2.gguf", write_qwen_text), projector


def picture(seed: int, side: int) -> str:
    """Return a new picture, a PNG file as base64: colored squares of 8 pixels."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(small.repeat(8, 0).repeat(8, 1)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


class Answer(NamedTuple):
    """Seconds to an answer of one token, and the tokens of its prompt."""

    seconds: float
    n_prompt: int


def ask(running: Server, seed: int, side: int) -> Answer:
    """Ask about a new picture for one token."""
    url = f"http://{HOST}:{running.port}"
    marker = httpx.get(f"{url}/props").raise_for_status().json()["media_marker"]
    prompt = {"prompt_string": f"A picture: {marker} It shows", "multimodal_data": [picture(seed, side)]}
    began = time.perf_counter()
    answer = httpx.post(f"{url}/completion", json={"prompt": prompt, "n_predict": 1, "temperature": 0}, timeout=900)
    seconds = time.perf_counter() - began
    return Answer(seconds, answer.raise_for_status().json()["tokens_evaluated"])


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("encoders", nargs="*", metavar="ENCODER", help=f"default: {' '.join(ENCODERS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", type=int, default=896, help="pixels of a side of the picture")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("| encoder | side | prompt tokens | first token s | peak memory MB |\n|---|---|---:|---:|---:|", flush=True)
    for name in flags.encoders or ENCODERS:
        text, projector = files(name)
        settings = ["-t", str(flags.threads), "-np", "1", "-c", "4096", "--mmproj", str(projector)]
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        memory: dict[str, float] = {}
        n_prompt: dict[str, int] = {}
        for repeat in range(flags.repeats):
            for side in SIDES:
                with server(side, text, settings) as running:
                    settle([running])
                    answer = ask(running, repeat, flags.side)
                    seconds[side].append(answer.seconds)
                    n_prompt[side] = answer.n_prompt
                    memory[side] = max(memory.get(side, 0.0), 1e-6 * running.peak_memory())
        for side in SIDES:
            median = statistics.median(seconds[side])
            print(f"| {name} | {side} | {n_prompt[side]} | {median:.2f} | {memory[side]:.0f} |", flush=True)
        ratio = statistics.median(seconds[SIDES[1]]) / statistics.median(seconds[SIDES[0]])
        print(f"| {name} | ratio | | {ratio:.2f} | {memory[SIDES[0]] - memory[SIDES[1]]:+.0f} |", flush=True)
        results.append({"encoder": name, "seconds": seconds, "peak_megabytes": memory, "prompt_tokens": n_prompt})
    if flags.json:
        flags.json.write_text(json.dumps({"settings": vars(flags) | {"json": None}, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
