"""Answers that are instances of a JSON schema.

python examples/json_schema.py [MODEL]
"""

import json
import sys

from llamado import Llama

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
    },
    "required": ["city", "country", "continent"],
    "additionalProperties": False,
}

with Llama(model_path=model, n_ctx=1024, seed=1) as llm:
    answer = llm.create_chat_completion(
        [{"role": "user", "content": "Where is the Eiffel tower?"}],
        response_format={"type": "json_object", "schema": schema},
        max_tokens=256,
    )
    print(json.dumps(json.loads(answer["choices"][0]["message"]["content"]), indent=2))
