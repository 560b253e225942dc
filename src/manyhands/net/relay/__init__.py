"""Connections through a member that both sides can dial: relay.py forwards bytes, tunnel.py carries links over it."""
