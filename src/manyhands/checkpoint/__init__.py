"""What a model is on disk: tensors with their hashes, the manifest and ModelId, and folders that hold a part of a model.

folder.py what a folder holds, plain_file.py as plain files · header.py the header of a safetensors file
config_fields.py bounds on config.json · text_part.py the text part of a multimodal model
dtypes.py stored types · quantised.py quantised safetensors, folded.py which of their tensors make one matrix
gguf.py the header of a GGUF file, part_names.py and gguf_parts.py a model in several of them,
gguf_model.py its tensors and config (by gguf_architecture.py, gguf_architectures.py, gguf_configs.py,
gguf_dense.py, gguf_experts.py, gguf_indexed.py, gguf_keys.py, gguf_latent.py, gguf_latent_names.py, gguf_mamba.py,
gguf_loops.py, gguf_minimax.py, gguf_mixtures.py, gguf_names.py, gguf_phimoe.py, gguf_plain.py, gguf_qwen4.py,
gguf_scales.py),
gguf_tokenizer.py its tokenizer (by gguf_pre_tokenizers.py),
gguf_folder.py a folder for it
ranked_tokenizer.py tekken.json and tiktoken.model as tokenizer.json · tokenizer_json.py parts of one
manifest.py tensors, config and tokenizer with their hashes, and the ModelId · verify.py tensors in memory against it
partition.py which tensors belong to which layers · store.py a folder that is being filled · split.py one folder into several
"""
