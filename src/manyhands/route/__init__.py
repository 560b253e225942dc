"""Which hops a request uses. Pure: times and figures are arguments. Reading order:

offer      what a route is made of and looked for on: spans on offer, the terms of the origin
search     offers -> a chain that covers the model
permit     which offers may be hops: trust, scope, rules, room; classes: which arithmetic classes may mix
shortlist  among which of very many offers is looked
space      offers as numbers; chain: the cheapest chain over them
cost       seconds of a token, and of a first token, on a route; edges: round trips between hops
learn      what live sessions showed of nodes and links
chunks     how many rows of a prompt go into one step
prefix     whether a route that has the beginning of a prompt is worth more than a faster one
"""
