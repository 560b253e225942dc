"""Programs on NVIDIA GPUs, with the bits of the native engine: `--device cuda[:N]` (docs/exactness.md)."""
