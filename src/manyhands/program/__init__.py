"""What a span computes, as plain data: config.json -> Program. No torch, no numpy, no transformers.

ops       the operations, their shapes, their roundings, the checkpoint tensors that they name
"""
