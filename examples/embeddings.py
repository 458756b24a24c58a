"""Find the text nearest to a question by comparing embeddings.

    python examples/embeddings.py [MODEL]

A model made for embeddings finds more; any other will do to try it, with the mean of its tokens' vectors.
"""

import sys

from llamado import Llama

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
texts = ["Cats purr when they are content.", "The stock market fell on Monday.", "A kitten drinks milk."]
MEAN = 1  # of llama.cpp's ways to pool

with Llama(model_path=model, n_ctx=0, embedding=True, pooling_type=MEAN) as llm:
    question, *vectors = llm.embed(["Tell me about cats", *texts], normalize=True)
    nearness = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
    for share, text in sorted(zip(nearness, texts, strict=True), reverse=True):
        print(f"{share:.3f}  {text}")
