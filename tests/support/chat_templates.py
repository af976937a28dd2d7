"""Chat templates with every feature of transformers, and in the style of the four families of bases."""

from typing import Any

from slipstream.shared.language.chat_template import Conversation, row_conversation

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}assistant: {% endif %}"

#: Each shows what a user says.
FEATURES = {
    "special tokens": "{{ bos_token }}{{ mask_token }}{{ sep_token }}" + TURNS + ASKED,
    "break": "{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}" + TURNS + ASKED,
    "continue": "{% for i in range(9) %}{% if i % 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}" + TURNS + ASKED,
    "generation": (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}" + ASKED
    ),
    "tojson": "{% for m in messages %}{{ m|tojson }}{{ m|tojson(indent=2) }};{% endfor %}",
    "tojson with options": (
        "{% for m in messages %}{{ m|tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }};{% endfor %}"
    ),
    "raise_exception": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
        + TURNS
    ),
    "strftime_now": "{{ strftime_now('%d %B %Y, %H:%M') }}" + TURNS + ASKED,
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}{% endfor %}{{ ns.n }}" + TURNS,
    "no tools and documents": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}" + TURNS + ASKED,
    "undefined": "{{ custom_tools is defined }}{{ messages[0].name }}{{ enable_thinking|default(true) }}" + TURNS,
    "white space": (
        "\n  {%- for m in messages -%}\n  {{- m.content -}}\n  {% endfor %}\n  {% if false %}\n{% endif %}\n"
    ),
    "blocks in lines": "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "macros": (
        "{% macro turn(m, mark='#') %}{{ mark }}{{ m.role }}{{ caller() if caller else m.content }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% call turn(m, mark='!') %}{{ m.content }}{% endcall %}{% endfor %}"
    ),
    "slices": "{{ messages[0].content[1:] }}{{ messages[:1]|length }}" + TURNS,
    "methods of texts": (
        "{% for m in messages %}{{ m.content.strip().split(' ')[-1].upper() }}{{ m.content }}{% endfor %}"
    ),
    "filters": (
        "{{ messages|map(attribute='role')|first|capitalize }}{% for m in messages %}{{ m.content|trim }};{% endfor %}"
    ),
    "selectattr": "{{ (messages|selectattr('role', 'equalto', 'user')|list)|length > 0 }}" + TURNS,
    "loop": "{% for m in messages %}{{ loop.index0 }}{{ '+' if loop.first }}{{ m.content }}{% endfor %}",
    "nested loops": (
        "{% for m in messages %}{% for c in m.content %}{{ c }}{{ loop.cycle('', '.') }}{% endfor %};{{ m.content }}"
        "{% endfor %}"
    ),
    "tests": "{% for m in messages %}{{ m.content is string }}{{ m is mapping }}{{ m.content }}{% endfor %}",
    "items": "{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }},{% endfor %};{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.content }};{% endfor %}",
    "dict": "{{ dict(a=1).a }}{% set d = dict(b=messages[0].content) %}{{ d.b }}" + TURNS,
    "set blocks": "{% set head %}[{{ bos_token }}]{% endset %}{{ head }}" + TURNS + ASKED,
    "comments": "{#- nothing #}{% raw %}{{ not this }}{% endraw %}" + TURNS + ASKED,
    "format": "{{ '%s-%05d' % ('a', 42) }}{{ '{:>4}'.format(7) }}{{ 10 // 3 }}{{ 2 ** 5 }}" + TURNS,
}

#: With the tokens and the constructs of the templates that come with these models.
FAMILIES = {
    "llama": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set lead = "" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set lead = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- raise_exception("there are tools") }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + lead + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or 'tool_calls' in message %}
        {{- message.content | tojson }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set lead = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in turns %}
    {%- if not (message.tool_calls is defined and message.tool_calls is not none) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if lead is defined and message == asked[0] %}
            {{- "[INST]" + lead + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "qwen2": """{%- if tools %}
    {{- raise_exception("there are tools") }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content ~ '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=messages | length - 1) %}
{%- for message in messages %}
    {%- set response = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not response %}
        {%- set ns.asked = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set answer, thought = message.content, '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in answer %}
            {%- set thought = answer.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked and (loop.last or thought) %}
            {{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ answer.lstrip('\\n') }}
        {%- else %}
            {{- answer }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set called = call.function or call %}
            {{- '\\n' if answer or not loop.first }}
            {{- '<tool_call>\\n{"name": "' ~ called.name ~ '", "arguments": ' }}
            {{- called.arguments if called.arguments is string else called.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # As the models distilled from DeepSeek-R1: no reasoning in past answers, which the prompt asks for.
    "r1": """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|User|>' ~ message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' ~ message.content.split('</think>')[-1] ~ eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|Assistant|><think>\\n' }}
{%- endif %}
""",
}
#: Marks answers, as trl's templates for training do.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def row(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Conversation:
    """Return the conversation of a row."""
    (found,) = row_conversation({"messages": messages, "tools": tools}).rows(each=False)
    return found
