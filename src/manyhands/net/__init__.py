"""Who can be reached: the one place with sockets. Reading order:

transport     the interface: Transport listens and dials, Link carries messages
link          the one Link there is: frames over anything that looks like an asyncio transport
inbox         what arrived on a link and was not taken yet
arrivals      links that peers dialled and that nobody took yet
certificate   "knows the swarm secret" = "its certificate chain verifies"
tls           TCP + TLS 1.3
handover      protocols that hold a connection until the right one takes over
relay         forwarding bytes between members that cannot dial each other
tunnel        links through a relay
iroh          QUIC with hole punching, for peers that no member can dial
iroh_pipe     its binding, repaired, as an asyncio transport
reach         one Transport for every way to a peer: direct, iroh, relay
memory        the same without a network, for tests
pool          links by (peer, lane), dialled once
"""
