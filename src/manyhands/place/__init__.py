"""Which layers a node hosts, what to expect of machines, when a span should move. Pure but for orders, measure, kernels.

machines  what a machine can do, and the file that lists machines
shape     how large a model is, without reading it
strategy  memory -> layers that fit; which span helps a swarm most
budget    what a node may use of its machine; joining: the share of one that joins
plan      machines -> the placements that answer one stream fastest, with predicted figures; tour: the shortest way through them
living    a swarm that runs, as machines, and what brings it to a plan; whatif: what more machines change
balance   records -> move or stay
orders    a member asks another one to serve other layers
measure   this machine: seconds per layer, what a hop adds; likeness: in place of layers that are elsewhere; kernels: each kind
          of weights
"""
