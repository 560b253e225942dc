"""OpenAI's paths: chat completions, completions and models (chat.py), responses (responses.py), their fields and shapes."""
