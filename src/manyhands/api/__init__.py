"""The gateway: programs that speak to OpenAI speak to a swarm (openai, responses), and our own API (native).

gateway    admits a request and runs it on an origin; tells observers          limits  who may run now (pure)
app        FastAPI, errors in OpenAI's shape, body limits, uvicorn             auth    keys, hashed at rest
body       JSON from clients, in one line if it is wrong                          schema  pydantic models of its parts
fields     the requests that generate: parsed and documented from models          sse     event streams that can pause
prepare    from a body to token ids (pure); preparing: where, for how long        route   mounts what reads its own body
watchdog   what held the event loop, and how long
"""
