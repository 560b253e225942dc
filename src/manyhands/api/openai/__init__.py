"""OpenAI's paths: chat completions, completions and models (chat.py), responses (responses.py).

schema.py what their requests share; fields_chat.py, fields_responses.py, fields_tokens.py their fields
conversation.py what they mean to the model · forms.py how a choice looks · logprobs.py log probabilities
namespaces.py tools in namespaces, as Codex sends them
tokens.py /tokenize, /detokenize, /props
"""
