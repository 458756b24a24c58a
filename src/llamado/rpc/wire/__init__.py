"""The wire codec of ggml RPC, protocols 7.0 and 8.0: bytes to messages and back, without a socket.

A request is `command u8 | size u64 | payload`, a response `size u64 | payload`; everything is little-endian and packed
(ggml-rpc.cpp of llama.cpp). `messages` has the values, `table` a row for each request. Writers return bytes to send;
readers are fed received bytes, cut anywhere, and return whole messages.

Tensor data never passes through a message. It follows one as *bulk*, which the caller moves between its transport and
the memory it belongs to: `take` what the reader holds already, `bypass` what was received around it.

Use it as `from llamado.rpc import wire`; every public name of its modules is one of `wire`.
"""

from llamado.rpc.wire.graph import *  # noqa: F403
from llamado.rpc.wire.messages import *  # noqa: F403
from llamado.rpc.wire.protocols import *  # noqa: F403
from llamado.rpc.wire.requests import *  # noqa: F403
from llamado.rpc.wire.responses import *  # noqa: F403
from llamado.rpc.wire.table import *  # noqa: F403
