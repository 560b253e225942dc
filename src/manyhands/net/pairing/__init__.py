"""Joining by a short code: two machines that know the same six characters hand over the swarm's ticket (docs/protocol.md).

code      the code, and how long it opens anything
exchange  the messages
host      the machine that shows a code; queue: which caller is next
dial      the machine that is given it
"""
