"""From the bytes of a request to token ids: inline where that is cheap, else in worker processes (pool.py, process.py)."""
