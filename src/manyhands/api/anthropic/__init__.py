"""Anthropic's Messages API: its fields, what they mean to the model, and its events."""
