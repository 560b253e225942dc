"""A hop: what one node serves, and the sessions that peers open on it. Reading order:

worker        spans that a node has loaded or would load (loadable, hosted), and their sessions
serve         leases and sessions of one span
opening       an Open that is carried out; beginning: from where it goes on, adopting: for another origin, dials: its links
leases        memory for caches; allotment, callers, owners: by whom it is asked for
parking       sessions that ended and whose caches are kept; copies and slot: when caches are copied for their successors
session       one session on one hop; order: whether steps do come so, places: where sessions are, early: steps before Opens
fit, bounds   what steps must look like, and which hidden states can be
leaves        hashes of rows; attesting: a node signs what it has of them, for an audit
engine        whose rows run together, and what becomes of results; batch: which steps, turnaround: when the next is due
execute       the device of a span; thread: its one thread
log           what a session sent, to rebuild a lost successor; feeding: rows of it for a standby, outbox: what waits
eviction      when an idle span leaves memory
choice        which engine computes a model here; runner makes it, loading says how far that is, gpu opens an NVIDIA GPU
torch_program  Programs on a device of torch
quality       how far the predictions of a model are from those of another
"""
