"""Who can be reached: the one place with sockets. Reading order:

transport     the interface: Transport listens and dials, Link carries messages
link          the one Link there is: frames over anything that looks like an asyncio transport
pings         how many Pings a peer may send
inbox         what arrived on a link and was not taken yet
unread        whether the peer reads what is sent to it
shares        what the links of a transport hold together
arrivals      links that peers dialled and that were not taken yet
incoming      how many links one peer may hold open
certificate   membership: a certificate chain that the swarm's secret signed
admission     tokens checked before TLS, and bounds on callers without one
names         names looked up, and TCP connections to them; segments says how large their packets may be
listener      the listening socket behind admission
handshakes    how long each may take
tls           TCP + TLS 1.3
alpn          protocols that hold a connection until the right one takes over
relay/        forwarding bytes between members that cannot dial each other, and links over it
iroh/         QUIC with hole punching, for peers that no member can dial
reach         one Transport for every way to a peer: direct, iroh, relay
memory        the same without a network, for tests
pool          links by (peer, lane), dialled once
watch         heartbeats on every link; liveness says what silence means, kernel reads TCP's counters
turn          how long messages may hold a turn of the event loop
uplink        what this node's uplink carries
own_address   the address that others reach this machine at
setbacks      peers and addresses that could not be dialled lately
pairing/      joining by a short code
"""
