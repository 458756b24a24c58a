"""A model calls a function of this program and answers with what it gave.

python examples/tools.py [MODEL]
"""

import json
import sys

from llamado import Llama

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
tools = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city, in degrees Celsius",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def temperature(city: str) -> str:
    """Return a fixed temperature; a real tool would ask a weather service."""
    return f"{len(city) + 10} degrees Celsius in {city}"


with Llama(model_path=model, n_ctx=4096, seed=1) as llm:
    messages = [{"role": "user", "content": "How warm is it in Rome?"}]
    choice = {"type": "function", "function": {"name": "temperature"}}
    answer = llm.create_chat_completion(messages, tools=tools, tool_choice=choice, max_tokens=512)
    message = answer["choices"][0]["message"]
    messages.append(message)
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        result = temperature(**arguments)
        print(f"{call['function']['name']}({arguments}): {result}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    answer = llm.create_chat_completion(messages, tools=tools, tool_choice="none", max_tokens=64)
    print(answer["choices"][0]["message"]["content"])
