"""Ollama's API: its fields, what they mean to the model, the list of models, and answers as lines of JSON."""
