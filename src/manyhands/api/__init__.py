"""The gateway: the HTTP API of a swarm. routers.py has all of it.

gateway.py admits requests and runs them on an origin · run.py one request, and what observers are told of it
limits.py who may run now · access.py, auth.py keys · sign_in.py the owner on the page
http/ the server, hosts, bodies, event streams · preparation/ from a body to token ids · openai/ OpenAI's paths
anthropic/ Anthropic's · ollama/ Ollama's · native/ our own · names.py by which names a model is asked for
fields.py, formats.py, choice.py what requests that generate share · delta.py what a token adds · event_id.py ids of events
jobs.py recent requests · metrics.py, gauges.py Prometheus · trace.py OpenTelemetry · callers.py who asks, as a hash
log.py logs · waterfall.py where a token's time goes · status.py health
"""
