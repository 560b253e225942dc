"""Which layers a node hosts, what to expect of a set of machines, when a span should move. Pure, but for the last.

machines  what a machine can do, and the file that lists machines
shape     how large a model is, without reading it
strategy  memory -> layers that fit; which span helps a swarm most
plan      machines -> the placements that answer one stream fastest, with predicted figures
balance   records -> move or stay
measure   this machine: seconds per layer, what a hop adds
"""
