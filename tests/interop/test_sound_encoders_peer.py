"""Encoders of sounds: prompts, spectrograms and embeddings of the real mtmd for the same projector file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from media.test_mel import signal
from mtmd import Mtmd
from projectors import spec, text
from projectors.sounds import SOUNDS

from llamado.devices.cpu.device import CpuDevice
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import tokenize
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.sounds.encoder import FRAMES
from llamado.text.tokenizer.tokenizer import load_tokenizer

pytestmark = pytest.mark.interop

CASES = [
    (1.5, "F32"),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in ((31.0, "F32"), (0.7, "F16"), (0.7, "BF16"), (0.7, "Q8_0"))
    ),
]
"""Seconds of a sound and type of the weights. 31 seconds are two pieces for encoders that see 30 at once."""


@pytest.mark.parametrize(("seconds", "wtype"), CASES)
@pytest.mark.parametrize("tiny", SOUNDS, ids=lambda tiny: tiny.name)
def test_prompts_and_embeddings_are_those_of_mtmd(
    peer_bin: Path, tmp_path: Path, tiny: spec.TinyProjector, seconds: float, wtype: str
) -> None:
    path, model = spec.make(tiny, tmp_path / "mmproj.gguf", wtype=wtype), text.make(tiny, tmp_path / "text.gguf")
    file, encoder = spec.encoder_of(path, MediaKind.AUDIO)
    sound = Media(MediaKind.AUDIO, signal(int(seconds * encoder.rate), encoder.rate), encoder.rate)
    prompt = "hear <__media__> and"
    with Mtmd(peer_bin, path, model) as mtmd:
        theirs = mtmd.chunks(prompt, [sound.data])
    tokenizer = load_tokenizer(GGUFFile.open(model).metadata)
    ours = tokenize(prompt, [sound], tokenizer.encode, tokenizer.find, encoder.prepare, bos=tokenizer.bos, eos=None)
    device, at, spans = CpuDevice(2), 0, iter(ours.spans)
    for chunk in theirs:
        if chunk.kind == "text":
            assert ours.tokens[at : at + chunk.n_tokens] == chunk.tokens
        else:
            start, given = next(spans)
            assert (start, given.n_tokens, given.causal) == (at, chunk.n_tokens, chunk.causal)
            assert given.layout is None and chunk.n_positions == chunk.n_tokens
            if FRAMES in given.input.arrays:
                np.testing.assert_allclose(given.input.arrays[FRAMES], chunk.pixels.T, atol=2e-3)
            rows, expected = spec.encode(device, file, encoder, given.input), chunk.embeddings
            assert expected is not None and rows.shape == expected.shape and expected.std() > 0.05
            lengths = np.linalg.norm(rows, axis=1), np.linalg.norm(expected, axis=1)
            cosines = (rows * expected).sum(axis=1) / (lengths[0] * lengths[1])
            ratios = lengths[0] / lengths[1]
            closest, error = (0.999, 3e-2) if wtype == "Q8_0" else (0.9999, 5e-3)
            share = ((cosines > closest) & (np.abs(ratios - 1) < error)).mean()
            # MiMo rounds to codes: where two are as near, each has its own.
            assert share >= (0.8 if tiny.projector == "mimo_audio" else 1), (cosines.min(), share)
        at += chunk.n_tokens
    assert at == len(ours.tokens) and next(spans, None) is None
