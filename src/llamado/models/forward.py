"""Forward pass under construction: its graph, its inputs, and the operations that layers of all architectures use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from llamado.ggml.graph import (
    add,
    cast,
    concat,
    cont,
    flash_attn_ext,
    get_rows,
    mul,
    mul_mat,
    mul_mat_id,
    permute,
    reshape,
    rms_norm,
    rope_ext,
    scale,
    set_rows,
    view_2d,
    view_3d,
    view_4d,
)
from llamado.ggml.ops import PrecType
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.adapter import Adapter
from llamado.models.batch import BatchShape
from llamado.models.hadamard import Hadamard, rotate_heads
from llamado.models.hparams import HyperParameters, Rope
from llamado.models.inputs import (
    AttentionTemperature,
    Embeddings,
    FixedPairs,
    ForwardGraph,
    HiddenStates,
    Input,
    Mask,
    OutputRows,
    Positions,
    RelativeBuckets,
    RowsWritten,
    StateRows,
    TextShares,
    TokenIds,
    WindowView,
)
from llamado.models.memory import LayerCache, Memory

_F32_PRECISION = PrecType.F32


class Step(Protocol):
    """The part of a forward pass that weights need: of a text model (`Pass`) or of a media encoder."""

    @property
    def norm_eps(self) -> float: ...

    def mul_mat(self, weight: Tensor, x: Tensor, name: str) -> Tensor: ...

    def norm(self, x: Tensor, weight: Tensor, name: str) -> Tensor: ...


class Projection(Protocol):
    """A projection of rows to rows of another width."""

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor: ...


class Linear(NamedTuple):
    """A matrix with optional scale and bias."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    def __call__(self, step: Step, x: Tensor, name: str) -> Tensor:
        y = step.mul_mat(self.weight, x, name)
        if self.scale is not None:
            y = mul(y, self.scale, name)
        return y if self.bias is None else add(y, self.bias, name)


class LongRopeFactors(NamedTuple):
    """LongRoPE (arXiv 2402.13753): divisors of the rotary frequencies for short and long contexts.

    The short factors apply if the sequence's maximum context, not its length, is at most `n_ctx_short` tokens.
    """

    short: Tensor | None
    long: Tensor | None


class Pass:
    """A forward pass under construction: its graph, and its inputs, each created on first use.

    `last` is the layer after which only output rows continue: None for the model's last layer, -1 if the output needs
    all rows. `cached` are layers that only write their memory.
    """

    __slots__ = ("_adapters", "_cached", "_common", "_hparams", "_last", "_memory", "graph", "shape")

    def __init__(
        self,
        hparams: HyperParameters,
        shape: BatchShape,
        memory: Memory,
        adapters: Sequence[Adapter] = (),
        *,
        last: int | None = None,
        cached: Collection[int] = (),
    ) -> None:
        self.graph = ForwardGraph()
        self.shape = shape
        self._hparams = hparams
        self._common: dict[str, Tensor] = {}
        self._memory = memory
        self._adapters = [pair for pair in zip(adapters, shape.scales, strict=False) if pair[1]]
        self._last = hparams.n_layer - 1 if last is None else last
        self._cached = cached

    @property
    def norm_eps(self) -> float:
        """Epsilon of the model's norms."""
        return self._hparams.norm_eps

    def input(self, input: Input) -> Tensor:
        """Return the tensor of an input, creating it on first use."""
        return self.graph.feed(input)

    def shared(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor shared by several layers, creating it on first use."""
        if name not in self._common:
            self._common[name] = self.graph.expand(make())
        return self._common[name]

    def get_shared(self, name: str) -> Tensor:
        """Return a tensor that an earlier layer shared (`shared`)."""
        return self._common[name]

    def tokens(self) -> Tensor:
        """Return the tokens: I32 [n_tokens]."""
        return self.input(TokenIds(self.shape.n_tokens))

    def embeddings(self, width: int) -> Tensor:
        """Return the embeddings that replace tokens: F32 [width, n_tokens]."""
        return self.input(Embeddings(width, self.shape.n_tokens))

    def hidden_states(self) -> Tensor:
        """Return the hidden state that comes with each token: F32 [hidden_width, n_tokens]."""
        return self.input(HiddenStates(self.shape.hidden_width, self.shape.n_tokens))

    def positions(self, sections: int = 1) -> Tensor:
        """Return each token's position in its sequence: I32 [sections × n_tokens]."""
        return self.input(Positions(self.shape.n_tokens, sections))

    def cells(self, layer_cache: LayerCache) -> Tensor:
        """Return the memory row each token is written to: I64 [n_tokens]."""
        return self.input(RowsWritten(f"cells{layer_cache.part.suffix}", self.shape.n_tokens, layer_cache.number))

    def mask(self, layer_cache: LayerCache, *, distances: bool = False) -> Tensor:
        """Return the attention mask: F16 [rows, n_tokens], 0 if the token sees the row, else minus infinity.

        With `distances`, minus the distance between the token's own row and the seen row (ALiBi) instead of 0.
        """
        name = f"mask{layer_cache.part.suffix or '_swa'}" if layer_cache.window else "mask"
        return self.input(
            Mask(
                name + "_distances" * distances,
                self._n_rows_read(layer_cache),
                self.shape.n_tokens,
                layer_cache.number,
                WindowView(layer_cache.window, layer_cache.chunked, layer_cache.symmetric),
                distances=distances,
            )
        )

    def _bias_mask(self, layer_cache: LayerCache, table: Tensor) -> Tensor:
        """Return the mask with a relative position bias per head: F16 [rows, n_tokens, n_head].

        `table`, [n_head, n_buckets], holds the bias of each bucket; see RelativeBuckets.
        """
        rows, n_tokens, (n_head, n_buckets) = self._n_rows_read(layer_cache), self.shape.n_tokens, table.ne[:2]

        def make() -> Tensor:
            buckets = self.input(RelativeBuckets(rows, n_tokens, n_buckets, layer_cache.number))
            biases = reshape(get_rows(table, buckets), n_head, rows, n_tokens)
            biases = cont(permute(biases, 2, 0, 1, 3))
            return cast(add(biases, cast(self.mask(layer_cache), TensorType.F32)), TensorType.F16, "biases")

        return self.shared(table.name, make)

    def layer_cache(self, layer: int) -> LayerCache:
        """Return the cache of a layer."""
        return self._memory[layer]

    def _n_rows_read(self, layer_cache: LayerCache) -> int:
        """Return the number of cache rows that attention reads."""
        return min(self.shape.n_kv, layer_cache.part.n_rows)

    def temperature(self, scale: float, length: int, offset: float = 0.0) -> Tensor:
        """Return the position-dependent factor of queries (AttentionTemperature): F32 [1, 1, n_tokens]."""
        return self.input(AttentionTemperature(self.shape.n_tokens, scale, length, offset))

    def out_rows(self) -> Tensor:
        """Return the output rows of the batch: I32 [n_outputs]."""
        return self.input(OutputRows(self.shape.n_outputs))

    def mul_mat(self, weight: Tensor, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix and add the adapters' products."""
        y = mul_mat(weight, x, name=name)
        for adapter, strength in self._adapters:
            pair = adapter.pairs.get(weight.name)
            if pair is not None:
                more = mul_mat(pair.b, mul_mat(pair.a, x))
                y = add(y, scale(more, adapter.strength(weight.name, strength)), name)
        return y

    def mul_mat_id(self, weight: Tensor, x: Tensor, chosen: Tensor, name: str) -> Tensor:
        """Multiply by the matrices selected for each token and add the adapters' products."""
        y = mul_mat_id(weight, x, chosen, name)
        for adapter, strength in self._adapters:
            pair = adapter.pairs.get(weight.name)
            if pair is not None:
                more = mul_mat_id(pair.b, mul_mat_id(pair.a, x, chosen), chosen)
                y = add(y, scale(more, adapter.strength(weight.name, strength)), name)
        return y

    def get_rows(self, weight: Tensor, rows: Tensor, name: str) -> Tensor:
        """Return rows of an embedding with the adapters' additions."""
        y = get_rows(weight, rows, name)
        for adapter, strength in self._adapters:
            pair = adapter.pairs.get(weight.name)
            if pair is not None:
                more = mul_mat(pair.b, get_rows(pair.a, rows))
                y = add(y, scale(more, adapter.strength(weight.name, strength)), name)
        return y

    def norm(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """RMS norm times `weight`."""
        return mul(rms_norm(x, self._hparams.norm_eps), weight, name)

    def rotate(
        self,
        x: Tensor,
        rope: Rope,
        factors: Tensor | LongRopeFactors | None,
        name: str,
        *,
        offset: int = 0,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Apply the rotary embedding to heads [head_dim, n_head, n_tokens], from element `offset` on.

        `factors` divide the frequencies. `positions`, I32 [n_tokens], replace those of the batch.
        """
        if isinstance(factors, LongRopeFactors):
            factors = factors.long if self._memory.n_ctx > self._hparams.n_ctx_short else factors.short
        multi = rope.sections if self.shape.embeddings and positions is None else None
        if multi is not None:
            positions = self.positions(4)
        elif rope.fixed_pairs:
            factors = self.input(FixedPairs(rope.n_dims // 2, rope.fixed_pairs))
        return rope_ext(
            x,
            self.positions() if positions is None else positions,
            factors,
            rope.n_dims,
            rope.mode if multi is None else multi.mode,
            rope.n_ctx_orig,
            rope.freq_base,
            rope.freq_scale,
            rope.ext_factor,
            rope.attn_factor,
            rope.beta_fast,
            rope.beta_slow,
            name,
            offset,
            None if multi is None else multi.lengths,
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        max_bias: float = 0.0,
        bias: Tensor | None = None,
        index: Tensor | None = None,
        choose: Callable[[Tensor], Tensor] | None = None,
        on_written: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """Write keys and values to the cache and attend: F32 [head_dim of v × n_head, n_tokens].

        q, k, v are [head_dim, heads, n_tokens]; value heads may have another size than key heads. `softcap`, `sinks`
        (F32 [n_head]) and `max_bias` (ALiBi) are those of `flash_attn_ext`; `bias` is the table of `_bias_mask`.
        `index` [n, n_tokens] is written to the cache too. `choose` replaces the mask; `on_written` is called once
        everything is written. Returns None if only the cache is needed: the last layer of a batch without outputs.
        """
        graph, layer_cache = self.graph, self._memory[layer]
        only_cache = self.is_cache_only(layer)
        q, k, v = self._rotate(layer_cache, q, k, v)
        # llama.cpp's order of expansion, which differs for models with sliding windows.
        wanted = (q, k, v) if self._hparams.n_swa else (q, v, k)
        for tensor in wanted[1:] if only_cache else wanted:
            graph.expand(tensor)
        k_cache, v_cache = self._write(layer_cache, k, v)
        if index is not None:
            graph.expand(set_rows(layer_cache.tensors[2], index, self.cells(layer_cache)))
        if on_written is not None:
            on_written()
        if only_cache:
            return None
        n_kv = self._n_rows_read(layer_cache)
        mask = None if choose is None else choose(self.mask(layer_cache))
        keys = _heads(k_cache, k.ne[0], k.ne[1], n_kv)
        values = _heads(v_cache, v.ne[0], v.ne[1], n_kv)
        return self._attention(layer, layer_cache, q, keys, values, scale, softcap, sinks, max_bias, bias, mask)

    def attend_per_head(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extra: Tensor,
        scale: float,
        choose: Callable[[Tensor, Tensor, int], Sequence[Tensor]],
    ) -> Tensor | None:
        """Attend as in `attend`, with a mask per KV head.

        `extra` [n, n_tokens] is written to the cache after the keys, in the same rows. `choose` returns the masks, or
        one for all heads, given those extra elements [n, rows], the mask, and the number of the memory's part.
        """
        graph, layer_cache = self.graph, self._memory[layer]
        only_cache = self.is_cache_only(layer)
        q, k, v = self._rotate(layer_cache, q, k, v)
        if not only_cache:
            graph.expand(q)
        (dim_k, n_head_kv, n_tokens), (dim_v, group) = k.ne[:3], (v.ne[0], q.ne[1] // k.ne[1])
        k_cache, v_cache = layer_cache.tensors
        row = concat(reshape(k, dim_k * n_head_kv, n_tokens), extra, 0)
        graph.expand(set_rows(k_cache, row, self.cells(layer_cache)))
        graph.expand(set_rows(v_cache, view_2d(v, dim_v * n_head_kv, n_tokens, v.nb[2]), self.cells(layer_cache)))
        if only_cache:
            return None
        n_kv, size = self._n_rows_read(layer_cache), k_cache.nb[1] * dim_k // k_cache.ne[0]
        keys = view_4d(k_cache, dim_k, n_head_kv, n_kv, 1, size, k_cache.nb[1], k_cache.nb[2])
        values = _heads(v_cache, dim_v, n_head_kv, n_kv)
        rest = view_2d(k_cache, extra.ne[0], n_kv, k_cache.nb[1], n_head_kv * size)
        masks = choose(rest, self.mask(layer_cache), layer_cache.number)
        if len(masks) == 1:
            return self._attention(layer, layer_cache, q, keys, values, scale, mask=masks[0])
        found = None
        for head, mask in enumerate(masks):
            one_q = view_3d(q, dim_k, group, n_tokens, q.nb[1], q.nb[2], head * group * q.nb[1])
            one_k, one_v = (
                view_4d(heads, heads.ne[0], 1, n_kv, 1, *heads.nb[1:], head * heads.nb[1]) for heads in (keys, values)
            )
            part = self._attention(layer, layer_cache, one_q, one_k, one_v, scale, mask=mask)
            found = part if found is None else concat(found, part, 0, f"kqv_out-{layer}")
        return found

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values to the cache without attending."""
        layer_cache = self._memory[layer]
        k, v = (self.graph.expand(self._hadamard(x, n)) for x, n in zip((k, v), layer_cache.rotations, strict=True))
        self._write(layer_cache, k, v)

    def _write(self, layer_cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Write keys and values of all tokens to a layer's cache, and return it."""
        cells, caches = self.cells(layer_cache), layer_cache.tensors[:2]
        for cache, x in zip(caches, (k, v), strict=True):
            self.graph.expand(set_rows(cache, view_2d(x, x.ne[0] * x.ne[1], x.ne[2], x.nb[2]), cells))
        return caches

    def attend_shared(self, layer: int, q: Tensor, n_head_kv: int, scale: float) -> Tensor | None:
        """Attend to the keys and values of an earlier layer, with `n_head_kv` heads; see `attend`."""
        layer_cache = self._memory[layer]
        if self.is_cache_only(layer):
            return None
        q = self._hadamard(q, layer_cache.rotations[0])
        self.graph.expand(q)
        n_kv = self._n_rows_read(layer_cache)
        keys, values = (_heads(cache, cache.ne[0] // n_head_kv, n_head_kv, n_kv) for cache in layer_cache.tensors[:2])
        return self._attention(layer, layer_cache, q, keys, values, scale)

    def attend_latent(
        self,
        layer: int,
        q: Tensor,
        row: Tensor,
        n_v: int,
        scale: float,
        choose: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        sinks: Tensor | None = None,
        on_written: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """Attend with one latent row [n, n_tokens] per token for all heads: F32 [n_v × n_head, n_tokens].

        The row starts with the key, whose first `n_v` elements are the value. q is [n_key, heads, n_tokens]. `choose`
        replaces the mask, given the elements after the keys [n − n_key, rows] and the mask. `on_written`: see `attend`.
        """
        graph, layer_cache = self.graph, self._memory[layer]
        cache = layer_cache.tensors[0]
        only_cache = self.is_cache_only(layer)
        if not only_cache:
            graph.expand(q)
        graph.expand(set_rows(cache, row, self.cells(layer_cache)))
        if on_written is not None:
            on_written()
        if only_cache:
            return None
        n_kv = self._n_rows_read(layer_cache)
        n = q.ne[0]
        keys, values = _heads(cache, n, 1, n_kv), _heads(cache, n_v, 1, n_kv)
        mask = None
        if choose is not None:
            extra = view_2d(cache, cache.ne[0] - n, n_kv, cache.nb[1], cache.nb[1] * n // cache.ne[0])
            mask = choose(extra, self.mask(layer_cache))
        return self._attention(layer, layer_cache, q, keys, values, scale, sinks=sinks, mask=mask)

    def _attention(
        self,
        layer: int,
        layer_cache: LayerCache,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        max_bias: float = 0.0,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        if mask is None:
            mask = (
                self.mask(layer_cache, distances=max_bias > 0) if bias is None else self._bias_mask(layer_cache, bias)
            )
        q = view_4d(q, *q.ne, q.nb[1], q.nb[2], q.nb[3])
        out = flash_attn_ext(
            permute(q, 0, 2, 1, 3),
            permute(keys, 0, 2, 1, 3),
            permute(values, 0, 2, 1, 3),
            mask,
            scale,
            max_bias,
            softcap,
            precision=_F32_PRECISION,
            sinks=sinks,
        )
        out = reshape(out, out.ne[0] * out.ne[1], out.ne[2], name=f"kqv_out-{layer}")
        return self._hadamard(self.graph.expand(out), layer_cache.rotations[1])

    def _rotate(self, layer_cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate the heads of queries, keys and values as the cache of a layer requires."""
        keys, values = layer_cache.rotations
        return self._hadamard(q, keys), self._hadamard(k, keys), self._hadamard(v, values)

    def _hadamard(self, x: Tensor, n: int) -> Tensor:
        """Apply the Hadamard rotation of a quantized cache; it is its own inverse. `n` 0: none."""
        return rotate_heads(self.input(Hadamard(n)), x) if n else x

    @property
    def n_seqs(self) -> int:
        """Number of sequences of the batch if layers have recurrent state; all have equally many tokens."""
        return self.shape.n_seqs or 1

    def state_rows(self, layer: int) -> Tensor:
        """Return the state rows that the sequences continue from: I32 [n_seqs]."""
        layer_cache = self._memory.states(layer)
        return self.input(StateRows(f"states{layer_cache.part.suffix}", self.n_seqs, layer_cache.number))

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return all state rows of a layer, F32 [width, rows] each, for operations that select rows themselves."""
        return self._memory.states(layer).tensors

    def read_states(self, layer: int, number: int) -> Tensor:
        """Return state `number` of a layer before the batch: F32 [width, n_seqs]."""
        return get_rows(self.states(layer)[number], self.state_rows(layer))

    def store_states(self, layer: int, number: int, states: Tensor) -> None:
        """Store state `number` of a layer after the batch: F32 [width, n_seqs].

        Between reading and storing a state, no operation may need weights on another device: while one batch waits for
        that device, the next batch would read the same state. Expand the sources of an operation on states before
        reading them.
        """
        layer_cache = self._memory.states(layer)
        cells = self.input(RowsWritten(f"cells{layer_cache.part.suffix}", self.n_seqs, layer_cache.number))
        self.graph.expand(set_rows(layer_cache.tensors[number], states, cells))

    def is_cache_only(self, layer: int) -> bool:
        """Return True if only the layer's memory is needed: the last layer of a batch without outputs."""
        return layer in self._cached or (layer == self._last and not self.shape.n_outputs)

    def mean_of_texts(self, x: Tensor) -> Tensor:
        """Return the mean over the text of each output row, from the rows of all tokens: F32 [n, n_outputs].

        Products are summed along the batch in order, and tokens of other texts count as 0, so the result has the same
        bits as if the text were alone.
        """
        rows = cont(permute(x, 1, 0, 2, 3))
        return mul_mat(rows, self.input(TextShares(self.shape.n_tokens, self.shape.n_outputs)), name="mean_of_texts")

    def keep_outputs(self, layer: int, *streams: Tensor) -> tuple[Tensor, ...]:
        """In the last layer, keep only the output rows: after attention no operation mixes rows, except text means."""
        if layer != self._last:
            return streams
        rows = self.out_rows()
        return tuple(get_rows(stream, rows) for stream in streams)


def _heads(cache: Tensor, head_dim: int, n_head: int, n_kv: int) -> Tensor:
    """Return the first `n_kv` cells of a cache as [head_dim, n_head, n_kv]."""
    row = cache.nb[1]
    return view_4d(cache, head_dim, n_head, n_kv, 1, row // n_head, row, cache.nb[2])
