"""Chat templates for the tiny model, in the manner of three families that engines serve: their marks, and what they do
to history.

``chatml`` writes messages as they are. ``thinking`` is ChatML that takes the reasoning out of all answers before the
last user message, as Qwen3 does. ``llama`` begins with a mark of its own, heads each message and takes the spaces from
its ends.
"""

from __future__ import annotations

from dataclasses import dataclass

CALL_MARKS = ("<tool_call>", "</tool_call>")
_CALL = (
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if '
    "call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>"
)


@dataclass(frozen=True, slots=True)
class Family:
    """`special` are the tokens that text cannot spell; `marks` are tokens that it can; `eos` ends an answer."""

    special: tuple[str, ...]
    eos: str
    template: str
    marks: tuple[str, ...] = CALL_MARKS


CHATML = Family(
    ("<pad>", "<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    "{%- if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content }}{% endif %}"
    f"{{%- for call in m.tool_calls or [] %}}{_CALL}{{% endfor %}}<|im_end|>\n{{% endfor -%}}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}",
)
THINKING = Family(
    CHATML.special,
    "<|im_end|>",
    "{%- if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- set last = namespace(user=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.user %}"
    "<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}"
    "{% if m.content %}{{ m.content.lstrip('\n') if m.role == 'assistant' else m.content }}{% endif %}"
    f"{{%- for call in m.tool_calls or [] %}}\n{_CALL}{{% endfor %}}<|im_end|>\n{{% endfor -%}}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}",
    ("<think>", "</think>", *CALL_MARKS),
)
LLAMA = Family(
    ("<pad>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
    "<|begin_of_text|>"
    "{%- if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>{% endif -%}"
    "{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.content %}{{ m.content | trim }}{% endif %}"
    f"{{%- for call in m.tool_calls or [] %}}{_CALL}{{% endfor %}}<|eot_id|>{{% endfor -%}}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif -%}",
)
FAMILIES = {"chatml": CHATML, "thinking": THINKING, "llama": LLAMA}
