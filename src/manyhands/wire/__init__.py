"""Bytes, sans-I/O: what two nodes can say to each other. Reading order:

message   the messages, as values
control   their JSON bodies, with a strict decoder (all but Step)
frame     header + body, encoding and the incremental reader
tensor    the payload of a Step as a torch tensor (the only file here that imports torch)
"""
