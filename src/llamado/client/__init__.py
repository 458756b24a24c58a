"""Clients that wait until a server is ready; for llamado and llama-server.

>>> from llamado.client import LlamaServerClient
>>> with LlamaServerClient("http://127.0.0.1:8080") as server:
...     if server.wait_until_ready():
...         print(server.chat("Hello!"))
"""

from llamado.client.asynchronous import AsyncLlamaServerClient
from llamado.client.health import Phase, State
from llamado.client.requests import RequestFailed, ServerUnavailable
from llamado.client.seeds import seed_of
from llamado.client.synchronous import LlamaServerClient

__all__ = [
    "AsyncLlamaServerClient",
    "LlamaServerClient",
    "Phase",
    "RequestFailed",
    "ServerUnavailable",
    "State",
    "seed_of",
]
