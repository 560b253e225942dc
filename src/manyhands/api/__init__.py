"""The gateway: programs that speak to OpenAI speak to a swarm (openai, responses), and our own API (native).

gateway    admits a request and runs it on an origin; tells observers          limits  who may run now (pure)
app        FastAPI, errors in OpenAI's shape, body limits, uvicorn             auth    keys, hashed at rest
schema     the one table of fields: parsed, refused and documented from it     sse     event streams that can pause
"""
