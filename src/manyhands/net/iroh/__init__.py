"""iroh (QUIC with hole punching and relays) as a Transport: transport.py, over the binding in pipe.py."""

PREFIX = "iroh%"  # of an address where a node is found by iroh
