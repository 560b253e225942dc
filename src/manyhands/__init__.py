"""manyhands: run a language model that none of your machines could hold alone, and never lose a stream.

core errors config     nouns, the exception tree, configuration
wire net               what can be said; who can be reached
model worker           one span of a model; a hop that serves it
swarm route place      who is there; which hops; which layers to host
generate verify text   the loop; auditors; text and ids
api node origin        how strangers ask; the node; a request from text to text
local cli testing      many nodes on one machine; the command; the public test kit
"""

import os

# Read by OpenMP and MKL when torch loads. Idle compute threads sleep instead of spinning, so that nodes which share a
# machine do not fight (two nodes with two threads each on two cores: 14.5 -> 29 steps/s each, docs/design.md §6).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MKL_CBWR", "AVX2")
# transformers' bars are noise where a program speaks for itself.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

__version__ = "0.1.0"
