"""Joining by a short code: two machines that know the same six characters hand over the swarm's ticket (docs/protocol.md)."""
