"""Resumable streams: a streamed answer that survives its client, as in llama-server (b11434, `server-stream.cpp`)."""
