"""HTTP below the routes: the server, the ASGI application, host and origin checks, bodies, event streams, the loop watchdog."""
