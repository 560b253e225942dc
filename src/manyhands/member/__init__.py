"""A running member of a swarm: what `manyhands up` and `manyhands join` start, without the terminal.

home.py      what a machine keeps of its swarm, and states of what runs
process.py   whether what wrote such a file still runs
member.py    the node, its directory, how it comes in, leaves, and is found again
own_addresses.py  where others find it: this machine's address, looked up again; its relays, asked again
lan_presence.py  mDNS: announced on the local network, told of others there
neighbours.py  where this node is among the others: its relays, the list of nodes, which are local
weights.py   the model as the swarm names it, and its files: from this disk, from peers, from the hub
hosting.py   which layers (claim.py), loading them, moving to others (make before break); backoff.py: when it tries again
balancing.py  gaps filled (gaps.py) and given back (taken.py), moves; reassign.py: moves that others ask for
room.py      what --memory leaves; loadable.py: layers that would be loaded on demand
company.py   the members as machines to plan with; surroundings.py: round trips, speed.py: of a span here
bootstrap.py  links to the swarm; providers.py: members as sources of weights
models.py    other models of the swarm, each an origin here once it is asked for
config.py    what a member is told at its start; invite.py: what lets others in
view.py      the swarm as this member sees it, for people and as JSON; pure
"""
