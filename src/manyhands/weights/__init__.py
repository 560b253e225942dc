"""Where the bytes of a model come from: the local disk, other nodes and the hub.

names.py, here.py, fetch.py a model's name to a folder · catalogue.py, pinned.py short names and their files
selection.py which GGUF file is meant · shelf.py what lies here
fetched.py folders of earlier fetches · hub.py the hub's HTTP API, hub_gguf.py GGUF models there
download.py the tensors of a span from several providers · asking.py small files from the first that has them
reading.py a fetch beside the event loop
schedule.py which tensor is fetched from which provider next · workers.py the tasks that fetch, write and hash
provider.py, hub_provider.py, disk.py the providers · partial.py, blocks.py large tensors in parts
refetch.py damaged parts again · seed.py this node as a provider for others
packed.py what a node made of a checkpoint at its first load
"""
