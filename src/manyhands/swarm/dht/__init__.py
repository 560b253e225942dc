"""The directory as a Kademlia DHT.

backend.py the back-end · table.py its contacts · lookup.py, query.py searches · store.py records · wire.py messages
"""
