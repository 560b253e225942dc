"""The gateway: the HTTP API of a swarm.

gateway.py admits requests and runs them on an origin · run.py one request, and what observers are told of it
limits.py who may run now · access.py, auth.py keys · sign_in.py the owner on the page
http/ the server, hosts, bodies, event streams · preparation/ from a body to token ids · openai/ OpenAI's paths
native/ our own paths · fields.py, formats.py, choice.py what requests that generate share · jobs.py recent requests
metrics.py, gauges.py Prometheus · trace.py OpenTelemetry · waterfall.py where a token's time goes · status.py health
"""
