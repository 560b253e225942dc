"""A public test kit.

clock          virtual time
swarm          a swarm in one process over memory links
tiny           models that fit a test (tiny_configs, tiny_inkling, tiny_large4, tiny_latent, tiny_minimax, tiny_muse,
               tiny_older, tiny_step, tiny_unturned, tiny_v4)
gguf           GGUF files
faults         nodes that die, freeze, dawdle or lie: trouble says what, faulty_link, faulty_device and faulty_node do it
wan            an emulated wide area network; ladder: what a ring and drafts win there
wrapped_link   what links of the kit share
"""
