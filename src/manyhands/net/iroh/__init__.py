"""iroh (QUIC with hole punching and relays) as a Transport: transport.py, over the binding in pipe.py."""
