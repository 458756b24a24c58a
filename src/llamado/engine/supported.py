"""Whether a model runs here, from the header of its file: the one place that says what is supported."""

from __future__ import annotations

from llamado.devices.registry import backend
from llamado.gguf.header import Header
from llamado.models import UnsupportedModel, find_architecture


def check_supported(header: Header, *, workers: bool = False) -> None:
    """Raises UnsupportedModel for an architecture or a type of weights that does not run here, saying which do.

    With `workers`, weights may be of types that they alone have kernels for.
    """
    find_architecture(header.source, header.metadata)
    types = None if workers else backend("cpu").weight_types()
    if types is None:
        return
    for name, type in header.types.items():
        if type not in types:
            raise UnsupportedModel(
                f"{header.source}: tensor '{name}' is of type {type.name}, which has no kernel here; these types have: "
                f"{', '.join(sorted(type.name for type in types))}"
            )
