"""An emulated engine as a server, to try the service without a GPU and without a model.

    uvicorn engine:app --port 8000

It speaks OpenAI's protocol, gives one answer to everything, and reports the cached tokens that
vLLM would.
"""

import httpx
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from ctxreuse.serving import EmulatedEngine

app = FastAPI()
transport = EmulatedEngine(capacity_tokens=200_000, answer="From the documents.").transport(httpx)


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def serve(path: str, request: Request) -> Response:
    """Hand a request to the engine, and its answer back."""
    sent = httpx.Request(request.method, f"http://engine/{path}", content=await request.body())
    reply = await transport.handle_async_request(sent)
    return StreamingResponse(
        reply.aiter_bytes(), reply.status_code, media_type=reply.headers["content-type"]
    )
