"""Membership and directory of a swarm.

identity.py a node's key · ticket.py what a machine needs to join, qr.py as a QR code
members.py scope, allow and deny lists · lan.py mDNS
record.py what a node says of a span · statement.py its signed bytes · announce.py when it is said
record_store.py the newest records held, store_report.py what is told of them · complaints.py what a person should mend
directory.py the protocol and what drives it, peer_queue.py what waits for a peer; back-ends: gossip.py (with news.py, and
allowance.py for what it takes of others), dht/, static.py; backends.py chooses
"""
