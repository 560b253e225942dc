"""Anthropic's Messages API: its fields (fields.py), what they mean to the model (conversation.py), its events (messages.py)."""
