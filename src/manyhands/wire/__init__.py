"""Bytes, sans-I/O: what two nodes can say to each other. Reading order:

message   the messages, as values
control   their JSON bodies, with a strict decoder (all but Step)
header    the fixed header of a frame, and the checks that precede its body
frame     header + body, encoding and the incremental reader
rows      the payload of a Step as numbers
codec     these in fewer bytes; with loss: int8, of the positions that rounding says
credit    how many steps a receiver still takes
signed    signatures, of Opens and of what hops attest; handle: by what another origin may go on with a session
timings   timings of a step
weights_message  parts of a model, asked for and sent; attest_message: what hops say of their rows
"""
