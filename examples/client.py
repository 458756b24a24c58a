"""Asks a server, ours or the real llama-server, once it is ready.

llamado serve -m smollm2 &
python examples/client.py [URL]
"""

import sys

from llamado.client import LlamaServerClient

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"

with LlamaServerClient(url, startup_timeout=120) as server:
    if not server.wait_until_ready():
        raise SystemExit(server.state.message)
    print(f"model: {server.props()['model_path']}")
    for piece in server.chat("Say hello to the reader.", stream=True, max_tokens=32):
        print(piece, end="", flush=True)
    print()
