"""Runs a Program: row bytes in, row bytes out, with the same bits on every CPU (docs/arithmetic.md). Reading order:

span        the interface: what runs a span, and what runs the ends
cpu         the native engine: spans and ends on this machine's CPU
compile     Program -> native operations (compiled); what they are made with: emitter; latents, compressed and compile_experts
            have those of latent and of compressed attention and of experts, compile_rows of rows alone; parts: plans of
            some layers
registers   which registers of a plan may share memory
library     native/ (C) by ctypes; layout: structs that both write down, signatures: functions
cache       what a session keeps of a span; states: what convolutions and linear attention keep, rings: what
            entries are made of
weights     matrices packed, vectors in fp32; quants: small ones, packing: packed now or at an earlier load, memory: for them
mapped      tensors of a folder, mapped from its files; filed: those that stay there, as the table of file_table
blocks      block types in numbers; grids, nvfp4 and ternary have theirs; quantised: those of quantised safetensors; rearranged:
            types that are held as others
golden      the digests that a back end must reproduce; proofs: notes that it has
golden_cases  what is digested; golden_biases, golden_small, golden_cache, golden_index, golden_states,
            golden_variants, golden_compressed, golden_mixes, golden_scan, golden_words; golden_models
devices     on which device a process computes
cuda/       the same bits on NVIDIA GPUs
torch       the same in torch, as oracle and for other devices: torch_functions, torch_memory, torch_compressed,
            torch_experts, torch_rows
"""
