"""Chat templates as the public model families have them, with the parts that matter here."""

from __future__ import annotations

QWEN3 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\n" }}
    {{- '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set ns.last_query_index = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') }}
            {{- '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\n\nToday Date: " + date_string + "\n\n" + system_message + "<|im_end|>" }}
{%- if tools is not none %}
    {{- "<|im_start|>user\n\nGiven the following functions, please respond with a JSON for a function call.\n\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. ' }}
    {{- "Do not use variables.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- "<|im_end|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>assistant\n\n{"name": "' + message.tool_calls[0].function.name + '", ' }}
        {{- '"parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}
        {{- "}<|im_end|>" }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n\n' }}
{%- endif %}"""

MISTRAL_LIST = r"""{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- {"name": tool_call.function.name, "arguments": tool_call.function.arguments} | tojson }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_NAMED = r"""{{- bos_token }}
{%- if tools %}
    {{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {{- "[TOOL_CALLS]" + tool_call.function.name + "[ARGS]" + (tool_call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "assistant" %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

DEEPSEEK_R1 = r"""{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<｜Assistant｜>' + content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜><think>\n' }}
{%- endif %}"""

TEMPLATES = {
    "Qwen3": QWEN3,
    "Llama 3": LLAMA3,
    "Mistral, list of calls": MISTRAL_LIST,
    "Mistral, calls by name": MISTRAL_NAMED,
    "DeepSeek R1": DEEPSEEK_R1,
}
