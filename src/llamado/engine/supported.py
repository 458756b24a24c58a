"""Whether a model runs here, from the header of its file: the one place that says what is supported."""

from __future__ import annotations

from llamado.devices.device import WEIGHT_TYPES
from llamado.gguf.header import Header
from llamado.models import UnsupportedModel, find_architecture


def check_supported(header: Header, *, workers: bool = False) -> None:
    """Raises UnsupportedModel for an architecture or a type of weights that does not run here, saying which do.

    With `workers`, weights may be of types that they alone have kernels for.
    """
    find_architecture(header.source, header.metadata)
    for name, type in header.types.items() if not workers else ():
        if type not in WEIGHT_TYPES:
            raise UnsupportedModel(
                f"{header.source}: tensor '{name}' is of type {type.name}, which has no kernel here; these types have: "
                f"{', '.join(sorted(type.name for type in WEIGHT_TYPES))}"
            )
