"""What a span computes, as plain data: config.json -> Program. No torch, no numpy, no transformers.

ops       the operations, their shapes, their roundings, the checkpoint tensors that they name (weight)
cached_ops  those that use what earlier positions have cached; compressed_ops: deepseek_v4's; expert_ops: those of experts;
          row_ops: of rows alone
tensors   which tensors of the checkpoint they need
families  one recipe a family: `read_program(folder)`, `build_program(config)`
blocks    what recipes share: attention, blocks, experts, residual structures
ends      embedding, final norm and head; the whole Program
rope      rotary tables: frequencies and factors of every scaling
fields    config.json, read so that no field is overlooked
"""
