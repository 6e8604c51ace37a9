"""Laws of the server: whoever else is there, a request gets what `generate` gives it alone."""

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spiralformer import SpiralConfig
from spiralformer.accounting import passes_at
from spiralformer.data.tokenizer import byte_tokenizer
from spiralformer.decode import Sampling, generate
from spiralformer.decode.generate import TextStream
from spiralformer.model_folder import save_model
from tests.strategies import build

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from spiralformer.serve import engine, launch
from spiralformer.serve.app import MOST_BYTES, Settings
from spiralformer.serve.launch import bind
from spiralformer.serve.run import HEADER_BYTES, Server, open_service
from spiralformer.serve.schema import NEUTRAL, CompletionRequest

ROOT = Path(__file__).parent.parent
TOKENIZER = byte_tokenizer()
CONFIG = SpiralConfig(
    layout="1+1x{1/4,1/3,1}+1",
    hidden_size=32,
    num_heads=4,
    vocab_size=TOKENIZER.vocab_size,
    max_length=100_000,
)
ENDLESS = {"prompt": "x", "max_tokens": 90_000, "temperature": 0}
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def write_folder(folder: Path, dtype: torch.dtype = torch.float64, **changes) -> Path:
    """A model whose answers in float64 no batch can change, and whose greedy texts never end."""
    model = build(CONFIG.replace(**changes), dtype=dtype)
    model.head.weight.data[TOKENIZER.eot_id] = 0  # never the likeliest
    save_model(model, folder)
    TOKENIZER.save(folder)
    return folder


class Running:
    """A server in a thread of this process, and a client's view of it."""

    def __init__(self, folder: Path, *, limits=None, **settings) -> None:
        self.folder = folder
        given = {"name": "tiny", "seconds": 60, "max_prompt": 5000, **settings}
        self.service = open_service(folder, Settings(**given), runner="eager", **(limits or {}))
        bound = bind("127.0.0.1", 0)
        self.port = bound.getsockname()[1]
        self.server = Server(self.service)
        self.thread = threading.Thread(target=self.server.run, args=([bound],), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        assert not self.service.engine.thread.is_alive()

    def send(self, path: str, body=None, headers=None, method=None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = json.dumps(body) if isinstance(body, dict) else body
        sent = {"content-type": "application/json", **(headers or {})}
        connection.request(method or ("GET" if body is None else "POST"), path, content, sent)
        return connection.getresponse()

    def ask(self, path: str, body=None, **options) -> tuple[int, dict]:
        response = self.send(path, body, **options)
        return response.status, json.loads(response.read())

    def complete(self, **body) -> dict:
        status, answer = self.ask("/v1/completions", body)
        assert status == 200, answer
        return answer

    def stream(self, path: str = "/v1/completions", **body):
        response = self.send(path, {**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)

    def idle(self) -> None:
        """Waits until no row is taken."""
        for _ in range(600):
            if self.ask("/health")[1] == {"status": "ok", "rows": 0, "waiting": 0}:
                return
            time.sleep(0.05)
        raise AssertionError(self.ask("/health"))

    def alone(self, prompt, count: int, stops=(), **sampling) -> tuple[str, str, int]:
        """Text, reason of the end and number of tokens that `generate` finds."""
        text = TextStream(TOKENIZER.decode, stops)
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
        [new] = generate(
            self.service.model,
            [ids],
            max_new_tokens=count,
            sampling=Sampling(**sampling),
            stop_ids=[TOKENIZER.eot_id],
            stop=text.stopped,
            runner="eager",
        )
        stopped = new[-1] == TOKENIZER.eot_id or text.stopped(new)
        return text.text(new), "stop" if stopped else "length", len(new)


@contextlib.contextmanager
def running(folder: Path, **options):
    server = Running(folder, **options)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
    with running(folder, limits={"max_rows": 16}) as server:
        yield server


# ---------------------------------------------------------------------------- the same tokens


def sampling(body: dict) -> dict:
    return {k: body[k] for k in ("seed", "temperature", "top_p", "top_k", "repetition_penalty")}


def test_64_streaming_clients_each_get_what_generate_gives_alone(server):
    """Prompts from one token to several pieces, answers of any length, all ways to end."""
    draw = random.Random(0)
    requests = []
    for number in range(64):
        length = draw.choice([1, 7, 40, 200, 700])
        body = {
            "prompt": "".join(draw.choices("the cat\nsat é", k=length)),
            "max_tokens": draw.randint(1, 60),
            "seed": number,
            "temperature": draw.choice([0, 0.7, 1.0, 1.5]),
            "top_p": draw.choice([1, 0.9]),
            "top_k": draw.choice([0, 20]),
            "repetition_penalty": draw.choice([1.0, 1.3]),
            "stop": draw.choice([[], draw.sample(string.printable, 16)]),
            "stream_options": {"include_usage": True},
        }
        requests.append(body)

    def answer(body: dict) -> tuple[str, str, int]:
        *chunks, last = server.stream(**body)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert set(reasons[:-1]) <= {None}
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return text, reasons[-1], last["usage"]["completion_tokens"]

    with ThreadPoolExecutor(64) as clients:
        answers = list(clients.map(answer, requests))
    for body, got in zip(requests, answers, strict=True):
        assert got == server.alone(
            body["prompt"], body["max_tokens"], body["stop"], **sampling(body)
        )
    assert {"stop", "length"} == {reason for _, reason, _ in answers}
    server.idle()


def test_several_prompts_and_answers_draw_as_the_rows_of_a_batch(server):
    prompts = ["one", [116, 119, 111]]
    answer = server.complete(prompt=prompts, n=2, max_tokens=9, seed=5)
    rows = [prompt for prompt in prompts for _ in range(2)]
    wanted = [server.alone(prompt, 9, seed=5 + b)[0] for b, prompt in enumerate(rows)]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 6  # each prompt once
    assert answer["usage"]["completion_tokens"] <= 36


def test_without_a_seed_answers_differ_and_an_empty_prompt_begins_a_text(server):
    texts = {server.complete(prompt="", max_tokens=30)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3
    greedy = server.complete(prompt="", max_tokens=12, temperature=0)["choices"][0]["text"]
    assert greedy == server.alone([TOKENIZER.eot_id], 12, temperature=0)[0]


def test_a_prompt_longer_than_a_piece_is_read_while_others_go_on(server):
    long = "abc " * 1000
    with ThreadPoolExecutor(2) as clients:
        short = clients.submit(lambda: list(server.stream(prompt="x", max_tokens=200, seed=1)))
        whole = clients.submit(server.complete, prompt=long, max_tokens=5, seed=2)
        text = "".join(chunk["choices"][0]["text"] for chunk in short.result())
    assert text == server.alone("x", 200, seed=1)[0]
    assert whole.result()["choices"][0]["text"] == server.alone(long, 5, seed=2)[0]


# ---------------------------------------------------------------------------- scores


def test_scores_are_those_of_the_forward_pass(server):
    """As lm_eval's local-completions asks for them: echo, token ids, one new token."""
    prompts = [TOKENIZER.encode("hé " * 300), [7], TOKENIZER.encode("another")]
    answer = server.complete(prompt=prompts, max_tokens=1, logprobs=3, echo=True, temperature=0)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        scores = choice["logprobs"]
        with torch.no_grad():
            exact = server.service.model(torch.tensor([prompt]))[0].log_softmax(-1)
        new = int(exact[-1].argmax())
        ids = [*prompt, new]
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        wanted = [float(exact[i, token]) for i, token in enumerate(ids[1:])]
        assert scores["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-9)
        best = [max(top.values()) for top in scores["top_logprobs"][1:]]
        assert best == pytest.approx(exact.max(-1).values.tolist(), abs=1e-9)
        assert {len(scores[key]) for key in scores} == {len(ids)}
        assert choice["text"].startswith(TOKENIZER.decode(prompt))
    text, offsets = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["text_offset"]
    assert offsets[:5] == [0, 1, 1, 2, 3]  # é is two bytes
    assert text[offsets[-2]] == " "


def test_scores_come_with_the_text_they_belong_to(server):
    body = {"prompt": "né", "max_tokens": 40, "seed": 3, "logprobs": 2, "stop": ["zz"]}
    whole = server.complete(**body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in server.stream(**body)]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [entry for chunk in chunks for entry in chunk["logprobs"][key]]
        assert parts == whole["logprobs"][key]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]


def test_a_prompt_can_be_scored_and_nothing_more(server):
    answer = server.complete(prompt="abc", max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert choice["logprobs"]["top_logprobs"] == [None, {}, {}]
    assert answer["usage"]["completion_tokens"] == 0


# ---------------------------------------------------------------------------- the loop, shown


def test_the_iterations_that_are_told_are_those_that_ran(server):
    server.idle()
    model = server.service.model
    ran: list[int] = []
    hooks = [
        model.pre.register_forward_pre_hook(lambda *_: ran.append(0)),
        model.cores[0].register_forward_pre_hook(
            lambda _, args: ran.append(ran.pop() + args[0].shape[0])
        ),
    ]
    answer = server.complete(prompt="abcd", max_tokens=30, temperature=0, iterations=True)
    for hook in hooks:
        hook.remove()
    told = answer["choices"][0]["iterations"]
    assert [len(each) for each in told[1:]] == ran[1:]  # the first is the prompt's own pass
    assert told == [list(passes_at(model.config, 3 + i)) for i in range(30)]


# ---------------------------------------------------------------------------- chat


def test_chat_goes_through_the_tokenizers_template(tmp_path):
    folder = write_folder(tmp_path / "chat")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    with running(folder) as server:
        messages = [{"role": "user", "content": "hé <b>"}]
        prompt = "[user] hé <b>\n[assistant] "
        body = {"messages": messages, "max_tokens": 20, "seed": 4}
        status, answer = server.ask("/v1/chat/completions", {**body, "logprobs": True})
        assert status == 200
        text, _, count = server.alone(prompt, 20, seed=4)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
        assert len(answer["choices"][0]["logprobs"]["content"]) == count
        assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode(prompt))
        chunks = [c["choices"][0]["delta"] for c in server.stream("/v1/chat/completions", **body)]
        assert chunks[0] == {"role": "assistant", "content": ""}
        assert "".join(chunk["content"] for chunk in chunks) == text


def test_chat_without_a_template_is_refused(server):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    status, answer = server.ask("/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "no_chat_template")


# ---------------------------------------------------------------------------- leaving, limits


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_frees_its_row(folder, streaming):
    with running(folder, limits={"max_rows": 1}, seconds=600) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps({**ENDLESS, "stream": streaming, "n": 2})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        if streaming:
            response = connection.getresponse()
            response.readline()
            response.close()
        else:
            time.sleep(0.5)
        assert server.ask("/health")[1] == {"status": "ok", "rows": 1, "waiting": 1}
        connection.close()
        assert server.complete(prompt="y", max_tokens=3)["usage"]["completion_tokens"] == 3
        server.idle()


def test_limits_are_said_and_end_what_goes_beyond(folder):
    options = {"limits": {"max_rows": 1, "max_waiting": 2}, "seconds": 1.5, "max_prompt": 10}
    with running(folder, **options) as server:
        status, answer = server.ask("/v1/completions", {"prompt": "x" * 11})
        assert status == 400
        assert "11 tokens is longer than this server's limit, 10" in answer["error"]["message"]
        status, answer = server.ask("/v1/completions", {"prompt": "x", "n": 3})
        assert status == 400
        with ThreadPoolExecutor(8) as clients:
            events = clients.submit(lambda: list(server.stream(**ENDLESS)))
            time.sleep(0.3)
            answers = list(clients.map(lambda _: server.ask("/v1/completions", ENDLESS), range(7)))
        assert events.result()[-1]["error"]["code"] == "timeout"
        assert sorted(status for status, _ in answers) == [429] * 5 + [504] * 2
        assert {a["error"]["code"] for _, a in answers} == {"rate_limit_exceeded", "timeout"}
        server.idle()


def test_a_step_that_fails_ends_its_requests_and_the_server_goes_on(server, capfd, monkeypatch):
    monkeypatch.setattr(engine, "extend", lambda *_, **__: 1 / 0)
    status, answer = server.ask("/v1/completions", {"prompt": "secret", "max_tokens": 3})
    assert (status, answer["error"]["code"]) == (500, "failed")
    monkeypatch.undo()
    assert server.complete(prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3
    said = capfd.readouterr().err
    assert "failed: ZeroDivisionError" in said
    assert "secret" not in said


# ---------------------------------------------------------------------------- bad input


def bad_bodies() -> list[bytes]:
    draw = random.Random(1)
    values = [None, True, -1, 0.5, 1e308, 2**70, "x", "", [], [1, "a"], [[]], {}, {"a": 1}, [None]]
    legal = {
        "prompt": ["x", "", [1], [[1, 2], [3]], ["a", "b"], [300]],
        "max_tokens": [None, 1, 0],
        "temperature": [None, 1, 0, 0.5],
        "top_p": [None, 1, 0.5],
        "top_k": [None, 1, -1, 2**20],
        "min_p": [None, 0, 1, 0.5],
        "repetition_penalty": [None, 1, 0.5],
        "seed": [None, 0, -1],
        "stop": [None, "x", [], ["a"]],
        "n": [None, 1],
        "stream": [None, True, False],
        "stream_options": [None, {}],
        "user": [None, "x", ""],
        "iterations": [True, False],
        "echo": [None, True, False],
        "logprobs": [None, 0, 1],
        "model": [None, "tiny"],
    }
    assert set(legal) == set(CompletionRequest.model_fields)
    bodies = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b"1" * 10_000]
    bodies += [b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b'{"temperature": 1e999}']
    bodies += [json.dumps({name: "odd"}).encode() for name in NEUTRAL]
    bodies += [json.dumps({"prompt": wrong}).encode() for wrong in ([257], [2**60], [-1], [[]])]
    while len(bodies) < 500:
        name = draw.choice([*legal, "max_tokenss", "__class__", "\u202e<script>"])
        value = draw.choice(values)
        if value not in legal.get(name, []) and (name, value) not in [("user", "x")]:
            if name in ("top_p", "temperature", "repetition_penalty", "min_p") and value == 0.5:
                continue
            if (name == "prompt" and value in ("", "x")) or (name == "stop" and value in ("x", [])):
                continue
            if name == "logprobs" and value is True:
                pass
            bodies.append(json.dumps({"prompt": "x", name: value}).encode())
    return bodies


def test_500_malformed_requests_are_refused_in_openais_shape_and_the_server_goes_on(server):
    bodies = bad_bodies()
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda body: server.ask("/v1/completions", body), bodies))
    for body, (status, answer) in zip(bodies, answers, strict=True):
        assert 400 <= status < 500, (body[:100], status, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}, body[:100]
        assert len(answer["error"]["message"].splitlines()) == 1
    assert server.complete(prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2
    server.idle()


def test_neutral_fields_of_openai_are_taken(server):
    for value in (0, -1):
        fields = {name: values[value] for name, values in NEUTRAL.items()}
        assert server.complete(prompt="x", max_tokens=1, user="me", **fields)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"path": "/nowhere"}, 404),
        ({"path": "/v1/models/other"}, 404),
        ({"path": "/v1/models/../../etc/passwd"}, 404),
        ({"path": "/v1/completions"}, 405),
        ({"path": "/v1/completions", "body": {"model": "other"}}, 404),
        ({"path": "/v1/completions", "body": "{}", "headers": {"content-type": "text/plain"}}, 415),
        ({"path": "/v1/completions", "body": b"x" * (MOST_BYTES + 1)}, 413),
        ({"path": "/v1/models", "headers": {"host": "evil.example"}}, 403),
        ({"path": "/health", "headers": {"host": "[::1"}}, 403),
    ],
)
def test_what_is_not_for_it_is_refused(server, request_, status):
    try:
        got, answer = server.ask(**request_)
    except (BrokenPipeError, ConnectionResetError):  # it did not wait for the whole body
        assert status == 413
        return
    assert got == status
    assert answer["error"]["message"]


def test_a_body_of_unknown_length_is_cut_off_and_long_headers_are_not_read(server):
    endless = (b"x" * 65536 for _ in range(200))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        assert server.ask("/v1/completions", endless)[0] == 413
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        response = server.send("/v1/models", headers={"x-long": "x" * 64 * HEADER_BYTES})
        assert response.status == 400
    assert server.ask("/health")[0] == 200


# ---------------------------------------------------------------------------- who may ask


def test_a_key_is_asked_for_where_there_is_one(folder):
    with running(folder, api_key="sésame") as server:
        key = {"authorization": "Bearer sésame".encode()}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
            status, answer = server.ask("/v1/models", headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert server.ask("/v1/completions", {"prompt": "x"}, headers=headers)[0] == 401
        assert server.ask("/v1/models", headers=key)[0] == 200
        assert server.ask("/health")[0] == 200
        assert b"API key" in server.send("/").read()


def test_pages_elsewhere_may_ask_only_if_allowed(folder, server):
    elsewhere = {"origin": "https://example.org"}
    preflight = {**elsewhere, "access-control-request-method": "POST"}
    assert not server.send("/v1/models", headers=elsewhere).headers["access-control-allow-origin"]
    refused = server.send("/v1/completions", method="OPTIONS", headers=preflight)
    assert refused.status == 405
    assert not refused.headers["access-control-allow-origin"]
    with running(folder, origins=["https://example.org"], api_key="k") as other:
        allowed = other.send("/v1/completions", method="OPTIONS", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        wrong = {**preflight, "origin": "https://evil.example"}
        refused = other.send("/v1/completions", method="OPTIONS", headers=wrong)
        assert not refused.headers["access-control-allow-origin"]


def test_the_page_runs_its_own_script_and_loads_nothing(server):
    response = server.send("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    page = response.read().decode()
    assert "://" not in page
    assert "innerHTML" not in page
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert page.count(f'nonce="{nonce}"') == page.count("<script") + page.count("<style") == 2


# ---------------------------------------------------------------------------- the command


def start(folder: Path, *options: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "spiralformer", "serve", str(folder), "--engine", "own"]
    return subprocess.Popen(
        [*command, "--port", "0", "--runner", "eager", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


@contextlib.contextmanager
def started(folder: Path, *options: str, **environment: str):
    """The command in a process of its own, and its port."""
    process = start(folder, *options, **environment)
    try:
        line = process.stderr.readline()
        yield process, int(line.partition("http://127.0.0.1:")[2].partition(" ")[0])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def post(port: int, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json", "authorization": "Bearer k"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it_cleanly_and_no_prompt_was_logged(folder, number, monkeypatch):
    with started(folder, SPIRALFORMER_API_KEY="k") as (process, port):
        assert json.loads(post(port, {"prompt": "secret", "max_tokens": 2}).read())["usage"]
        assert post(port, {"prompt": "secret", "wrong": "secret"}).status == 400
        response = post(port, {**ENDLESS, "prompt": "secret", "stream": True})
        response.readline()
        process.send_signal(number)
        *_, last = (line for line in response if line.strip())
        assert json.loads(last.decode().removeprefix("data: "))["error"]["code"] == "shutdown"
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert err.splitlines()[-1] == "stopped"
        assert "secret" not in out + err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{tmp}/none"], "none: no such folder"),
        (["{tmp}"], "no model folder: it has no config.json"),
        (["{model}", "--port", "{taken}"], "Address already in use; choose another with --port"),
        (["{model}", "--port", "70000"], "--port 70000: a port is 0…65535"),
        (["{model}", "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["{model}", "--max-rows", "0"], "--max-rows 0: must be above 0"),
        (["{model}", "--timeout", "nan"], "--timeout nan: must be above 0"),
        (["{model}", "--device", "nowhere", "--port", "0"], "--device nowhere"),
    ],
)
def test_mistakes_are_said_in_a_line(folder, tmp_path, run_command, options, message):
    with bind("127.0.0.1", 0) as taken:
        places = {"tmp": tmp_path, "model": folder, "taken": taken.getsockname()[1]}
        filled = [option.format(**places) for option in options]
        if "--port" not in filled:
            filled += ["--port", "0"]
        status, out, err = run_command("serve", *filled, "--engine", "own")
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_vllm_is_started_where_it_is_there(folder, run_command, monkeypatch):
    """In place of this process, and the key is not among its arguments."""
    calls = []
    monkeypatch.setattr(launch, "find_spec", lambda name: name == "vllm")
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call) or sys.exit(0))
    options = ["--api-key", "k", "--vllm-args", "--dtype float32", "--allow-origin", "https://a.b"]
    assert run_command("serve", folder, "--port", "0", *options)[0] == 0
    [(program, command, environment)] = calls
    assert program == command[0] == sys.executable
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--model") + 1] == str(folder)
    assert command[command.index("--served-model-name") + 1] == "tiny"
    assert command[command.index("--allowed-origins") + 1] == '["https://a.b"]'
    assert command[-2:] == ["--dtype", "float32"]
    assert "k" not in command
    assert environment["VLLM_API_KEY"] == "k"
    status, _, err = run_command("serve", folder, "--engine", "own")
    assert status == 2
    assert "needs starlette and uvicorn; pip install 'spiralformer[serve]'" in err


# ---------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the memory")
def test_memory_after_2000_requests_is_as_after_200(folder):
    draw = random.Random(2)
    with started(folder) as (process, port):

        def ask(number: int) -> None:
            body = {
                "prompt": "x" * draw.randint(1, 100),
                "max_tokens": draw.randint(1, 8),
                "stream": number % 2 == 0,
                "logprobs": draw.choice([None, 2]),
                "echo": number % 3 == 0,
            }
            response = post(port, {**body, "wrong": 1} if number % 10 == 0 else body)
            if number % 7 == 0:
                response.close()  # some do not listen to the end
            else:
                response.read()

        def resident() -> int:
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0]) * 1024

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(ask, range(200)))
            before = resident()
            list(clients.map(ask, range(200, 2000)))
        grown = resident() - before
        print(f"{before / 2**20:.1f} MiB, {grown / 2**20:+.1f} MiB")
        assert grown < 8 * 2**20


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
def test_the_page_shows_text_as_it_comes_and_the_loop_at_each_token(tmp_path):
    """In a real browser: what looks like markup stays text, and a stopped answer frees its row."""
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright here")
    name = "<img src=x onerror=alert(1)>"
    with (
        running(write_folder(tmp_path / "tiny"), name=name, api_key="k") as server,
        playwright.sync_playwright() as browsers,
    ):
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda sent: str(server.port) in sent.url or problems.append(sent.url))
        page.goto(f"http://127.0.0.1:{server.port}/")
        assert page.inner_text("h1") == name
        prompt = "<script>alert(2)</script><b>x</b>"
        page.fill("#prompt", prompt)
        page.fill("#count", "40")
        page.fill("#seed", "6")
        page.click("#go")
        page.locator(".error").wait_for()
        assert "no valid API key" in page.inner_text("#status")
        page.fill("#key", "k")
        page.click("#go")
        page.locator(".token").nth(0).wait_for()
        page.locator("#go:enabled").wait_for()
        text, _, count = server.alone(prompt, 40, seed=6, temperature=0.8)
        assert page.locator("#text").text_content() == prompt + text
        assert page.locator("#text b, #text script, #tokens img").count() == 0
        assert page.locator(".token").count() == count
        ran = [passes_at(CONFIG, len(prompt) - 1 + i) for i in range(count)]
        assert page.locator(".token i.ran").count() == sum(map(len, ran))
        assert "tokens/s" in page.inner_text("#status")
        page.fill("#count", "90000")
        page.fill("#temperature", "0")
        page.click("#go")
        page.locator(".token").nth(5).wait_for()
        page.click("#stop")
        page.locator("#go:enabled").wait_for()
        server.idle()
        assert not problems
        browser.close()
