"""Memory of a draft model, computed from the header of its file."""

from __future__ import annotations

from dataclasses import replace

from llamado.devices.split.placement import ModelSizes
from llamado.engine.drafts.load import kind_of, named_kind, own_options, reserved
from llamado.engine.forward.fitting import memory_request, sizes_for
from llamado.engine.local_devices import Reserve
from llamado.engine.options import EngineOptions
from llamado.engine.supported import check_supported
from llamado.gguf.header import Header
from llamado.models import Model, load_model
from llamado.models.heads.next_token import load_next_token_head


class PlannedDraft:
    """A draft model for the model of `target`, with these options. `where`: the name of its file."""

    def __init__(self, target: Header, draft: Header, kind: str, options: EngineOptions) -> None:
        self.kind, self.where = kind, draft.source.rpartition("/")[2]
        self._header, self._options = draft, own_options(options)
        if kind != "draft-simple" and not self.elsewhere:
            self._options = replace(self._options, split=None)
        self._model: Model | None = None
        if kind == "draft-simple":
            check_supported(draft, workers=self.elsewhere)
            self._model = load_model(draft, options.rope)
        elif kind == "draft-mtp":
            self._model = load_next_token_head(target if options.drafts.model is None else draft, options.rope)

    @property
    def elsewhere(self) -> bool:
        """True if it runs on workers."""
        return self._options.networked

    @property
    def reserve(self) -> Reserve:
        """Least memory that it takes on this machine."""
        return Reserve(0, 0) if self._model is None else reserved(self._header, self._model, self._options)

    @property
    def weights(self) -> int:
        """Bytes of its own weights."""
        sizes = self.sizes(self._options.n_slots)
        return self._header.nbytes if sizes is None else sizes.weights

    def sizes(self, n_ctx_slot: int) -> ModelSizes | None:
        """Sizes with the target's context; None for heads whose sizes need the whole file."""
        if self._model is None:
            return None
        options = self._options
        n_ctx = n_ctx_slot * (1 if options.unified else options.n_slots)
        return sizes_for(self._header, self._model, memory_request(replace(options, n_ctx=n_ctx)), n_ctx)


def planned_draft(target: Header, options: EngineOptions) -> PlannedDraft | None:
    """Return the draft model of a target; None if there is none. Raises LlamadoError."""
    source = options.drafts.model
    kind = named_kind(options)
    if kind is None:
        return None
    header = target if source is None else source.header()
    header = replace(header, mapped=header.mapped and options.mmap)
    return PlannedDraft(target, header, kind or kind_of(header, target), options)
