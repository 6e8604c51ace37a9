"""The server's routes: OpenAI's API, health, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spiralformer.data.tokenizer import TextTokenizer
from spiralformer.decode.generate import RequestError, check_prompts
from spiralformer.model import SpiralFormer
from spiralformer.serve.answers import Answer, Choice
from spiralformer.serve.chat import ChatTemplate
from spiralformer.serve.engine import (
    CLOSED,
    FAILED,
    GONE,
    LATE,
    Busy,
    Engine,
    Event,
    Job,
    say_failure,
)
from spiralformer.serve.schema import (
    MOST_ANSWERS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    parse,
)
from spiralformer.templates import render

MOST_BYTES = 4 << 20  # of a body
BODY_SECONDS = 30.0  # in which it must have come
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_TOKENS = 16  # of a completion, where the request does not say, as with OpenAI

# What a request gets whose rows the engine has ended: status, code and message
ENDS = {
    LATE: (504, "timeout", "the request took longer than this server allows"),
    CLOSED: (503, "shutdown", "the server is shutting down"),
    FAILED: (500, "failed", "the server failed at this request"),
}


def ended(why: str) -> ApiError:
    status, code, message = ENDS[why]
    return ApiError(message, status=status, code=code)


@dataclass(frozen=True)
class Settings:
    name: str  # of the model
    seconds: float  # that a request may take
    max_prompt: int  # tokens
    host: str = "127.0.0.1"  # that it listens on
    api_key: str | None = None
    origins: Sequence[str] = ()  # of pages elsewhere that may use it


class Guard:
    """Who may ask: on loopback, only those who call it by a name of loopback (a page elsewhere can
    make its own name point here); on /v1, only those who have the key."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.wanted = f"Bearer {settings.api_key}".encode() if settings.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await refuse(refusal)(scope, receive, send)

    def refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        try:
            called = urlsplit("//" + headers.get(b"host", b"").decode("latin-1")).hostname
        except ValueError:
            called = None
        if self.settings.host in LOOPBACK and called not in LOOPBACK:
            message = "this server is called localhost; start it with --host for other names"
            return ApiError(message, status=403, code="wrong_host")
        if self.wanted is None or not scope["path"].startswith("/v1"):
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self.wanted):
            return None
        message = "no valid API key; send it as Authorization: Bearer KEY"
        return ApiError(message, status=401, code="invalid_api_key")


class EventStream(StreamingResponse):
    """Server-sent events, to be taken within so many seconds."""

    def __init__(self, events: AsyncIterator[str], seconds: float) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(self.seconds):
                await super().__call__(scope, receive, send)


class Service:
    """One model and its tokenizer, behind the routes."""

    def __init__(
        self,
        model: SpiralFormer,
        tokenizer: TextTokenizer,
        engine: Engine,
        settings: Settings,
        chat: ChatTemplate | None = None,
    ) -> None:
        self.model, self.tokenizer, self.engine = model, tokenizer, engine
        self.settings, self.chat = settings, chat
        self.started = int(time.time())

    def app(self) -> Starlette:
        middleware = [Middleware(Guard, settings=self.settings)]  # type: ignore[arg-type]
        if self.settings.origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(self.settings.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
            middleware.insert(0, cors)
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
        ]
        handlers: Any = {
            ApiError: lambda _, error: refuse(error),
            HTTPException: lambda _, error: refuse(
                ApiError(str(error.detail), status=error.status_code)
            ),
            ClientDisconnect: lambda *_: Response(status_code=499),  # which nobody reads
            Exception: self.failed,
        }
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def failed(self, request: Request, error: Exception) -> Response:
        say_failure(error)
        return refuse(ended(FAILED))

    # ------------------------------------------------------------------ small routes

    async def page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        config = self.model.config
        html = render(
            "serve.html",
            nonce=nonce,
            name=self.settings.name,
            layout=config.layout,
            needs_key=self.settings.api_key is not None,
            iterations=[str(iteration.resolution) for iteration in config.iterations],
            max_length=config.max_length,
        )
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return HTMLResponse(html, headers=headers)

    async def health(self, request: Request) -> Response:
        engine = self.engine
        well = engine.closing is None and engine.thread.is_alive()
        about = {
            "status": "ok" if well else "closing",
            "rows": engine.rows,
            "waiting": len(engine.waiting),
        }
        return JSONResponse(about, status_code=200 if well else 503)

    async def models(self, request: Request) -> Response:
        about = {
            "id": self.settings.name,
            "object": "model",
            "created": self.started,
            "owned_by": "spiralformer",
            "max_model_len": self.model.config.max_length,
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [about]})
        self._check_name(name)
        return JSONResponse(about)

    # ------------------------------------------------------------------ completions

    async def completions(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await read_body(request))
        self._check_name(asked.model)
        # An empty text is begun by an end of text, as documents are in training.
        encode = lambda text: self.tokenizer.encode(text) or [self.tokenizer.eot_id]
        prompts = await asyncio.to_thread(
            lambda: [encode(p) if isinstance(p, str) else p for p in asked.prompts]
        )
        count = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
        return await self._answer(request, asked, prompts, count, asked.logprobs)

    async def chat_completions(self, request: Request) -> Response:
        asked = parse(ChatRequest, await read_body(request))
        self._check_name(asked.model)
        if self.chat is None:
            raise ApiError(
                "the tokenizer of this model has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        prompt = await asyncio.to_thread(self.chat.tokens, asked.messages)
        counts = (asked.max_completion_tokens, asked.max_tokens, self.model.config.max_length)
        count = next(count for count in counts if count is not None)
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        return await self._answer(request, asked, [prompt], count, top)

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            message = f"the model served here is {self.settings.name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def _check(self, prompts: Sequence[Sequence[int]], answers: int) -> None:
        most = min(MOST_ANSWERS, self.engine.max_waiting)
        if answers > most:
            raise ApiError(f"{answers} answers are more than {most}; ask for fewer", param="n")
        try:
            check_prompts(self.model, prompts, 1)
        except RequestError as error:
            raise ApiError(str(error), param="prompt") from None
        longest = max(map(len, prompts))
        if longest > self.settings.max_prompt:
            raise ApiError(
                f"a prompt of {longest} tokens is longer than this server's limit, "
                f"{self.settings.max_prompt}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        count: int,
        top: int | None,
    ) -> Response:
        self._check(prompts, len(prompts) * (asked.n or 1))
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        echoed = isinstance(asked, CompletionRequest) and bool(asked.echo)
        choices = []
        for index, prompt in enumerate(p for p in prompts for _ in range(asked.n or 1)):
            job = Job(
                prompt,
                count,
                asked.sampling(seed + index),
                [self.tokenizer.eot_id],
                index=index,
                deliver=deliver,
                deadline=time.monotonic() + self.settings.seconds,
                top=top,
                scored_prompt=echoed and top is not None,
            )
            choice = Choice(job, asked, self.tokenizer, self.model.config)
            job.stop = choice.text.stopped if asked.stops else None
            choices.append(choice)
        answer = Answer(self.settings.name, choices)
        try:
            self.engine.submit([choice.job for choice in choices])
        except Busy as busy:
            raise ApiError(str(busy), status=429, code="rate_limit_exceeded") from None
        watch = asyncio.create_task(gone(request))
        watch.add_done_callback(lambda _: events.put_nowait(Event(0, ended=GONE)))
        watch.add_done_callback(lambda _: self.engine.cancel([c.job for c in choices]))
        pieces = self._pieces(choices, events, watch)
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return EventStream(server_sent(answer, pieces, usage), self.settings.seconds + 10)
        return JSONResponse(answer.whole([piece async for piece in pieces]))

    async def _pieces(
        self, choices: list[Choice], events: asyncio.Queue[Event], watch: asyncio.Task[None]
    ) -> AsyncIterator[dict[str, Any]]:
        """What can be sent of the choices, until all have ended. The end of `watch` frees their
        rows: it ends when the client goes, or when nobody takes the pieces any more."""
        going = len(choices)
        try:
            while going:
                event = await events.get()
                if event.ended == GONE:
                    raise ClientDisconnect
                if event.ended in ENDS:
                    raise ended(event.ended)
                piece = choices[event.choice].push(event)
                going -= bool(event.ended)
                if piece is not None:
                    yield piece
        finally:
            watch.cancel()


# ---------------------------------------------------------------------------- helpers


def refuse(error: ApiError) -> JSONResponse:
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}.get(error.status)
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def read_body(request: Request) -> bytes:
    """The body, if it is JSON, comes in time, and is not too long; that is seen before it is read.
    A page elsewhere cannot send this content type without being allowed to."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError("send the body as Content-Type: application/json", status=415)
    long = ApiError(f"the body is longer than {MOST_BYTES:,} bytes", status=413)
    given = request.headers.get("content-length", "")
    if given.isdecimal() and int(given[:20]) > MOST_BYTES:
        raise long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise long
    except TimeoutError:
        raise ApiError("the body did not come in time", status=408) from None
    return bytes(body)


async def gone(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def server_sent(
    answer: Answer, pieces: AsyncIterator[dict[str, Any]], usage: bool
) -> AsyncIterator[str]:
    line = lambda content: f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
    chunk = lambda choices: answer.object(choices, chunk=True)
    try:
        if answer.is_chat:
            for choice in answer.choices:
                delta = {"role": "assistant", "content": ""}
                first = {"index": choice.job.index, "delta": delta, "finish_reason": None}
                yield line(chunk([first]))
        async for piece in pieces:
            yield line(chunk([piece]) | ({"usage": None} if usage else {}))
        if usage:
            yield line(chunk([]) | {"usage": answer.usage()})
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield line(error.body)
