"""Real mtmd (llama.cpp's library for pictures and sounds), called in this process: chunks, pixels and embeddings.

The layouts of C structures are those of b11434, the version that `benchmarks/peer.sh` installs. A failed assertion of
the library ends the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_bool, c_char, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

KINDS = "text", "image", "audio"

_Log = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_Evaluated = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)


class _ModelParams(Structure):
    """llama_model_params."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class _ContextParams(Structure):
    """mtmd_context_params."""

    _fields_ = (
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int32),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int32),
        ("warmup", c_bool),
        ("image_min_tokens", c_int32),
        ("image_max_tokens", c_int32),
        ("cb_eval", _Evaluated),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    )


class _InputText(Structure):
    """mtmd_input_text."""

    _fields_ = (("text", c_char_p), ("text_len", c_size_t), ("add_special", c_bool), ("parse_special", c_bool))


class _DecoderPos(Structure):
    """mtmd_decoder_pos."""

    _fields_ = (("t", c_uint32), ("x", c_uint32), ("y", c_uint32), ("z", c_uint32))


class Vector(Structure):
    """std::vector."""

    _fields_ = (("begin", c_void_p), ("end", c_void_p), ("capacity", c_void_p))

    def read(self, dtype: type[np.generic]) -> NDArray[Any]:
        """Return a copy of the elements."""
        n_bytes = (self.end or 0) - (self.begin or 0)
        return np.frombuffer(ctypes.string_at(self.begin, n_bytes) if n_bytes else b"", dtype)


class ImageF32(Structure):
    """clip_image_f32: a prepared picture, or the spectrogram of a sound."""

    _fields_ = (
        ("add_viewsep", c_bool),
        ("add_newline", c_bool),
        ("lead_pad", c_int32),
        ("grid_x", c_int32),
        ("grid_y", c_int32),
        ("orig_nx", c_int32),
        ("orig_ny", c_int32),
        ("buf", Vector),
        ("nx", c_int32),
        ("ny", c_int32),
    )

    def read(self) -> PreparedInput:
        """Return a copy."""
        values = self.buf.read(np.float32)
        shape = (self.ny, self.nx) if values.size == self.ny * self.nx else (self.ny, self.nx, 3)
        tiles = (self.grid_x, self.grid_y), (self.orig_nx, self.orig_ny)
        return PreparedInput(values.reshape(shape), self.add_viewsep, self.lead_pad, *tiles)


def read_images(entries: Vector) -> list[PreparedInput]:
    """Return the elements of a std::vector<clip_image_f32>."""
    places = range(entries.begin or 0, entries.end or 0, ctypes.sizeof(ImageF32))
    return [ImageF32.from_address(place).read() for place in places]


class _ImageTokens(Structure):
    """mtmd_image_tokens, up to the pictures."""

    _fields_ = (
        ("nx", c_uint32),
        ("ny", c_uint32),
        ("pos", c_int32),
        ("image_idx", c_uint32),
        ("n_temporal_merge", c_uint32),
        ("entries", Vector),
    )


class _AudioTokens(Structure):
    """mtmd_audio_tokens, up to the spectrogram."""

    _fields_ = (("n_tokens", c_uint32), ("entries", Vector))


class _InputChunk(Structure):
    """mtmd_input_chunk."""

    _fields_ = (
        ("type", c_int32),
        ("tokens_text", Vector),
        ("tokens_image", POINTER(_ImageTokens)),
        ("tokens_audio", POINTER(_AudioTokens)),
    )


class _Tensor(Structure):
    """ggml_tensor."""

    _fields_ = (
        ("type", c_int32),
        ("buffer", c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", c_size_t * 4),
        ("op", c_int32),
        ("op_params", c_int32 * 16),
        ("flags", c_int32),
        ("src", c_void_p * 10),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
        ("name", c_char * 64),
    )

    def read(self) -> NDArray[Any]:
        """Return a copy of an F32, F16 or I32 tensor: [ne3, ne2, ne1, ne0], without leading ones."""
        dtype = np.dtype({0: np.float32, 1: np.float16, 26: np.int32}[self.type])
        n_bytes = sum((n - 1) * step for n, step in zip(self.ne, self.nb, strict=True)) + dtype.itemsize
        values = np.frombuffer(ctypes.string_at(self.data, n_bytes), dtype)
        found = np.lib.stride_tricks.as_strided(values, tuple(self.ne)[::-1], tuple(self.nb)[::-1]).copy()
        while found.ndim > 1 and len(found) == 1:
            found = found[0]
        return found


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """Input of the encoder: float32 [h, w, 3] of a picture, or [n_mel, n_frames] of a sound.

    `tiles` and `original`: columns and rows, and width and height of the source, of pictures stacked for granite.
    """

    values: NDArray[np.float32]
    is_view_separated: bool = False
    lead_pad: int = 0
    tiles: tuple[int, int] = (0, 0)
    original: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a prompt.

    `tokens` are those of text. `positions`: time, x, y and z of each token of a picture at position 0.
    `embeddings`: float32 [n_tokens, n_embd], if they were asked for. `tensors`: recorded nodes of the encoder's graph,
    in the order of their evaluation.
    """

    kind: str
    n_tokens: int
    n_positions: int
    tokens: list[int] = field(default_factory=list)
    nx: int = 0
    ny: int = 0
    positions: NDArray[np.int32] | None = None
    causal: bool = True
    prepared: list[PreparedInput] = field(default_factory=list)
    embeddings: NDArray[np.float32] | None = None
    tensors: list[tuple[str, NDArray[Any]]] = field(default_factory=list)

    @property
    def pixels(self) -> NDArray[np.float32]:
        """The encoder's input, if it is one picture or spectrogram."""
        (only,) = self.prepared
        return only.values


class Mtmd:
    """A projector with its text model, as a context manager.

    `programs` is the folder of the real llama.cpp (fixture `peer_bin`). `record` chooses nodes of the encoder's graph
    by name (as `clip_graph::cb` named them: "layer_inp-0"), and their values come with the chunks. `min_tokens` and
    `max_tokens`: --image-min-tokens and --image-max-tokens. `flash`: flash attention on, off, or
    as the library decides.
    """

    def __init__(
        self,
        programs: Path,
        projector: Path,
        text_model: Path,
        *,
        min_tokens: int = -1,
        max_tokens: int = -1,
        flash: bool | None = None,
        n_threads: int = 2,
        record: Callable[[str], bool] | None = None,
    ) -> None:
        """Load both. Raises ValueError with the library's log."""
        self._lib, self._model, self._context = library(programs), 0, 0
        self._tensors: list[tuple[str, NDArray[Any]]] = []
        self._record = record
        params = self._lib.mtmd_context_params_default()
        params.use_gpu = params.print_timings = params.warmup = False
        params.n_threads, params.image_min_tokens, params.image_max_tokens = n_threads, min_tokens, max_tokens
        params.flash_attn_type = -1 if flash is None else int(flash)
        self._evaluated = _Evaluated(self._see)
        if record is not None:
            params.cb_eval = self._evaluated
        with logged(self._lib) as lines:
            loading = self._lib.llama_model_default_params()
            loading.n_gpu_layers = 0
            self._model = self._lib.llama_model_load_from_file(str(text_model).encode(), loading)
            if self._model:
                self._context = self._lib.mtmd_init_from_file(str(projector).encode(), self._model, params)
        if not self._context:
            self.close()
            raise ValueError(f"mtmd cannot load {projector.name} with {text_model.name}:\n{''.join(lines[-8:])}")
        self.n_embd: int = self._lib.llama_model_n_embd_inp(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free both models."""
        if self._context:
            self._lib.mtmd_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = 0

    def chunks(
        self, text: str, media: Sequence[NDArray[Any]] = (), *, encode: bool = True, add_special: bool = True
    ) -> list[Chunk]:
        """Return the chunks of a prompt with `<__media__>` for each of `media`: uint8 [h, w, 3] or float32 [n].

        Raises ValueError with the library's log.
        """
        lib = self._lib
        raw = text.encode()
        given = _InputText(raw, len(raw), add_special, True)
        bitmaps = [self._bitmap(one) for one in media]
        made = lib.mtmd_input_chunks_init()
        try:
            with logged(lib) as lines:
                if lib.mtmd_tokenize(self._context, made, byref(given), (c_void_p * len(media))(*bitmaps), len(media)):
                    raise ValueError(f"mtmd_tokenize failed:\n{''.join(lines[-8:])}")
                return [
                    self._chunk(lib.mtmd_input_chunks_get(made, i), encode, lines)
                    for i in range(lib.mtmd_input_chunks_size(made))
                ]
        finally:
            lib.mtmd_input_chunks_free(made)
            for bitmap in bitmaps:
                lib.mtmd_bitmap_free(bitmap)

    def _bitmap(self, media: NDArray[Any]) -> int:
        data = np.ascontiguousarray(media)
        if data.dtype == np.uint8:
            height, width, _ = data.shape
            return int(self._lib.mtmd_bitmap_init(width, height, data.ctypes.data))
        return int(self._lib.mtmd_bitmap_init_from_audio(data.size, data.ctypes.data))

    def _chunk(self, place: int, encode: bool, lines: list[str]) -> Chunk:
        lib, raw = self._lib, _InputChunk.from_address(place)
        n = lib.mtmd_input_chunk_get_n_tokens(place)
        n_positions = lib.mtmd_input_chunk_get_n_pos(place)
        if not raw.type:
            return Chunk("text", n, n_positions, raw.tokens_text.read(np.int32).tolist())
        embeddings = None
        self._tensors.clear()
        if encode:
            if lib.mtmd_encode_chunk(self._context, place):
                raise ValueError(f"mtmd_encode_chunk failed:\n{''.join(lines[-8:])}")
            output = lib.mtmd_get_output_embd(self._context)
            embeddings = np.ctypeslib.as_array(output, (n, self.n_embd)).copy()
        positions, nx, ny = None, 0, 0
        if raw.tokens_image:
            tokens = raw.tokens_image.contents
            nx, ny, entries = tokens.nx, tokens.ny, tokens.entries
            found = [lib.mtmd_image_tokens_get_decoder_pos(raw.tokens_image, 0, i) for i in range(n)]
            positions = np.array([(at.t, at.x, at.y, at.z) for at in found], np.int32)
        else:
            entries = raw.tokens_audio.contents.entries
        return Chunk(
            KINDS[raw.type],
            n,
            n_positions,
            nx=nx,
            ny=ny,
            positions=positions,
            causal=not lib.mtmd_decode_use_non_causal(self._context, place),
            prepared=read_images(entries),
            embeddings=embeddings,
            tensors=[*self._tensors],
        )

    def _see(self, place: int, asked: bool, _: int | None) -> bool:
        tensor = _Tensor.from_address(place)
        name = tensor.name.decode()
        if asked:
            return self._record is not None and self._record(name)
        self._tensors.append((name, tensor.read()))
        return True


_ARGUMENTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (_ModelParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, _ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_n_embd_inp": (c_int32, (c_void_p,)),
    "llama_log_set": (None, (_Log, c_void_p)),
    "mtmd_helper_log_set": (None, (_Log, c_void_p)),
    "mtmd_context_params_default": (_ContextParams, ()),
    "mtmd_init_from_file": (c_void_p, (c_char_p, c_void_p, _ContextParams)),
    "mtmd_free": (None, (c_void_p,)),
    "mtmd_decode_use_non_causal": (c_bool, (c_void_p, c_void_p)),
    "mtmd_bitmap_init": (c_void_p, (c_uint32, c_uint32, c_void_p)),
    "mtmd_bitmap_init_from_audio": (c_void_p, (c_size_t, c_void_p)),
    "mtmd_bitmap_free": (None, (c_void_p,)),
    "mtmd_input_chunks_init": (c_void_p, ()),
    "mtmd_input_chunks_size": (c_size_t, (c_void_p,)),
    "mtmd_input_chunks_get": (c_void_p, (c_void_p, c_size_t)),
    "mtmd_input_chunks_free": (None, (c_void_p,)),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, (c_void_p,)),
    "mtmd_input_chunk_get_n_pos": (c_int32, (c_void_p,)),
    "mtmd_image_tokens_get_decoder_pos": (_DecoderPos, (c_void_p, c_int32, c_size_t)),
    "mtmd_tokenize": (c_int32, (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t)),
    "mtmd_encode_chunk": (c_int32, (c_void_p, c_void_p)),
    "mtmd_get_output_embd": (POINTER(c_float), (c_void_p,)),
}


@cache
def library(programs: Path) -> Any:
    """Return libmtmd, with the types of its functions and of those it needs of libllama."""
    mtmd, llama = (ctypes.CDLL(str(programs / f"lib{name}.so")) for name in ("mtmd", "llama"))
    for name, (result, arguments) in _ARGUMENTS.items():
        function = getattr(llama if name.startswith("llama") else mtmd, name)
        function.restype, function.argtypes = result, arguments
        setattr(mtmd, name, function)
    llama.llama_backend_init()
    return mtmd


@contextmanager
def logged(lib: Any) -> Iterator[list[str]]:
    """Collect the library's log lines, which would go to the standard error output."""
    lines: list[str] = []

    def add(_: int, text: bytes, __: int | None) -> None:
        lines.append(text.decode(errors="replace"))

    callback = _Log(add)
    _kept_callbacks.append(callback)
    lib.llama_log_set(callback, None)
    lib.mtmd_helper_log_set(callback, None)  # sets that of mtmd, too
    yield lines


_kept_callbacks: list[Any] = []
"""Log callbacks, which the library may call until the process ends."""


class _InitOptions(Structure):
    """mtmd_helper_init_opt."""

    _fields_ = (("fps_target", c_float), ("ffmpeg_bin_dir", c_char_p), ("timestamp_interval_ms", ctypes.c_int64))


class _Bitmap(Structure):
    """mtmd_helper_bitmap_wrapper."""

    _fields_ = (("bitmap", c_void_p), ("video_ctx", c_void_p))


def decode(programs: Path, data: bytes) -> NDArray[np.uint8]:
    """Return the pixels of a picture file as the library decodes it: uint8 [h, w, 3]. Raises ValueError."""
    lib = library(programs)
    lib.mtmd_helper_init_opt_default.restype = _InitOptions
    lib.mtmd_helper_bitmap_init_from_buf.restype = _Bitmap
    lib.mtmd_helper_bitmap_init_from_buf.argtypes = (c_void_p, c_char_p, c_size_t, c_bool, _InitOptions)
    lib.mtmd_bitmap_get_data.restype = c_void_p
    for name in ("mtmd_bitmap_get_data", "mtmd_bitmap_get_nx", "mtmd_bitmap_get_ny"):
        getattr(lib, name).argtypes = (c_void_p,)
    with logged(lib) as lines:
        options = lib.mtmd_helper_init_opt_default()
        bitmap = lib.mtmd_helper_bitmap_init_from_buf(None, data, len(data), False, options).bitmap
    if not bitmap:
        raise ValueError(f"mtmd cannot decode the picture:\n{''.join(lines[-8:])}")
    width, height = lib.mtmd_bitmap_get_nx(bitmap), lib.mtmd_bitmap_get_ny(bitmap)
    pixels = ctypes.string_at(lib.mtmd_bitmap_get_data(bitmap), width * height * 3)
    lib.mtmd_bitmap_free(bitmap)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
