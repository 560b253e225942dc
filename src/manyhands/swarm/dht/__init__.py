"""The directory as a Kademlia DHT.

backend.py the back-end · table.py its contacts · lookup.py, query.py searches · store.py records · wire.py messages
intake.py how much is taken from each sender · published.py what this node publishes
"""
