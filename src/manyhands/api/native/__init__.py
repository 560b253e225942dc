"""Our own paths under /api: generation with diagnostic frames, nodes, the swarm (docs/api.md).

routes.py the paths · fields.py their fields · infer.py generation, frames.py its frames · process.py hidden states
workers.py nodes, as an operator sees them · swarm.py the swarm · plan.py plans, placement.py carried out
switch.py a node switched off · invite.py codes and ticket · bus.py HearthNet's bus, capabilities.py its names
"""
