"""A conversation, whose answers are shown while they come.

python examples/chat.py [MODEL]
"""

import sys

from llamado import Llama

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
questions = ["What is the capital of France?", "And how many people live there?"]

with Llama(model_path=model, n_ctx=2048) as llm:
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    for question in questions:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in llm.create_chat_completion(messages, stream=True, max_tokens=64):
            piece = chunk["choices"][0]["delta"].get("content") or ""
            print(piece, end="", flush=True)
            answer += piece
        print()
        # What was read for the last question is not read again.
        messages.append({"role": "assistant", "content": answer})
