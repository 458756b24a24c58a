"""A text that goes on: whole, and piece by piece.

python examples/completion.py [MODEL]
"""

import sys

from llamado import Llama

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with Llama(model_path=model, n_ctx=1024, seed=1) as llm:
    answer = llm("Q: Name the planets in the solar system? A: ", max_tokens=32, stop=["Q:", "\n"])
    print(answer["choices"][0]["text"])
    for chunk in llm("Once upon a time", max_tokens=32, stream=True):
        print(chunk["choices"][0]["text"], end="", flush=True)
    print()
