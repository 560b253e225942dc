"""Programs on NVIDIA GPUs, with the bits of the native engine: `--device cuda[:N]` (docs/exactness.md). Reading order:

span        spans and ends of a model on a GPU
plan        operations with their weights on the device; room: where a step's rows lie there
operations  which kernels compute an operation; columns and states have some of them
launch      what kernels are told
source      the kernels' text (*.cu), and how it is compiled
device      what plans need of a GPU; gpu: one, by its driver
proof       golden digests on a GPU
"""
