"""Write tests/projectors/golden anew with the real mtmd, or only the files of the small projectors named.

PYTHONPATH=tests:tests/interop python tests/interop/write_golden_rows.py [NAME …]
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from conftest import peer_programs
from mtmd import Mtmd
from projectors import every, golden_rows, spec, text
from projectors.golden_rows import Chunk
from projectors.spec import TinyProjector


def theirs(programs: Path, tiny: TinyProjector, folder: Path) -> list[Chunk]:
    """Return the chunks that mtmd computes."""
    projector, model = spec.make(tiny, folder / "mmproj.gguf"), text.make(tiny, folder / "text.gguf")
    found: list[Chunk] = []
    with Mtmd(programs, projector, model) as mtmd:
        for chunk in mtmd.chunks("<__media__>", [golden_rows.picture(tiny.name).data], add_special=False):
            if chunk.embeddings is None:
                found.append({"tokens": chunk.tokens})
            else:
                found.append(golden_rows.image_chunk(chunk.embeddings))
    return found


def main() -> None:
    """Write the files one after the other."""
    programs = peer_programs()
    if programs is None:
        sys.exit("the real llama.cpp is not installed: run benchmarks/peer.sh")
    projectors = every()
    names = sys.argv[1:] or [*projectors]
    if unknown := set(names) - projectors.keys():
        sys.exit(f"no small projectors: {', '.join(sorted(unknown))}")
    for name in names:
        print(name, flush=True)
        with TemporaryDirectory() as folder:
            golden_rows.write(name, theirs(programs, projectors[name], Path(folder)))


if __name__ == "__main__":
    main()
