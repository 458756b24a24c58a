"""Preprocessing of pictures by the real mtmd, without a projector file: its classes, called with any hparams.

The layouts of structures and the names of functions are those of b11434 (see `mtmd`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_bool, c_float, c_int32, c_uint8, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mtmd import ImageF32, PreparedInput, Vector, library, logged, read_images
from numpy.typing import NDArray

BILINEAR, BICUBIC, LANCZOS = range(3)
NONE, CEIL, NEAREST = range(3)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_COLOR = c_uint8 * 3


class HParams(Structure):
    """The fields of clip_hparams that preprocessing reads; the rest is room."""

    _fields_ = (
        ("image_size", c_int32),
        ("patch_size", c_int32),
        ("_sizes", c_int32 * 7),
        ("n_merge", c_int32),
        ("image_longest_edge", c_int32),
        ("image_min_pixels", c_int32),
        ("image_max_pixels", c_int32),
        ("image_resize_algo", c_int32),
        ("image_resize_pad", c_int32),
        ("image_pad_color", _COLOR),
        ("image_res_candidates", Vector),
        ("preproc_min_tiles", c_int32),
        ("preproc_max_tiles", c_int32),
        ("preproc_tile_size", c_int32),
        ("image_resize_algo_rf", c_int32),
        ("image_resize_algo_ov", c_int32),
        ("image_pad_rf", c_int32),
        ("image_pad_ov", c_int32),
        ("image_pad_color_rf", _COLOR),
        ("image_pad_color_ov", _COLOR),
        ("image_mean", c_float * 3),
        ("image_std", c_float * 3),
        ("warmup_image_size", c_int32),
        ("warmup_audio_size", c_int32),
        ("ffn_op", c_int32),
        ("mm_patch_merge_type", c_int32),
        ("_floats", c_float * 3),
        ("n_expert_used", c_int32),
        ("feature_layers", Vector),
        ("attn_window_size", c_int32),
        ("n_wa_pattern", c_int32),
        ("wa_layer_indexes", c_void_p * 7),  # std::unordered_set
        ("wa_pattern_mode", Vector),
        ("dsv4_max_n_token", c_int32),
        ("dsv4_max_wh_ratio", c_int32),
        ("_rest", c_uint8 * 1024),
    )


def hparams(*, pinpoints: Sequence[tuple[int, int]] = (), **values: Any) -> HParams:
    """Return hparams with the defaults of clip-model.h; `pinpoints` are widths and heights."""
    made = HParams(n_merge=1, image_min_pixels=-1, image_max_pixels=-1)
    made.image_resize_algo = made.image_resize_algo_rf = made.image_resize_algo_ov = BICUBIC
    made.image_resize_pad = made.image_pad_rf = CEIL
    made.image_mean, made.image_std = (c_float * 3)(*MEAN), (c_float * 3)(*STD)
    for name, value in values.items():
        if not hasattr(made, name):
            raise AttributeError(name)
        kind = type(getattr(made, name))
        setattr(made, name, kind(*value) if isinstance(value, tuple) else value)
    if pinpoints:
        kept = (c_int32 * (2 * len(pinpoints)))(*(side for size in pinpoints for side in size))
        begin = ctypes.addressof(kept)
        made.image_res_candidates = Vector(begin, begin + ctypes.sizeof(kept), begin + ctypes.sizeof(kept))
        made._pinpoints = kept
    return made


class _ImageU8(Structure):
    """clip_image_u8."""

    _fields_ = (("buf", Vector), ("nx", c_int32), ("ny", c_int32))


class _Output(Structure):
    """mtmd_image_preproc_out."""

    _fields_ = (("entries", Vector), ("overview", ImageF32), ("grid_x", c_int32), ("grid_y", c_int32))


class _Preprocessor(Structure):
    """A subclass of mtmd_image_preprocessor; only DeepSeek-OCR's has the fields from `fuse_row` on."""

    _fields_ = (
        ("vtable", c_void_p),
        ("hparams", c_void_p),
        ("fuse_row", c_bool),
        ("base_size", c_int32),
        ("tile_size", c_int32),
        ("min_tiles", c_int32),
        ("max_tiles", c_int32),
    )


@dataclass(frozen=True, slots=True)
class RealOutput:
    """Result of mtmd_image_preprocessor::preprocess."""

    entries: list[PreparedInput]
    overview: PreparedInput | None
    grid_x: int
    grid_y: int


def preprocess(
    programs: Path, strategy: str, given: HParams, picture: NDArray[np.uint8], *, fuse_row: bool = False
) -> RealOutput:
    """Return the result of `mtmd_image_preprocessor_<strategy>` for a picture, uint8 [h, w, 3].

    Its exceptions end the process. The memory of the result stays allocated.
    """
    lib = library(programs)
    name = f"mtmd_image_preprocessor_{strategy}"
    symbol = f"{len(name)}{name}"
    own = f"_ZNK{symbol}10preprocessERK13clip_image_u8"
    inherited = "_ZNK33mtmd_image_preprocessor_llava_uhd10preprocessERK13clip_image_u8"
    function = getattr(lib, own if hasattr(lib, own) else inherited)
    function.restype, function.argtypes = _Output, (c_void_p, c_void_p)
    table = ctypes.addressof(ctypes.c_char.in_dll(lib, f"_ZTV{symbol}")) + 2 * ctypes.sizeof(c_void_p)
    pixels = np.ascontiguousarray(picture)
    height, width, _ = pixels.shape
    begin = pixels.ctypes.data
    image = _ImageU8(Vector(begin, begin + pixels.nbytes, begin + pixels.nbytes), width, height)
    sizes = given.image_size, given.preproc_tile_size, given.preproc_min_tiles, given.preproc_max_tiles
    made = _Preprocessor(table, ctypes.addressof(given), fuse_row, *sizes)
    with logged(lib):
        output = function(ctypes.byref(made), ctypes.byref(image))
    overview = output.overview.read() if output.overview.nx else None
    return RealOutput(read_images(output.entries), overview, output.grid_x, output.grid_y)


def target_ratios(programs: Path, fewest: int, most: int) -> list[tuple[int, int]]:
    """Return the grids of DeepSeek-OCR in their order, as widths and heights."""
    function = library(programs)._ZNK35mtmd_image_preprocessor_deepseekocr17get_target_ratiosEv
    function.restype, function.argtypes = Vector, (c_void_p,)
    made = _Preprocessor(min_tiles=fewest, max_tiles=most)
    pairs = function(ctypes.byref(made)).read(np.int32).reshape(-1, 2)
    return [(int(width), int(height)) for width, height in pairs]
