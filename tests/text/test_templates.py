"""Chat templates as the families write them, in our words: roles, system prompts, tools, the assistant's turn, refusals.

The structure of each is its publisher's (tokenizer_config.json on the hub); the sentences are ours.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.api.ollama.conversation import chat_conversation
from manyhands.errors import BadRequest
from manyhands.text import dialects
from manyhands.text.dialects import Dialect, find_dialect
from manyhands.text.history import write_calls
from manyhands.text.prompt import Tokenizer, render_chat, render_text
from manyhands.text.readers import answer_reader
from manyhands.text.reasoning import find_level, find_thinking
from manyhands.text.render_budget import RenderBudget
from manyhands.text.tokenizer import load_tokenizer
from manyhands.text.tools import CallArguments, CallStart, ToolReader
from tests.text.test_detokenize import byte_level

_CHATML_TAIL = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"

LLAMA31 = (
    "{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}"
    "{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}"
    "{%- if tools is not none and messages %}{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer by a call as JSON.\n\n' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if 'tool_calls' in m %}{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- elif m.role in ('tool', 'ipython') %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
QWEN25 = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}"
    "{{- '\n# Tools\n<tools>' }}{%- for t in tools %}{{- '\n' }}{{- t | tojson }}{%- endfor %}"
    "{{- '\n</tools>\nCall within <tool_call></tool_call>.<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
    "{%- for c in m.tool_calls %}{%- if c.function is defined %}{%- set c = c.function %}{%- endif %}"
    "{{- '\n<tool_call>\n{\"name\": \"' + c.name + '\", \"arguments\": ' }}{{- c.arguments | tojson }}{{- '}\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
) + _CHATML_TAIL
QWEN3_CHAT = QWEN25.removesuffix("{%- endif %}") + (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
QWEN3_CODER = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- '<|im_start|>system\n' + (system or 'You are helpful.') }}"
    "{%- if tools is iterable and tools | length > 0 %}{{- '\n<tools>' }}"
    "{%- for t in tools %}{%- set t = t.function %}{{- '\n<function>\n<name>' ~ t.name ~ '</name>' }}"
    "{%- for name, fields in t.parameters.properties | items %}{{- '\n<parameter>' ~ name ~ fields.type ~ '</parameter>' }}"
    "{%- endfor %}{{- '\n</function>' }}{%- endfor %}{{- '\n</tools>\n<tool_call>\n<function=name>' }}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- for m in loop_messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is iterable %}{{- '<|im_start|>assistant' }}"
    "{%- for c in m.tool_calls %}{%- set c = c.function %}{{- '\n<tool_call>\n<function=' + c.name + '>\n' }}"
    "{%- for k, v in c.arguments | items %}{{- '<parameter=' + k + '>\n' }}"
    "{{- v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}{{- '\n</parameter>\n' }}"
    "{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>\n<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
) + _CHATML_TAIL
GLM45 = (
    "[gMASK]<sop>{%- if tools %}<|system|>\n{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}\n{% endfor %}"
    "<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>{%- endif %}"
    "{% for m in messages %}"
    "{%- if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{%- elif m.role == 'assistant' %}<|assistant|>\n<think></think>{{ '\n' + m.content if m.content else '' }}"
    "{% for c in m.tool_calls or [] %}{% set c = c.function %}\n<tool_call>{{ c.name }}\n"
    "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{%- elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- elif m.role == 'system' %}<|system|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{{- '\n<think></think>' if enable_thinking is false else '' }}{%- endif %}"
)
GLM4_0414 = (
    "[gMASK]<sop>{%- if tools -%}<|system|>\n{% for t in tools %}{%- set f = t.function if t.get('function') else t %}"
    "## {{ f.name }}\n{{ f | tojson(indent=4, ensure_ascii=False) }}\n{%- endfor %}{%- endif -%}"
    "{%- for m in messages %}{%- if m.role == 'system' %}<|system|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- for m in messages if m.role != 'system' %}{%- set meta = m.get('metadata', '') %}"
    "{%- if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{%- elif m.role == 'assistant' and not meta %}<|assistant|>\n{{ m.content }}"
    "{%- elif m.role == 'assistant' and meta %}<|assistant|>{{ meta }}\n{{ m.content }}"
    "{%- elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SEED_OSS = (
    "{%- set bos_token = '<seed:bos>' -%}{%- set eos_token = '<seed:eos>' -%}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{%- if not tools is defined or tools is none %}{%- set tools = [] %}{%- endif %}"
    "{%- if system is defined or tools %}{{- bos_token + 'system\n' + (system or 'You may call functions.') }}"
    "{%- for t in tools if t.type == 'function' %}{{- '\nFunction:\ndef ' + t.function.name + '(' }}"
    "{%- for name, spec in t.function.parameters.properties.items() %}{{- name }}: {{ spec.type }}, {%- endfor %})"
    "{%- endfor %}{%- if tools %}{{- '\n<seed:tool_call>\n<function=name>\n<parameter=key>value</parameter>\n</function>\n"
    "</seed:tool_call>\n' }}{%- endif %}{{- eos_token }}{%- endif %}"
    "{%- for m in loop_messages %}{%- if m.role == 'assistant' %}{{- bos_token + m.role }}"
    "{%- if m.reasoning_content %}{{- '\n<seed:think>' + m.reasoning_content + '</seed:think>' }}{%- endif %}"
    "{%- if m.content %}{{- '\n' + (m.content | trim) }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- set c = c.function %}{{- '\n<seed:tool_call>\n<function=' + c.name + '>\n' }}"
    "{%- for k, v in c.arguments | items %}{{- '<parameter=' + k + '>' }}"
    "{{- (v if v is string else v | string) + '</parameter>\n' }}{%- endfor %}{{- '</function>\n</seed:tool_call>' }}"
    "{%- endfor %}{{- eos_token }}"
    "{%- else %}{{- bos_token + m.role + '\n' + m.content + eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- bos_token + 'assistant\n' }}{%- endif %}"
)
MINIMAX_M2 = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- ']~!b[]~b]system\n' ~ (system or 'You are helpful.') }}"
    "{%- if tools %}{{- '\n<tools>\n' }}{%- for t in tools %}<tool>{{ t.function | tojson(ensure_ascii=False) }}</tool>\n"
    '{%- endfor %}{{- \'</tools>\n<minimax:tool_call>\n<invoke name="name">\n<parameter name="key">value</parameter>\n</invoke>'
    "\n</minimax:tool_call>' }}{%- endif %}{{- '[e~[\n' }}"
    "{%- set last = namespace(name=none) %}{%- for m in loop_messages %}"
    "{%- if m.role == 'assistant' %}{{- ']~b]ai\n' }}"
    "{%- set said = m.content %}{%- if '</think>' in said %}{%- set said = said.split('</think>')[-1] %}{%- endif %}"
    "{{- said }}{%- set last.name = none %}"
    "{%- if m.tool_calls %}{{- '\n<minimax:tool_call>\n' }}"
    "{%- for c in m.tool_calls %}{%- set c = c.function %}{{- '<invoke name=\"' + c.name + '\">\n' }}"
    "{%- for k, v in c.arguments.items() %}{{- '<parameter name=\"' + k + '\">' }}"
    "{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</parameter>\n' }}{%- endfor %}{{- '</invoke>\n' }}"
    "{%- set last.name = c.name %}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}{{- '[e~[\n' }}"
    "{%- elif m.role == 'tool' %}{%- if last.name is none %}{{- raise_exception('no call before') }}{%- endif %}"
    "{{- ']~b]tool\n<response>' + m.content + '</response>[e~[\n' }}"
    "{%- else %}{{- ']~b]user\n' + m.content + '[e~[\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}"
)
MUSE_GLIMMER = (
    "{%- macro reasoning() %}Reasoning strength: {{ reasoning_strength or 'high' }}.{% endmacro -%}"
    "{%- macro atem(c) %}{%- if c.function.arguments is not mapping %}{{- raise_exception('a mapping is needed') }}{% endif %}"
    "{{- '<atem:function_calls>\n<atem:invoke name=\"' + c.function.name + '\">\n' }}"
    "{%- for k, v in c.function.arguments.items() %}{{- '<atem:parameter name=\"' + k + '\">' }}"
    "{{- v if v is string else v | tojson }}{{- '</atem:parameter>\n' }}{%- endfor %}"
    "{{- '</atem:invoke>\n</atem:function_calls>' }}{%- endmacro -%}"
    "{%- macro suffix() %}{%- if tools %}{{- '\n\nCall <atem:function_calls>\n<atem:invoke name=\"$F\">\n' }}"
    "{%- for t in tools %}{{- t.function | tojson + '\n' }}{%- endfor %}{%- endif %}"
    "{{- '\n\n# Valid recipients: \"self\"' }}{%- for t in tools or [] %}{{- ', \"' + t.function.name + '.*\"' }}{%- endfor %}"
    "{{- ', \"user\".' }}{%- endmacro -%}"
    "{{- bos_token }}{%- if messages[0].role != 'system' %}"
    "{{- '<|start|>system<|message|>You are a helpful AI assistant.\n\n' + reasoning() + suffix() + '<|eot|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'system' %}"
    "{{- '<|start|>system<|message|>' + m.content + '\n\n' + reasoning() + suffix() + '<|eot|>' }}"
    "{%- elif m.role == 'tool' %}{%- set ns = namespace(name=m.name or '') %}"
    "{%- for o in messages %}{%- for c in o.tool_calls or [] %}{%- if c.id == m.tool_call_id %}"
    "{%- set ns.name = c.function.name %}{%- endif %}{%- endfor %}{%- endfor %}"
    "{{- '<|start|>tool ' + ns.name + '<|message|>' + m.content + '<|eot|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}{{- '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}{%- endif %}"
    "{%- if m.content %}{{- '<|start|>assistant to=user<|message|>' + m.content }}"
    "{{- '<|eom|>' if m.tool_calls else '<|eot|>' }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{{- '<|start|>assistant to=' + c.function.name + '<|message|>' + atem(c) }}"
    "{{- '<|eot|>' if loop.last else '<|eom|>' }}{%- endfor %}"
    "{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
INKLING_CHAT = (
    "{%- macro put(role, kind, text, name='') %}{{- '<|message_' + role + '|>' + name + '<|content_' + kind + '|>' + text }}"
    "{{- '<|end_message|>' }}{%- endmacro %}"
    "{%- if tools %}{{- put('system', 'xml', tools | tojson, 'tool_declare') }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}{%- set ns = namespace(name='') %}"
    "{%- for o in messages %}{%- for c in o.tool_calls or [] %}{%- if c.id == m.tool_call_id %}"
    "{%- set ns.name = c.function.name %}{%- endif %}{%- endfor %}{%- endfor %}{{- put('tool', 'text', m.content, ns.name) }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}{{- put('model', 'thinking', m.reasoning_content) }}{%- endif %}"
    "{%- if m.content %}{{- put('model', 'text', m.content) }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}"
    "{%- set said = '{\"name\":' + c.function.name | tojson + ',\"args\":' + c.function.arguments | tojson + '}' %}"
    "{{- put('model', 'invoke_tool_json', said, c.function.name) }}{#- <|content_invoke_tool_json|> #}{%- endfor %}"
    "{{- '<|content_model_end_sampling|>' }}"
    "{%- else %}{{- put(m.role, 'text', m.content) }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|message_model|>' }}{%- endif %}{#- <|content_thinking|> #}"
)
KIMI_K3 = (
    "{%- if thinking is undefined %}{%- set thinking = true %}{%- endif %}"
    "{%- macro open(tag, said='') %}{{- '<|open|>' + tag + said + '<|sep|>' }}{%- endmacro %}"
    "{%- macro close(tag) %}{{- '<|close|>' + tag + '<|sep|>' }}{%- endmacro %}"
    "{%- macro end() %}{{- close('message') + '<|end_of_msg|>' }}{%- endmacro %}"
    "{%- if tools %}{{- open('message', ' role=\"system\" type=\"tool-declare\"') + tools | tojson + end() }}{%- endif %}"
    "{%- if thinking %}{{- open('message', ' role=\"system\" type=\"thinking-effort\"') }}"
    "{{- 'thinking_effort=' + (thinking_effort or 'max') + end() }}{%- endif %}"
    "{%- for m in messages %}"
    "{{- open('message', ' role=\"' + m.role + '\"') }}{%- if m.role != 'assistant' %}{{- m.content }}{%- else %}"
    "{%- if thinking %}{{- open('think') + (m.reasoning_content or '') + close('think') }}{%- endif %}"
    "{{- open('response') + m.content + close('response') }}"
    "{%- if m.tool_calls %}{{- open('tools') }}{%- for c in m.tool_calls %}"
    "{{- open('call', ' tool=\"' + c.function.name + '\" index=\"' + loop.index | string + '\"') }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- open('argument', ' key=\"' + k + '\" type=\"' + ('string' if v is string else 'array') + '\"') }}"
    "{{- v if v is string else v | tojson }}{{- close('argument') }}{%- endfor %}{{- close('call') }}{%- endfor %}"
    "{{- close('tools') }}{%- endif %}{%- endif %}{{- end() }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- open('message', ' role=\"assistant\"') + open('think' if thinking else 'response') }}"
    "{%- endif %}"
)
_ALTERNATE = (
    "{%- set ns = namespace(count=0) %}{%- for m in loop_messages %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m.role == 'user') != (ns.count % 2 == 0) %}{{- raise_exception('roles must alternate user and assistant') }}"
    "{%- endif %}{%- set ns.count = ns.count + 1 %}{%- endif %}{%- endfor %}"
)
_SYSTEM_FIRST = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}"
)
MISTRAL_V3 = (
    _SYSTEM_FIRST + _ALTERNATE + "{{- bos_token }}{%- for m in loop_messages %}"
    "{%- if m.role == 'user' %}{%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}"
    "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}"
    "{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{%- set said = c.function | tojson %}{{- said[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('only user, assistant and tool') }}{%- endif %}{%- endfor %}"
)
MISTRAL_V13 = (
    _SYSTEM_FIRST
    + _ALTERNATE
    + "{{- bos_token }}{%- if system is defined %}{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}"
    "{%- endif %}{%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- for m in loop_messages %}"
    "{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{- c.function.arguments | tojson }}{%- endfor %}{{- eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('only user, assistant and tool') }}{%- endif %}{%- endfor %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA4_IT = (
    "{%- macro said(v) -%}{%- if v is string %}{{- '<|\"|>' + v + '<|\"|>' }}"
    "{%- elif v is boolean %}{{- 'true' if v else 'false' }}"
    "{%- elif v is mapping %}{{- '{' }}{%- for k, w in v | dictsort %}{{- k ~ ':' }}{{- said(w) }}"
    "{{- '' if loop.last else ',' }}{%- endfor %}{{- '}' }}"
    "{%- elif v is sequence %}{{- '[' }}{%- for w in v %}{{- said(w) }}{{- '' if loop.last else ',' }}{%- endfor %}{{- ']' }}"
    "{%- else %}{{- v }}{%- endif %}{%- endmacro -%}"
    "{%- macro answer(text) -%}{%- set ns = namespace(text='') %}{%- for part in text.split('<channel|>') %}"
    "{%- set ns.text = ns.text + part.split('<|channel>')[0] %}{%- endfor %}{{- ns.text | trim }}{%- endmacro -%}"
    "{{ bos_token }}{%- set ns = namespace(last='') %}"
    "{%- if enable_thinking or tools or messages[0].role == 'system' %}{{- '<|turn>system\n' }}"
    "{%- if enable_thinking %}{{- '<|think|>\n' }}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- endif %}"
    "{%- for t in tools or [] %}{{- '<|tool>declaration:' + t.function.name }}{{- said(t.function.parameters) + '<tool|>' }}"
    "{%- endfor %}{{- '<turn|>\n' }}{%- endif %}"
    "{%- for m in messages if m.role not in ('system', 'tool') %}{%- set ns.last = '' %}"
    "{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{%- for c in m.tool_calls or [] %}{{- '<|tool_call>call:' + c.function.name + '{' }}"
    "{%- for k, v in c.function.arguments | dictsort %}{{- k ~ ':' }}{{- said(v) }}{{- '' if loop.last else ',' }}{%- endfor %}"
    "{{- '}<tool_call|>' }}{%- set ns.last = 'call' %}{%- endfor %}"
    "{%- if m.tool_calls %}{%- for r in messages if r.role == 'tool' %}"
    "{{- '<|tool_response>response:' + m.tool_calls[0].function.name + '{value:' }}{{- said(r.content) + '}<tool_response|>' }}"
    "{%- set ns.last = 'response' %}{%- endfor %}{%- endif %}"
    "{{- answer(m.content) if m.role == 'assistant' else m.content | trim }}"
    "{%- if ns.last == 'call' %}{{- '<|tool_response>' }}{%- elif ns.last == '' or m.content %}{{- '<turn|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt and ns.last == '' %}{{- '<|turn>model\n' }}"
    "{%- if not enable_thinking | default(false) %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}{%- endif %}"
)
OLMO3_INSTRUCT = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are Olmo.' }}"
    "{%- if not tools %}{{- ' <functions></functions><|im_end|>\n' }}{%- else %}{{- ' Call within <function_calls>.' }}"
    "{{- '<functions>' }}{{- tools | tojson }}{{- '</functions><|im_end|>\n' }}{%- endif %}{%- endif %}"
    "{%- for m in messages %}{%- if m['role'] == 'system' %}{{- '<|im_start|>system\n' + m['content'] }}"
    "{%- if tools is not none %}{{- '<functions>' }}{{- tools | tojson }}{{- '</functions>' }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- elif m['role'] == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if m.get('content', none) is not none %}{{- m['content'] }}{%- endif %}"
    "{%- if m.get('tool_calls', none) is not none %}{{- '<function_calls>' }}{%- for c in m['tool_calls'] %}"
    "{%- set ns = namespace(list=[]) %}{%- for k, v in c['function']['arguments'].items() %}"
    "{%- set ns.list = ns.list + [k ~ '=' ~ (v | tojson)] %}{%- endfor %}"
    "{{- c['function']['name'] + '(' + (ns.list | join(', ')) + ')' }}{{- '' if loop.last else '\n' }}{%- endfor %}"
    "{{- '</function_calls>' }}{%- endif %}{{- '<|im_end|>\n' if not loop.last else eos_token }}"
    "{%- else %}{{- '<|im_start|>' + ('environment' if m['role'] == 'tool' else m['role']) + '\n' + m['content'] }}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
PHI3 = (
    "{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') and m['content'] %}"
    "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_DEEPSEEK_SYSTEM = (
    "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system='') %}"
    "{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{%- endif %}"
    "{%- endfor %}{{ bos_token }}{{ ns.system }}"
)
DEEPSEEK_V3 = _DEEPSEEK_SYSTEM + (
    "{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<｜User｜>' + m['content'] }}"
    "{%- endif %}{%- if m['role'] == 'assistant' and m['content'] is none %}{%- set ns.is_tool = false -%}"
    "{%- for c in m['tool_calls'] %}{{ ('\n' if ns.is_first else '<｜Assistant｜><｜tool▁calls▁begin｜>')"
    " + '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' + c['function']['name'] + '\n```json\n'"
    " + c['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{%- set ns.is_first = true -%}{%- endfor %}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is not none %}"
    "{{ ('<｜tool▁outputs▁end｜>' if ns.is_tool else '<｜Assistant｜>') + m['content'] + '<｜end▁of▁sentence｜>' }}"
    "{%- set ns.is_tool = false -%}{%- endif %}"
    "{%- if m['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
    "{{ ('<｜tool▁outputs▁begin｜>' if ns.is_output_first else '\n') + '<｜tool▁output▁begin｜>' + m['content'] }}"
    "{{ '<｜tool▁output▁end｜>' }}{%- set ns.is_output_first = false %}{%- endif %}{%- endfor -%}"
    "{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"
)
DEEPSEEK_V31 = _DEEPSEEK_SYSTEM + (
    "{%- if not thinking is defined %}{% set thinking = false %}{%- endif %}{%- for m in messages %}"
    "{%- if m['role'] == 'user' %}{%- set ns.is_first = true -%}{{ '<｜User｜>' + m['content'] }}{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}"
    "{{ ('<｜Assistant｜></think>' if ns.is_first else '') + (m['content'] or '') + '<｜tool▁calls▁begin｜>' }}"
    "{%- for c in m['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>'"
    " + c['function']['arguments'] + '<｜tool▁call▁end｜>' }}{%- endfor %}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- set ns.is_first = false -%}"
    "{%- elif m['role'] == 'assistant' %}{{ ('<｜Assistant｜></think>' if ns.is_first else '') + m['content'] }}"
    "{{ '<｜end▁of▁sentence｜>' }}{%- set ns.is_first = false -%}{%- endif %}"
    "{%- if m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}"
    "{%- endfor -%}{%- if add_generation_prompt and ns.is_first %}"
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)
KIMI_K2 = (
    "{%- macro calls_of(m) -%}<|tool_calls_section_begin|>{%- for c in m['tool_calls'] -%}"
    "<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>{% if c['function']['arguments'] is string %}"
    "{{ c['function']['arguments'] }}{% else %}{{ c['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>"
    "{%- endfor -%}<|tool_calls_section_end|>{%- endmacro -%}"
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- for m in messages -%}{%- set name = m.get('name') or m['role'] -%}"
    "{{ '<|im_' ~ (m.role if m.role in ('user', 'assistant') else 'system') ~ '|>' ~ name ~ '<|im_middle|>' }}"
    "{%- if m['role'] == 'assistant' -%}{{ m.content }}{%- if m.get('tool_calls') -%}{{ calls_of(m) }}{%- endif -%}"
    "{%- elif m['role'] == 'tool' -%}## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{%- else -%}{{ m.content }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
GRANITE33 = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set system = 'You are Granite.' %}{%- if tools %}"
    "{%- set system = system + ' Where a tool is needed, write <|tool_call|> and a JSON list of tools used.' %}{%- endif %}"
    "{%- set loop_messages = messages %}{%- endif %}"
    "{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}"
    "{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}"
    "{{- '<|end_of_text|>\n' }}{%- endif %}"
    "{%- for m in loop_messages %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] }}"
    "{{- '<|end_of_text|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
PHI4_MINI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4_FIXED = (  # llama.cpp's
    "{{- '<|system|>' + (messages[0]['content'] if messages[0]['role'] == 'system' else '') }}"
    "{%- for t in tools or [] %}{{- '<|tool|>' + (t['function'] | tojson) + '<|/tool|>' }}{%- endfor %}"
    '{{- \'Format: <|tool_call|>{"name": "foo"}<|/tool_call|><|end|>\' }}'
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<|tool_response|>' + (m.content | tojson) + '<|end|>' }}"
    "{%- elif m.role != 'system' %}{{- '<|' + m.role + '|>' + m.content }}"
    "{%- for c in m.tool_calls %}{{- '<|tool_call|>' + (c['function'] | tojson) + '<|/tool_call|>' }}{%- endfor %}"
    "{{- '<|end|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
HUNYUAN_A13B = (  # vLLM's
    "{%- set ns = namespace(first=true) %}{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}{%- set ns.calls = '[' %}{%- for c in m.tool_calls %}"
    '{%- set ns.calls = ns.calls + \'{"name": "\' + c.function.name + \'", "arguments": \' %}'
    "{%- set ns.calls = ns.calls + (c.function.arguments | tojson) + ('}' if loop.last else '}, ') %}{%- endfor %}"
    "{%- set content = content + '<tool_calls>' + ns.calls + ']</tool_calls>' %}{%- endif %}"
    "{%- if m.role == 'tool' %}{%- set content = '<tool_response>' + content + '</tool_response>' %}{%- endif %}"
    "{%- if ns.first %}{{- '<|startoftext|>' }}{%- if tools %}{{- 'Say <tool_calls>[{}]</tool_calls>.\n' + (tools | tojson) }}"
    "{%- endif %}{%- set ns.first = false %}{%- endif %}"
    "{{- content + {'system': '<|extra_4|>', 'assistant': '<|eos|>'}.get(m.role, '<|extra_0|>') }}{%- endfor %}"
)
COMMAND_R7B = (
    "{{ bos_token }}{%- macro number(messages, wanted) %}{%- set ns = namespace(value=0, seen=false) %}{%- for m in messages %}"
    "{%- for c in m.tool_calls or [] %}{%- if c.id == wanted and not ns.seen -%}{{ ns.value }}{%- set ns.seen = true %}"
    "{%- endif %}{%- set ns.value = ns.value + 1 %}{%- endfor %}{%- endfor %}{%- endmacro -%}"
    "{%- set index = namespace(value=0) %}"
    "{%- if messages[0].role == 'system' %}{%- set preamble = messages[0].content %}{%- endif %}"
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\n{% if tools %}"
    "Write <|START_THINKING|>, your plan and <|END_THINKING|>; <|START_ACTION|>, a list of calls and <|END_ACTION|>.\n"
    "[{% for t in tools %}{\"name\": \"{{ t['function']['name'] }}\", "
    "\"parameters\": {{ t['function']['parameters'] | tojson }}}{%- if not loop.last %},{% endif %}{% endfor %}]{% endif %}"
    "{%- if preamble %}\n# Developer Preamble\n{{ preamble }}{%- endif -%}"
    "<|END_OF_TURN_TOKEN|>{%- for m in messages %}{%- if m.role == 'user' %}"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>"
    "{%- elif m.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m.tool_calls %}"
    "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\n{% for c in m.tool_calls %}"
    '    {"tool_call_id": "{{ index.value }}", "tool_name": "{{ c[\'function\'][\'name\'] }}", "parameters": '
    "{{ c['function']['arguments'] | tojson }}}{% if not loop.last %},{% endif %}\n{% set index.value = index.value + 1 %}"
    "{% endfor %}]<|END_ACTION|><|END_OF_TURN_TOKEN|>{% else %}"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% endif %}"
    "{%- elif m.role == 'tool' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>"
    '[{"tool_call_id": "{{ number(messages, m.tool_call_id) }}", "results": {"0": {{ m.content | tojson }}}}]'
    "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{%- endif %}"
)

# template: (its dialect, how the assistant's turn begins)
FAMILIES: dict[str, tuple[str, Dialect | None, str]] = {
    "llama-3.1": (LLAMA31, dialects.LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "qwen2.5": (QWEN25, dialects.HERMES, "<|im_start|>assistant\n"),
    "qwen3": (QWEN3_CHAT, dialects.HERMES, "<|im_start|>assistant\n"),
    "qwen3-coder": (QWEN3_CODER, dialects.QWEN3, "<|im_start|>assistant\n"),
    "glm-4.5": (GLM45, dialects.GLM, "<|assistant|>"),
    "glm-4-0414": (GLM4_0414, dialects.GLM4, "<|assistant|>"),
    "seed-oss": (SEED_OSS, dialects.SEED, "<seed:bos>assistant\n"),
    "minimax-m2": (MINIMAX_M2, dialects.MINIMAX, "]~b]ai\n<think>\n"),
    "muse-glimmer": (MUSE_GLIMMER, dialects.MUSE, "<|start|>assistant"),
    "inkling": (INKLING_CHAT, dialects.INKLING, "<|message_model|>"),
    "kimi-k3": (KIMI_K3, dialects.KIMI3, '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'),
    "hunyuan-a13b": (HUNYUAN_A13B, dialects.HUNYUAN, "<|extra_0|>"),
    "mistral-v3": (MISTRAL_V3, dialects.MISTRAL, "[/INST]"),
    "mistral-v13": (MISTRAL_V13, dialects.MISTRAL11, "[/INST]"),
    "deepseek-v3": (DEEPSEEK_V3, dialects.DEEPSEEK, "<｜Assistant｜>"),
    "deepseek-v3.1": (DEEPSEEK_V31, dialects.DEEPSEEK31, "<｜Assistant｜></think>"),
    "kimi-k2": (KIMI_K2, dialects.KIMI, "<|im_assistant|>assistant<|im_middle|>"),
    "granite-3.3": (GRANITE33, dialects.GRANITE, "<|start_of_role|>assistant<|end_of_role|>"),
    "phi-4-mini": (PHI4_MINI, dialects.PHI4, "<|assistant|>"),
    "phi-4-mini-fixed": (PHI4_FIXED, dialects.PHI4, "<|assistant|>"),
    "command-r7b": (COMMAND_R7B, dialects.COMMAND, "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    "olmo-3": (OLMO3_INSTRUCT, dialects.OLMO3, "<|im_start|>assistant\n"),
    "gemma-4": (GEMMA4_IT, dialects.GEMMA4, "<|turn>model\n<|channel>thought\n<channel|>"),
    "gemma-2": (GEMMA2, None, "<start_of_turn>model\n"),
    "phi-3": (PHI3, None, "<|assistant|>\n"),
}
TOOL_USERS = [name for name, (_, dialect, _) in FAMILIES.items() if dialect is not None]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "  How high is it?"}
ANSWER = {"role": "assistant", "content": "High."}
PROPERTIES = {"place": {"type": "string"}, "days": {"type": "array"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": PARAMETERS}}
ARGUMENTS = {"place": 'Ü"er <i>', "days": [1, 2]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("templates")
    byte_level().save_pretrained(folder)
    return load_tokenizer(folder)


def say(tokenizer: Tokenizer, family: str, *messages: Any, tools: Any = (), **variables: Any) -> str:
    tokenizer.chat_template = FAMILIES[family][0]
    return str(tokenizer.decode(render_chat(tokenizer, messages, tools, **variables), skip_special_tokens=False))


def call(arguments: Any = ARGUMENTS) -> dict[str, Any]:
    function = {"name": "tide", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call12345", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_ends_where_the_assistant_begins(family: str, tokenizer: Tokenizer) -> None:
    said = say(tokenizer, family, USER, ANSWER, {"role": "user", "content": "And now?"})
    places = [said.index(text) for text in ("How high", "High.", "And now?")]
    assert places == sorted(places) and said.endswith(FAMILIES[family][2])
    assert said.count(tokenizer.special_tokens_map["bos_token"]) == (
        tokenizer.special_tokens_map["bos_token"] in said[:10]
    )


# Words that stand in markers of turns, or in what templates write behind the last one.
BEGUN = ("<", "end", "e", "|", "\n", "<|im_end|>", "model", "eos", "{", "Yes. ", " no", "CONTINUE_FINAL_MESSAGE_TAG")


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_goes_on_from_its_words_whatever_they_are(family: str, begun: str, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = FAMILIES[family][0]

    def said(words: str) -> str:
        messages = [USER, {"role": "assistant", "content": words}]
        return render_text(tokenizer, messages, (), RenderBudget(), begun=words)

    before = said("Qxz").removesuffix("Qxz")
    assert said(begun) in (before + begun, (before + begun.strip()).rstrip())  # some trim


@pytest.mark.parametrize("family", FAMILIES)
def test_a_system_prompt_is_said_or_refused(family: str, tokenizer: Tokenizer) -> None:
    if family == "gemma-2":
        with pytest.raises(BadRequest, match="refuses these messages: System role not supported"):
            say(tokenizer, family, SYSTEM, USER)
    else:
        assert "Be brief." in say(tokenizer, family, SYSTEM, USER)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_dialect_is_the_templates(family: str, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = FAMILIES[family][0]
    assert find_dialect(tokenizer) is FAMILIES[family][1]


@pytest.mark.parametrize("family", TOOL_USERS)
def test_tools_their_calls_and_results_are_said(family: str, tokenizer: Tokenizer) -> None:
    result = {"role": "tool", "tool_call_id": "call12345", "content": "seven metres"}
    said = say(tokenizer, family, USER, tools=[TOOL])
    assert "tide" in said and "place" in said and "tide" not in say(tokenizer, family, USER)
    said = say(tokenizer, family, USER, call(), result, tools=[TOOL])
    assert "seven metres" in said


# What these write differs from what is read: with ids; one call.
@pytest.mark.parametrize("family", [name for name in TOOL_USERS if name not in ("mistral-v3", "llama-3.1")])
def test_calls_are_said_as_they_are_read(family: str, tokenizer: Tokenizer) -> None:
    """What is made of calls, by the template or where it writes none by us, is what our reader makes calls of."""
    dialect = FAMILIES[family][1]
    assert dialect is not None
    two = call()["tool_calls"] + call({"place": "x"})["tool_calls"]
    said = say(tokenizer, family, SYSTEM, USER, {**call(), "tool_calls": two}, tools=[TOOL])
    said = said[said.rindex("How high") :]
    if dialect.is_put:
        begun = re.search(r"<\|(start\|>|message_model\|>|close\|>response)", said)
        assert begun is not None
        reader = answer_reader(find_thinking(tokenizer), ["tide"], is_open=False)
        said = "".join(map("".join, (reader.feed(said[begun.start() :].replace("<|eot|>", "")), reader.finish())))
    pieces = ToolReader(dialect, {"tide": PARAMETERS}).feed(said[said.index(dialect.marker) :])
    assert [p.name for p in pieces if isinstance(p, CallStart)] == ["tide", "tide"]
    made = ["".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == i) for i in (0, 1)]
    assert [json.loads(each) for each in made] == [ARGUMENTS, {"place": "x"}]


def test_a_call_of_llama_is_said_as_it_is_read(tokenizer: Tokenizer) -> None:
    said = say(tokenizer, "llama-3.1", USER, call())
    pieces = ToolReader(dialects.LLAMA3, {"tide": PARAMETERS}).feed(said[said.index('{"name"') :])
    assert isinstance(pieces[0], CallStart) and pieces[0].name == "tide"
    assert json.loads("".join(p.text for p in pieces if isinstance(p, CallArguments))) == ARGUMENTS


@pytest.mark.parametrize("family", [name for name in TOOL_USERS if name.startswith("deepseek")])
def test_tools_are_told_where_the_template_takes_none(family: str, tokenizer: Tokenizer) -> None:
    dialect = FAMILIES[family][1]
    assert dialect is not None
    said = say(tokenizer, family, SYSTEM, USER, tools=[TOOL])
    assert (
        said.index("Be brief.") < said.index("### tide") < said.index(json.dumps(PARAMETERS)) < said.index("How high")
    )
    assert write_calls(dialect, [("tool_call_name", "tool_call_arguments")]) in said


def test_glm4_is_told_of_a_call_by_metadata_and_of_what_it_returned_as_an_observation(tokenizer: Tokenizer) -> None:
    result = {"role": "tool", "tool_call_id": "call12345", "content": "seven metres"}
    said = say(tokenizer, "glm-4-0414", USER, {**call({"place": "x"}), "content": "I look."}, result)
    turns = '<|assistant|>\nI look.<|assistant|>tide\n{"place": "x"}<|observation|>\nseven metres<|assistant|>'
    assert said.endswith(turns)
    assert say(tokenizer, "glm-4-0414", USER, result).endswith("<|observation|>\nseven metres<|assistant|>")


def test_the_turn_that_gemmas_template_leaves_out_is_begun(tokenizer: Tokenizer) -> None:
    """Behind calls with words beside them it ends the turn, and begins none."""
    result = {"role": "tool", "tool_call_id": "call12345", "content": "seven metres"}
    said = say(tokenizer, "gemma-4", USER, {**call(), "content": "I look."}, result)
    assert said.endswith('seven metres<|"|>}<tool_response|>I look.<turn|>\n<|turn>model\n')
    assert say(tokenizer, "gemma-4", USER, call(), result).endswith('seven metres<|"|>}<tool_response|>')
    assert say(tokenizer, "gemma-4", USER, ANSWER, add_generation_prompt=False).endswith("High.<turn|>\n")


def test_thoughts_of_seed_and_gemma_are_known(tokenizer: Tokenizer) -> None:
    for template, opens, switch in (
        (SEED_OSS, "<seed:think>", None),
        (GEMMA4_IT, "<|channel>thought", "enable_thinking"),
    ):
        tokenizer.chat_template = template
        thinking = find_thinking(tokenizer)
        assert thinking is not None and (thinking.opens, thinking.switch) == (opens, switch)


def test_kimi_is_told_by_the_ids_of_calls_what_was_called(tokenizer: Tokenizer) -> None:
    calls = [{**call()["tool_calls"][0], "id": f"call_{n}"} for n in range(3)]
    turns = [{**call(), "tool_calls": calls[:2]}, {**call(), "tool_calls": calls[2:]}]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "high"} for n in (1, 2)]
    said = say(tokenizer, "kimi-k2", USER, turns[0], results[0], turns[1], results[1])
    assert [said.count(f"<|tool_call_begin|>functions.tide:{n}<") for n in range(4)] == [1, 1, 1, 0]
    assert said.index("## Return of functions.tide:1\nhigh") < said.index("## Return of functions.tide:2\nhigh")


def test_mistral_is_told_ids_of_nine_characters_whatever_they_were(tokenizer: Tokenizer) -> None:
    """Those of every API here are longer: a conversation could not go on behind a call."""
    ids = {"call_0123456789abcdef01234567": "ab3e625ed", "D681PevKs": "D681PevKs", "call_0": "c557a85a0"}
    calls = [{**call()["tool_calls"][0], "id": each} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "high"} for each in ids]
    said = say(tokenizer, "mistral-v3", USER, {**call(), "tool_calls": calls}, *results, tools=[TOOL])
    for told in ids.values():
        assert said.index(f'"id": "{told}"') < said.index(f'{{"content": high, "call_id": "{told}"}}')


def test_results_without_ids_are_told_as_those_of_their_calls(tokenizer: Tokenizer) -> None:
    """As Ollama's programs send them: by the name of the function, or in order."""

    def calls(*names: str) -> dict[str, Any]:
        return {
            "role": "assistant",
            "tool_calls": [{"function": {"name": name, "arguments": {"day": 1}}} for name in names],
        }

    def result(content: str, **more: str) -> dict[str, Any]:
        return {"role": "tool", "content": content, **more}

    asked: list[Any] = [USER, calls("tide", "wind"), result("calm", tool_name="wind"), result("high")]
    asked += [calls("tide", "tide"), result("low", tool_name="tide"), result("rising", tool_name="tide")]
    speaker: Any = SimpleNamespace(level=None, thinking=None)
    messages = chat_conversation({"messages": asked}, speaker).messages
    said = say(tokenizer, "command-r7b", *messages, tools=[TOOL])
    for number, content in enumerate(("high", "calm", "low", "rising")):
        assert f'{{"tool_call_id": "{number}", "results": {{"0": "{content}"}}}}' in said
    assert "high" in say(tokenizer, "mistral-v3", *messages, tools=[TOOL])


@pytest.mark.parametrize(
    "family, messages",
    [
        ("mistral-v3", [USER, USER]),
        ("mistral-v13", [ANSWER]),
        ("gemma-2", [USER, USER]),
        ("llama-3.1", [USER, {**call(), "tool_calls": call()["tool_calls"] * 2}]),
        ("qwen3-coder", [USER, call("not an object")]),
        ("glm-4.5", [USER, call("not an object")]),
    ],
)
def test_what_a_template_raises_is_a_bad_request_in_one_line(
    family: str, messages: list[Any], tokenizer: Tokenizer
) -> None:
    with pytest.raises(BadRequest, match="chat template of this model refuses these messages") as refusal:
        say(tokenizer, family, *messages)
    assert refusal.value.http_status == 400 and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "fault", ["{{ 1 / 0 }}", "{{ raise_exception('a\\nb') }}", "{{ messages[0].content.nope() }}", "{{ [].pop() }}"]
)
def test_any_fault_of_a_template_is_one(fault: str, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = fault
    with pytest.raises(BadRequest, match="refuses these messages") as refusal:
        render_chat(tokenizer, [USER])
    assert "\n" not in str(refusal.value)


def test_what_a_template_leaves_out_is_refused(tokenizer: Tokenizer) -> None:
    result = {"role": "tool", "tool_call_id": "call12345", "content": "seven metres"}
    with pytest.raises(BadRequest, match="leaves out what functions returned"):
        say(tokenizer, "phi-3", USER, call(), result, USER)
    assert "How high" in say(tokenizer, "phi-3", USER, {**ANSWER, "tool_calls": []}, USER)
    # As models that see images have it: text is a part, and a string holds none.
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(BadRequest, match="leaves out what users say"):
        render_chat(tokenizer, [USER])


def test_kimi_k3_is_told_whether_and_how_long_to_think(tokenizer: Tokenizer) -> None:
    told = say(tokenizer, "kimi-k3", USER, thinking_effort="low")
    assert "thinking_effort=low" in told and find_level(tokenizer) == "thinking_effort"
    thinking = find_thinking(tokenizer)
    assert thinking is not None and thinking.switch == "thinking"
    assert say(tokenizer, "kimi-k3", USER, thinking=False).endswith("<|open|>response<|sep|>")


def test_muse_is_told_how_long_to_think_and_what_it_thought(tokenizer: Tokenizer) -> None:
    told = say(tokenizer, "muse-glimmer", USER, {**ANSWER, "reasoning_content": "So."}, USER, reasoning_strength="low")
    assert "Reasoning strength: low." in told and find_level(tokenizer) == "reasoning_strength"
    assert "<|start|>assistant to=self<|message|>So.<|eom|><|start|>assistant to=user<|message|>High.<|eot|>" in told


def test_the_switch_of_thoughts_is_the_templates(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = QWEN3_CHAT
    thinking = find_thinking(tokenizer)
    assert thinking is not None and thinking.switch == "enable_thinking"
    for name in ("thinking", "enable_thinking"):
        tokenizer.chat_template = f"{{% if not {name} %}}</think>{{% endif %}}"
        thinking = find_thinking(tokenizer)
        assert thinking is not None and thinking.switch == name
    tokenizer.chat_template = "{% set ns = namespace(enable_thinking=true) %}</think>{{ ns.enable_thinking }}"
    thinking = find_thinking(tokenizer)
    assert thinking is not None and thinking.switch is None  # nemotron nano v2: it takes none from outside
    assert say(tokenizer, "qwen3", USER, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert say(tokenizer, "glm-4.5", USER, enable_thinking=False).endswith("<think></think>")
