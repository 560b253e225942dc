"""Our own paths under /api: generation with diagnostic frames, nodes, the swarm (docs/api.md)."""
