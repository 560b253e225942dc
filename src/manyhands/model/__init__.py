"""What a model is, where it comes from, and how a part of it runs.

header     which tensor lies where in a safetensors file
folder     a model folder: config, weights, index
partition  tensor names -> layers and ends (pure)
manifest   hashes of all tensors -> ModelId
hub        byte ranges from the hub
store      a folder that a download fills: sparse files and their journal
fetch      a model's name -> a folder with what is needed
split      a model -> folders that can each be served alone
load       a folder -> the modules of a span or of the ends
attention, cache, linear, elementwise   row-invariant arithmetic plugged into them
shard, ends  a loaded span; embedding, norm and head
"""
