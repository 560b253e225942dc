"""Every API for other programs, over one gateway."""

from fastapi import APIRouter

from manyhands.api.anthropic.messages import anthropic_router
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.ollama.generate import ollama_router
from manyhands.api.openai.chat import openai_router
from manyhands.api.openai.responses import responses_router
from manyhands.api.openai.tokens import tokens_router


def compatible_routers(gateway: Gateway, formats: ModelFormats) -> list[APIRouter]:
    """OpenAI's, Anthropic's and Ollama's paths, and the few that llama.cpp and vLLM add."""
    made = (openai_router, responses_router, tokens_router, anthropic_router, ollama_router)
    return [make(gateway, formats) for make in made]
