"""Chat templates by the names that llama.cpp knows them by (`--chat-template NAME`), for models that carry none."""

from __future__ import annotations

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA2 = (
    "{{ '[INST] ' }}{% set ns = namespace(open=true) %}{% for m in messages %}"
    "{% if not ns.open %}{{ '[INST] ' }}{% set ns.open = true %}{% endif %}"
    "{% if m.role == 'system' %}SYSTEM{% elif m.role == 'user' %}{{ m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% set ns.open = false %}{% endif %}{% endfor %}"
)
_LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content|trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_GEMMA = (  # has no system role: system messages open the next turn of the user
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content|trim %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{% if ns.system and m.role != 'assistant' %}{{ ns.system + '\\n\\n' }}{% set ns.system = '' %}{% endif %}"
    "{{ m.content|trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_MISTRAL_V7 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]SPACE' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]SPACE' + m.content + '[/INST]' }}"
    "{% else %}{{ 'SPACE' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
_VICUNA = (
    "{% for m in messages %}{% if m.role == 'system' %}SYSTEM"
    "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + '\\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + '</s>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def _roles(system: str, user: str, assistant: str, opening: str) -> str:
    """A template that writes one expression for each role, and `opening` where an answer is due."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ {system} }}}}"
        f"{{% elif m.role == 'user' %}}{{{{ {user} }}}}"
        f"{{% elif m.role == 'assistant' %}}{{{{ {assistant} }}}}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {opening} }}}}{{% endif %}}"
    )


TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "command-r": _roles(
        "'<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>'",
        "'<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>'",
        "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>'",
        "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'",
    ),
    "deepseek": _roles(
        "m.content",
        "'### Instruction:\\n' + m.content + '\\n'",
        "'### Response:\\n' + m.content + '\\n<|EOT|>\\n'",
        "'### Response:\\n'",
    ),
    "deepseek2": _roles(
        "m.content + '\\n\\n'",
        "'User: ' + m.content + '\\n\\n'",
        "'Assistant: ' + m.content + '<｜end▁of▁sentence｜>'",
        "'Assistant:'",
    ),
    "deepseek3": _roles(
        "m.content + '\\n\\n'",
        "'<｜User｜>' + m.content",
        "'<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>'",
        "'<｜Assistant｜>'",
    ),
    "falcon3": _PHI3.replace("<|end|>", ""),
    "gemma": _GEMMA,
    "llama2": _LLAMA2.replace("SYSTEM", "{{ m.content + '\\n' }}"),
    "llama2-sys": _LLAMA2.replace("SYSTEM", "{{ '<<SYS>>\\n' + m.content + '\\n<</SYS>>\\n\\n' }}"),
    "llama3": _LLAMA3,
    "mistral-v7": _MISTRAL_V7.replace("SPACE", " "),
    "mistral-v7-tekken": _MISTRAL_V7.replace("SPACE", ""),
    "phi3": _PHI3,
    "phi4": _PHI4,
    "vicuna": _VICUNA.replace("SYSTEM", "{{ m.content + '\\n\\n' }}"),
    "vicuna-orca": _VICUNA.replace("SYSTEM", "{{ 'SYSTEM: ' + m.content + '\\n' }}"),
    "zephyr": _PHI3.replace("<|end|>", "<|endoftext|>"),
}
