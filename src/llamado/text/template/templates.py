"""Chat templates by llama.cpp's names (`--chat-template NAME`), for models without one."""

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
_GEMMA = (  # without a system role: system messages open the next turn of the user
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
    """Return a template that writes one expression for each role, and `opening` before the answer."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ {system} }}}}"
        f"{{% elif m.role == 'user' %}}{{{{ {user} }}}}"
        f"{{% elif m.role == 'assistant' %}}{{{{ {assistant} }}}}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {opening} }}}}{{% endif %}}"
    )


def _any_role(message: str, opening: str = "''", before: str = "") -> str:
    """Return a template that writes all messages in the same form, after `before`."""
    return (
        f"{before}{{% for m in messages %}}{{{{ {message} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {opening} }}}}{{% endif %}}"
    )


def _mistral(before: str, space: str, answer: str) -> str:
    """Return one of Mistral's older templates: a system message opens the turn of the user that follows it."""
    return (
        "{% set ns = namespace(open=false) %}{% for m in messages %}"
        f"{{% if not ns.open %}}{{{{ '{before}[INST]{space}' }}}}{{% set ns.open = true %}}{{% endif %}}"
        "{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}"
        f"{{% elif m.role == 'user' %}}{{{{ m.content + '{before}[/INST]' }}}}"
        f"{{% else %}}{{{{ '{space}' + {answer} + '</s>' }}}}{{% set ns.open = false %}}{{% endif %}}{{% endfor %}}"
    )


_LLAMA2_SYS = _LLAMA2.replace("SYSTEM", "{{ '<<SYS>>\\n' + m.content + '\\n<</SYS>>\\n\\n' }}")
_BAILING = "'<role>' + ('HUMAN' if m.role == 'user' else m.role|upper) + '</role>' + m.content"
_MEANT_FOR_USER = (  # without a system role: system messages open the next turn of the user
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}"
    "{% elif m.role == 'user' %}{{ 'Human: ' + (ns.system + '\\n\\n' if ns.system else '') + m.content }}"
    "{{ '\\n\\nAssistant: </s>' }}{% set ns.system = '' %}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
_GRANITE = (
    "{% for m in messages %}{% if m.role == 'assistant_tool_call' %}"
    "{{ '<|start_of_role|>ROLE<|end_of_role|><|tool_call|>' }}"
    "{% else %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}{% endif %}"
    "{{ m.content + '<|end_of_text|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
_GIGACHAT = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}{{ m.content + '<|message_sep|>' }}"
    "{% elif m.role == 'user' %}{{ 'user<|role_sep|>' + m.content + '<|message_sep|>' }}"
    "{{ 'available functions<|role_sep|>[]<|message_sep|>' }}"
    "{% elif m.role == 'assistant' %}{{ 'assistant<|role_sep|>' + m.content + '<|message_sep|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant<|role_sep|>' }}{% endif %}"
)
_HUNYUAN_DENSE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}{{ m.content + '<｜hy_place▁holder▁no▁3｜>' }}"
    "{% elif m.role == 'assistant' %}{{ '<｜hy_Assistant｜>' + m.content + '<｜hy_place▁holder▁no▁2｜>' }}"
    "{% elif m.role == 'user' %}{{ '<｜hy_User｜>' + m.content + '<｜hy_Assistant｜>' }}{% endif %}{% endfor %}"
)
_HUNYUAN_VL = (
    "{{ '<｜hy_begin▁of▁sentence｜>' }}{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}{{ m.content + '<｜hy_place▁holder▁no▁3｜>' }}"
    "{% elif m.role == 'user' %}{{ m.content + '<｜hy_User｜>' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<｜hy_Assistant｜>' }}{% endif %}{% endfor %}"
)
_PANGU = (
    "{% set names = {'system': '系统', 'user': '用户', 'assistant': '助手', 'tool': '工具', 'function': '方法'} %}"
    "{% if messages and messages[0].role != 'system' %}{{ '[unused9]系统：[unused10]' }}{% endif %}"
    "{% for m in messages %}{% if m.role in names %}"
    "{{ '[unused9]' + names[m.role] + '：' + m.content + '[unused10]' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[unused9]助手：' }}{% endif %}"
)
_RWKV = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ 'System: ' + m.content|trim + '\\n\\n' }}"
    "{% elif m.role == 'user' %}{{ 'User: ' + m.content|trim + '\\n\\n' }}"
    "{% if loop.last %}{{ 'Assistant:' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content|trim + '\\n\\n' }}{% endif %}{% endfor %}"
)
_TITLE = "m.role[:1]|upper + m.role[1:]"


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
    "llama2-sys": _LLAMA2_SYS,
    "llama3": _LLAMA3,
    "mistral-v7": _MISTRAL_V7.replace("SPACE", " "),
    "mistral-v7-tekken": _MISTRAL_V7.replace("SPACE", ""),
    "phi3": _PHI3,
    "phi4": _PHI4,
    "vicuna": _VICUNA.replace("SYSTEM", "{{ m.content + '\\n\\n' }}"),
    "vicuna-orca": _VICUNA.replace("SYSTEM", "{{ 'SYSTEM: ' + m.content + '\\n' }}"),
    "zephyr": _PHI3.replace("<|end|>", "<|endoftext|>"),
    "bailing": _any_role(_BAILING, "'<role>ASSISTANT</role>'"),
    "bailing-think": _any_role(_BAILING, "'<role>ASSISTANT</role><think>'"),
    "bailing2": _any_role(
        _BAILING + " + '<|role_end|>'",
        "'<role>ASSISTANT</role>'",
        "{% if not messages or messages[0].role != 'system' %}"
        "{{ '<role>SYSTEM</role>detailed thinking off<|role_end|>' }}{% endif %}",
    ),
    "chatglm3": _any_role("'<|' + m.role + '|>\\n ' + m.content", "'<|assistant|>'", "{{ '[gMASK]sop' }}"),
    "chatglm4": _any_role("'<|' + m.role + '|>\\n' + m.content", "'<|assistant|>\\n'", "{{ '[gMASK]<sop>' }}"),
    "glmedge": _any_role("'<|' + m.role + '|>\\n' + m.content", "'<|assistant|>'"),
    "deepseek-ocr": _any_role("m.content"),
    "exaone3": _roles(
        "'[|system|]' + m.content|trim + '[|endofturn|]\\n'",
        "'[|user|]' + m.content|trim + '\\n'",
        "'[|assistant|]' + m.content|trim + '[|endofturn|]\\n'",
        "'[|assistant|]'",
    ),
    "exaone4": _any_role(
        "'[|' + m.role + '|]' + m.content|trim + ('' if m.role == 'user' else '[|endofturn|]') + '\\n'",
        "'[|assistant|]'",
    ),
    "exaone-moe": _any_role("'<|' + m.role + '|>\\n' + m.content|trim + '<|endofturn|>\\n'", "'<|assistant|>\\n'"),
    "gigachat": _GIGACHAT,
    "gpt-oss": _any_role(
        "'<|start|>' + m.role + '<|message|>' + m.content + ('<|return|>' if m.role == 'assistant' else '<|end|>')",
        "'<|start|>assistant'",
    ),
    "granite": _GRANITE.replace("ROLE", "assistant_tool_call"),
    "granite-4.0": _GRANITE.replace("ROLE", "assistant"),
    "granite-4.1": _GRANITE.replace("ROLE", "assistant"),
    "grok-2": _roles(
        "'System: ' + m.content|trim + '<|separator|>\\n\\n'",
        "'Human: ' + m.content|trim + '<|separator|>\\n\\n'",
        "'Assistant: ' + m.content + '<|separator|>\\n\\n'",
        "'Assistant:'",
    ),
    "hunyuan-dense": _HUNYUAN_DENSE,
    "hunyuan-moe": _any_role(
        "m.content + '<|eos|>' if m.role == 'assistant' else "
        "'<|startoftext|>' + m.content + ('<|extra_4|>' if m.role == 'system' else '<|extra_0|>')"
    ),
    "hunyuan-vl": _HUNYUAN_VL,
    "kimi-k2": _any_role(
        "{'system': '<|im_system|>system<|im_middle|>', 'user': '<|im_user|>user<|im_middle|>', "
        "'assistant': '<|im_assistant|>assistant<|im_middle|>', 'tool': '<|im_system|>tool<|im_middle|>'}"
        ".get(m.role, '') + m.content + '<|im_end|>'",
        "'<|im_assistant|>assistant<|im_middle|>'",
    ),
    "llama2-sys-bos": _LLAMA2_SYS.replace(
        "{% if not ns.open %}{{ '[INST] ' }}", "{% if not ns.open %}{{ '<s>[INST] ' }}"
    ),
    "llama2-sys-strip": _LLAMA2_SYS.replace("m.content", "m.content|trim"),
    "llama4": _any_role(
        "'<|header_start|>' + m.role + '<|header_end|>\\n\\n' + m.content|trim + '<|eot|>'",
        "'<|header_start|>assistant<|header_end|>\\n\\n'",
    ),
    "megrez": _any_role(
        "'<|role_start|>' + m.role + '<|role_end|>' + m.content + '<|turn_end|>'",
        "'<|role_start|>assistant<|role_end|>'",
    ),
    "minicpm": _any_role("'<用户>' + m.content|trim + '<AI>' if m.role == 'user' else m.content|trim"),
    "mistral-v1": _mistral(" ", " ", "m.content"),
    "mistral-v3": _mistral("", " ", "m.content|trim"),
    "mistral-v3-tekken": _mistral("", "", "m.content"),
    "monarch": _any_role("('' if loop.first else '<s>') + m.role + '\\n' + m.content + '</s>\\n'", "'<s>assistant\\n'"),
    "openchat": _any_role(
        "('' if m.role == 'system' else 'GPT4 Correct ' + " + _TITLE + " + ': ') + m.content + '<|end_of_turn|>'",
        "'GPT4 Correct Assistant:'",
    ),
    "orion": _MEANT_FOR_USER,
    "pangu-embedded": _PANGU,
    "rwkv-world": _RWKV,
    "seed_oss": _any_role(
        "'<seed:bos>' + m.role + '\\n' + (m.content|trim if m.role == 'assistant' else m.content) + '<seed:eos>'",
        "'<seed:bos>assistant\\n'",
    ),
    "smolvlm": _any_role(
        "m.content + '\\n\\n' if m.role == 'system' else "
        "('User: ' if m.role == 'user' else 'Assistant: ') + m.content + '<end_of_utterance>\\n'",
        "'Assistant:'",
        "{{ '<|im_start|>' }}",
    ),
    "solar-open": _any_role("'<|begin|>' + m.role + '<|content|>' + m.content + '<|end|>'", "'<|begin|>assistant'"),
    "yandex": _roles(
        "''", "' Пользователь: ' + m.content + '\\n\\n'", "' Ассистент: ' + m.content + '\\n\\n'", "' Ассистент:[SEP]'"
    ),
}
