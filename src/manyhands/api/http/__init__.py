"""HTTP below the routes.

server.py the server, connection.py one connection · app.py the ASGI application · arrival.py a request before all else
hosts.py host and origin checks · route.py routes that read their bodies · body.py bodies · error.py errors as answers
sse.py answers that take their time, encode.py JSON that is sent in pieces · watchdog.py looks at the event loop
document.py the OpenAPI document, reference.py as a page · page.py the page at /
"""
