"""Throughput of servers: clients that ask at the same time, each server a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from spiralformer.bench.peers import PEER, build, family
from spiralformer.console import say
from spiralformer.data.tokenizer import byte_tokenizer
from spiralformer.errors import UserError
from spiralformer.model_folder import save_model

CLIENTS = (1, 8, 32)
SHORT, LONG = 16, 512  # tokens of prompts
FEW = 8  # tokens of the answers to long prompts
SERVED = ("baseline", "looped", "spiral-b")
PATIENCE = 600.0  # seconds in which a server must be ready
ID = byte_tokenizer().eot_id


def write_folder(name: str, scale: str, dtype: str, folder: Path) -> Path:
    """A random model that never ends a text: its greedy choice is never the end-of-text token."""
    model = build(name, family(scale, 2 * LONG)[name], getattr(torch, dtype)).eval()
    head = model.embed_out if name == PEER else model.head
    head.weight.data[ID] = 0
    if name == PEER:
        model.save_pretrained(folder)
    else:
        save_model(model, folder, eos_token_id=ID)
    byte_tokenizer().save(folder)
    return folder


@contextlib.contextmanager
def serving(folder: Path, engine: str) -> Iterator[int]:
    """`spiralformer serve` on a folder, and its port; ready, and stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "spiralformer", "serve", str(folder), "--engine", engine]
    options = ["--port", str(port), "--name", "model"]
    with (
        open(folder / "log", "w+", encoding="utf-8") as log,
        subprocess.Popen([*command, *options], stdout=log, stderr=log) as server,
    ):
        try:
            until = time.monotonic() + PATIENCE
            while not _is_ready(port):
                if server.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = (log.read().strip().splitlines() or ["nothing"])[-1]
                    raise UserError(f"the server of {folder.name} did not start; it says: {said}")
                time.sleep(0.2)
            yield port
        finally:
            server.terminate()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def ask(port: int, prompt: int, tokens: int, client: int) -> None:
    """One client's request, streamed; no two have the same prompt."""
    ids = [(client + place) % 256 for place in range(prompt)]
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse().read()
    if not answer.endswith(b"data: [DONE]\n\n"):
        raise UserError(f"a server failed: {answer[-200:].decode(errors='replace')}")


@contextlib.contextmanager
def servers(scale: str, dtype: str) -> Iterator[dict[tuple[str, str], int]]:
    """The ports of all servers, by model and engine. Without vLLM there is ours alone."""
    pairs = [(name, "own") for name in SERVED]
    if find_spec("vllm"):
        pairs += [(name, "vllm") for name in (PEER, *SERVED)]
    else:
        say("no vLLM here: only our own server is measured")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = {}
        for name, engine in pairs:
            place = write_folder(name, scale, dtype, folder / f"{name}-{engine}")
            ports[name, engine] = stack.enter_context(serving(place, engine))
        yield ports


def cases(
    ports: dict[tuple[str, str], int], clients: Sequence[int], prompt: int, tokens: int
) -> Iterator[tuple[tuple[str, str, int], partial]]:
    """Whole loads, by model, engine and number of clients."""

    def load(port: int, count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(partial(ask, port, prompt, tokens), range(count)))

    for (name, engine), port in ports.items():
        for count in clients:
            yield (name, engine, count), partial(load, port, count)
