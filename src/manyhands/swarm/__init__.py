"""Who belongs together: identity (a node's key), ticket (the text that lets a machine join)."""
