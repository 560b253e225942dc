"""From the bytes of a request to token ids: inline where that is cheap, else in worker processes (pool.py, process.py).

prepare.py parse, check, render, tokenise · asked.py what each path asks of a model · talk.py a conversation as a prompt
desk.py what requests are prepared by, and what comes of it · child.py starts a process
"""
