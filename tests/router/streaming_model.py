"""A llamado server with a fake engine: `python streaming_model.py PORT FILE`. It has three tokens until FILE exists."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "server"))

from resumable import GatedEngine
from wire import serving

port, file = int(sys.argv[1]), Path(sys.argv[2])
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
engine = GatedEngine(allowed=3)
with serving(engine, port=port):
    while not ended.wait(0.01):
        if file.exists():
            engine.allow()
            file.unlink()
    engine.allow()
