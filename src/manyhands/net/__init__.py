"""Who can be reached: the one place with sockets. Reading order:

transport     the interface: Transport listens and dials, Link carries messages
link          the one Link there is: frames over anything that looks like an asyncio transport
certificate   "knows the swarm secret" = "its certificate chain verifies"
tls           TCP + TLS 1.3
memory        the same without a network, for tests
pool          links by (peer, lane), dialled once
"""
