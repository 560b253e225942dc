"""Ids and text: chat templates, tokenizers, stop strings, thoughts, function calls, grammars. Reading order:

tokenizer          a checkpoint's tokenizer; tokenizer_parts says what of it may run where, apart runs the rest in processes
generation_config  the ids that end a text, and how its publisher recommends to draw tokens
template           a checkpoint's chat template, rendered within bounds, which render_budget holds
history            conversations with tools, as a template takes them
prompt             text and messages to ids
detokenize         ids to text that is safe to show
received           what a client says it has of an answer
reasoning          thoughts and answer; headed: answers that are messages with heads, as channels, recipients, blocks and
                   sections have them; readers: which reads a model's
dialects           how models write function calls
tools              calls, read as they are written: calls (JSON), tagged (values between tags), literals (Python's and Gemma's)
grammar            grammars for answers; literal_grammar, tagged_grammar and headed_grammar have those of their forms,
                   json_rule that of JSON; kept_grammars: those kept compiled; heap: the memory that they take
whole_json         whether a text is one JSON object
"""
