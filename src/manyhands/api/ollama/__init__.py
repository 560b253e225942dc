"""Ollama's API.

fields.py its fields · conversation.py what they mean to the model · models.py the list of models
generate.py answers, as lines of JSON
"""
