"""The torch engine over transformers' modules: layers of a span, embedding and head, with row-invariant arithmetic.

load.py builds the layers that a span needs · shard.py runs them · ends.py embedding and head · cache.py keys and values
linear.py, attention.py, elementwise.py the operations · fuse.py, fuse_attention.py, stack.py, tiles.py, attend.py AMX kernels
prove.py self-test · arithmetic.py the arithmetic class · agree.py config against tensors
"""
