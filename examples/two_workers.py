"""One model divided among this process and two workers, which could be on other machines.

python examples/two_workers.py [MODEL]
"""

import socket
import subprocess
import sys

from llamado import Llama

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


llamado = [sys.executable, "-m", "llamado"]
endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
workers = [subprocess.Popen([*llamado, "worker", "-t", "1", "-p", one.rpartition(":")[2]]) for one in endpoints]
try:
    for endpoint in endpoints:
        subprocess.run([*llamado, "wait", f"tcp://{endpoint}"], check=True)
    # Layers in the proportion 2 : 1 : 1. Without tensor_split they go where a token takes the least time.
    with Llama(model_path=model, n_ctx=512, rpc_servers=",".join(endpoints), tensor_split=[2, 1, 1]) as llm:
        answer = llm("1, 2, 3, 4,", max_tokens=16, temperature=0.0)
        print(answer["choices"][0]["text"])
finally:
    for worker in workers:
        worker.terminate()
        worker.wait()
