"""Attention of rows to those of their group."""

from __future__ import annotations

from llamado.ggml.graph import add, cont, mul_mat, permute, reshape, soft_max_ext, view_4d
from llamado.ggml.tensor import Tensor


def attend_groups(q: Tensor, k: Tensor, v: Tensor, factor: float, distances: Tensor | None = None) -> Tensor:
    """Return attention of queries to the keys of their group: F32 [dim · n_head, n_queries · n_groups].

    q, k and v are [dim, n_head, n, n_groups]. `distances`: [dim, 2 · n − 1] are the keys of distances n − 1 … 1 − n.
    """
    dim, n_head, n, n_groups = q.ne
    q = cont(permute(q, 0, 2, 1, 3))
    scores = mul_mat(cont(permute(k, 0, 2, 1, 3)), q)
    if distances is not None:
        # The distance of query q and key k is column n - 1 - q + k: one column earlier in each row.
        by_distance = mul_mat(distances, q)
        _, nb1, nb2, nb3 = by_distance.nb
        scores = add(scores, view_4d(by_distance, n, n, n_head, n_groups, nb1 - 4, nb2, nb3, 4 * (n - 1)))
    found = mul_mat(cont(permute(v, 1, 2, 0, 3)), soft_max_ext(scores, None, factor))
    return reshape(cont(permute(found, 0, 2, 1, 3)), dim * n_head, n * n_groups)
