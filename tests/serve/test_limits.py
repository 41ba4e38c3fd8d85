"""Keys, sizes, times and origins: what is let in; and clients that send or read badly."""

import contextlib
import gzip
import json
import re
import socket
import threading
import time

import pytest
from fake_engine import script
from waiting import eventually

import k3jax.serve.http
from k3jax.serve.__main__ import front_settings, main
from k3jax.serve.limits import KEYS_VARIABLE, Keys, read_keys

KEY = "sk-secret-1"
JSON = {"Content-Type": "application/json"}
GOOD = {"prompt": script("right■")}


def lines(server):
    """The server's log, once its last request is in it."""
    return [json.loads(line) for line in server.logged.getvalue().splitlines()]


def connect(server, text=b""):
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(text)
    return connection


def post_head(route="/v1/completions", **headers):
    given = {"Host": "x", **JSON, **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
    return f"POST {route} HTTP/1.1\r\n{head}\r\n".encode()


def receive_ready(connection):
    """Read a whole reply of /ready."""
    text = b""
    while not text.endswith(b"}"):
        piece = connection.recv(1000)
        assert piece, "the connection was closed"
        text += piece
    assert text.startswith(b"HTTP/1.1 200 OK")


def serves(server):
    """Whether a good request is answered; it comes in one piece, however short the limits are."""
    content = json.dumps(GOOD).encode()
    head = post_head(Content_Length=len(content), Connection="close")
    with connect(server, head + content) as connection:
        return b'"text":"right"' in b"".join(iter(lambda: connection.recv(1000), b""))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": "Bearer \xff"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer  {KEY}"}, 200),
        ({"Authorization": "Bearer two"}, 200),
    ],
)
def test_keys(make_server, headers, status):
    server = make_server(keys=Keys([KEY, "two"]))
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    for method, route in [("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions")]:
        response = server.http.request(method, route, headers=headers, json=GOOD)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    assert server.link.requests == {} or status == 200
    for route in ("/", "/page/main.js", "/health", "/ready"):
        assert server.http.get(route).status_code == 200
    assert KEY not in server.logged.getvalue()
    assert KEY not in repr(Keys([KEY]))


def test_where_keys_come_from(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert not read_keys(None)
    monkeypatch.setenv(KEYS_VARIABLE, "a, b")
    assert read_keys(None).allow(b"Bearer b")
    path = tmp_path / "keys"
    path.write_text("# ours\n\n one \ntwo\n")
    keys = front_settings(["--api-keys", str(path)]).limits.keys
    allowed = [keys.allow(b"Bearer " + key) for key in (b"one", b"two", b"b", b"# ours", b"")]
    assert allowed == [True, True, False, False, False]
    for content, message in [("# none\n", "holds no keys"), ("bad key\n", "cannot carry")]:
        path.write_text(content)
        assert main(["--port=0", "--api-keys", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["--port=0", "--api-keys", str(tmp_path / "no")]) == 2
    assert f"--api-keys {tmp_path / 'no'} cannot be read" in capsys.readouterr().err


def test_flags():
    flags = "--max-body 0.5 --max-waiting 7 --request-seconds 2.5 --log json --allow-origin a"
    limits = front_settings(flags.split()).limits
    assert (limits.body_bytes, limits.max_waiting, limits.request_seconds) == (2**19, 7, 2.5)
    assert (limits.log, limits.origins) == ("json", ("a",))
    for flags in ("--max-body 0", "--request-seconds nan", "--max-waiting -1", "--log loud"):
        with pytest.raises(SystemExit):
            front_settings(flags.split())


def test_other_origins_are_let_in_only_if_named(make_server):
    ours = {"Origin": "https://chat.example"}
    asking = {**ours, "Access-Control-Request-Method": "POST"}
    closed = make_server()
    assert "access-control-allow-origin" not in closed.http.get("/ready", headers=ours).headers
    assert closed.http.options("/v1/completions", headers=asking).status_code == 405
    server = make_server(origins=("https://chat.example",), keys=Keys([KEY]))
    for response in (
        server.http.options("/v1/completions", headers=asking),
        server.http.post("/v1/completions", headers=ours),  # the 401 can be read, too
    ):
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
    other = server.http.get("/ready", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("given", ["mine-1", "a b", "x" * 200, "", "é\x7f"])
def test_requests_have_ids(make_server, given):
    server = make_server()
    headers = {"X-Request-Id": given.encode("latin-1")}
    response = server.http.post("/v1/completions", json=GOOD, headers=headers)
    name = response.headers["x-request-id"]
    assert name == given if given == "mine-1" else re.fullmatch("[0-9a-f]{24}", name)
    eventually(lambda: server.logged.getvalue())
    (line,) = lines(server)
    assert (line["event"], line["id"], line["status"]) == ("request", name, 200)
    assert (line["method"], line["path"]) == ("POST", "/v1/completions")
    assert (line["completion_tokens"], line["prompt_tokens"] > 5) == (6, True)
    assert line["seconds"] >= 0


def test_errors_and_leavers_are_logged(make_server):
    server = make_server()
    assert server.http.get("/no/such%0Aroute").headers["x-request-id"]
    for route in ("/health", "/ready", "/metrics"):  # polled all the time
        assert server.http.get(route).status_code == 200
    body = {"prompt": script("a" * 99, delay=0.2), "stream": True, "max_tokens": 99}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    eventually(lambda: len(lines(server)) == 2)
    missing, left = lines(server)
    assert (missing["status"], missing["path"]) == (404, "/no/such\\nroute")
    assert 0 < left["completion_tokens"] < 99


def test_bodies_that_are_too_large(make_server):
    server = make_server(body_bytes=1000, bodies_bytes=1000)
    large = {"prompt": "x" * 1000}
    assert server.http.post("/v1/completions", json=large).status_code == 413

    def pieces():
        for _ in range(200):
            yield b"[" * 10

    response = server.http.post("/v1/completions", content=pieces(), headers=JSON)
    assert response.status_code == 413
    assert "1000 bytes at most" in response.json()["error"]["message"]
    with connect(server, post_head(Content_Length=10**15)) as connection:
        assert b" 413 " in connection.recv(1000)
    assert serves(server)


def test_all_bodies_together_are_bounded(make_server):
    server = make_server(body_bytes=1000, bodies_bytes=1500)
    half = {"prompt": "x" * 700}
    with connect(server, post_head(Content_Length=1000) + b"x" * 999) as connection:
        eventually(
            lambda: server.http.post("/tokenize", json={"prompt": "x" * 700}).status_code == 503
        )
        assert serves(server)
        connection.sendall(b"x")
        assert b" 400 " in connection.recv(1000)
    assert server.http.post("/tokenize", json=half).status_code == 200


def test_bodies_that_do_not_come(make_server):
    server = make_server(body_seconds=0.2)
    with connect(server, post_head(Content_Length=9) + b"{") as connection:
        assert b" 408 " in connection.recv(1000)
    with connect(server, post_head(Content_Length=9) + b"{"):
        pass  # it goes in the middle
    assert serves(server)


def test_heads_that_do_not_come(make_server, monkeypatch):
    monkeypatch.setattr(k3jax.serve.http, "HEAD_SECONDS", 1.0)
    server = make_server()
    with connect(server) as silent, connect(server, b"GET /ready HT") as half:
        whole = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
        with connect(server, whole) as patient:
            receive_ready(patient)
            for connection in (silent, half):
                assert connection.recv(1000) == b""  # closed
            patient.sendall(whole)  # an idle connection that has been good stays
            receive_ready(patient)
    body = {"prompt": script("a■", delay=1.0)}  # an answer may take longer than a head
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a"


LARGE = {"prompt": script("a"), "ignore_eos": True, "max_tokens": 3900, "n": 20, "logprobs": 20}


def test_a_client_that_does_not_read_its_answer_is_cut_off(make_server, monkeypatch):
    monkeypatch.setattr(k3jax.serve.http, "IDLE_SECONDS", 1)
    server = make_server()
    content = json.dumps({**LARGE, "n": 4}).encode()
    with connect(server, post_head(Content_Length=len(content)) + content):
        eventually(lambda: server.logged.getvalue(), seconds=120)
        assert serves(server)
        assert server.http.get("/ready").status_code == 200  # its connection then idles
        eventually(lambda: not server.connections())


def test_a_client_that_does_not_read_is_let_go(make_server):
    server = make_server(write_seconds=0.3)
    content = json.dumps({**LARGE, "stream": True}).encode()
    with connect(server, post_head(Content_Length=len(content)) + content) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        assert serves(server)
        eventually(lambda: server.client.open_requests == 0, seconds=100)
        eventually(lambda: "did not read" in server.logged.getvalue())
    assert serves(server)


@pytest.mark.parametrize("streamed", [False, True])
def test_answers_that_take_too_long(make_server, streamed):
    server = make_server(request_seconds=1.0)
    body = {"prompt": script("aa", delay=10), "max_tokens": 99, "stream": streamed}
    begin = time.monotonic()
    response = server.http.post("/v1/completions", json=body)
    assert time.monotonic() - begin > 0.9
    assert response.status_code == (200 if streamed else 408)
    assert "not whole within 1 s" in response.text
    eventually(lambda: len(server.link.aborted) == 1)
    eventually(lambda: serves(server))  # within the second that it too has


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not JSON: "),
        (b'{"prompt": "\xff"}', "can't decode byte 0xff in position 12"),
        (gzip.compress(b"{}"), "can't decode byte 0x8b in position 1"),
        (b"[" * 100_000, "recursion depth"),
        (b'{"a":' * 100_000, "recursion depth"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "has 5000 digits"),
        (b"", "is empty"),
        (b"{" * 10, "is not JSON: Expecting property name"),
        (b"\x00", "is not JSON: "),
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_bodies_that_are_no_json(server, route, content, message):
    response = server.http.post(route, content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert message in response.json()["error"]["message"]


def nested(depth, inside):
    """A JSON text of an object in which objects stand so deep."""
    return '{"properties": {"a": ' * depth + inside + "}}" * depth


def form_of(schema):
    return f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}'


def tools_of(schema):
    return f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]'


@pytest.mark.parametrize("depth", [100, 400, 20_000])
@pytest.mark.parametrize(
    "field",
    [
        form_of,
        tools_of,
        lambda deep: f'"tool_choice": "required", {tools_of(deep)}',
        lambda deep: f'"chat_template_kwargs": {deep}',
        lambda deep: f'"logit_bias": {deep}',
        lambda deep: f'"stop": {deep}',
    ],
    ids=["form", "tools", "calls", "template", "bias", "stop"],
)
def test_values_that_are_deep(server, depth, field):
    """Where they may be anything they are read, or refused, but nothing breaks."""
    deep = field(nested(depth, '{"type": "string"}'))
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], {deep}}}'
    response = server.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code in (200, 400), response.text
    assert serves(server)


def test_many_connections_on_which_nothing_comes(make_server, monkeypatch):
    monkeypatch.setattr(k3jax.serve.http, "HEAD_SECONDS", 1.0)
    server = make_server(body_seconds=1.0)
    starts = [b"", b"POST /v1/comp", post_head(Content_Length=100), post_head() + b"{" * 10]
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server, start)) for start in starts * 50]
        assert serves(server)
        for connection in silent:
            with contextlib.suppress(ConnectionError):
                assert b" 200 " not in connection.recv(1000)
        assert serves(server)
    eventually(lambda: not server.connections())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "word " * 400_000},
        {"prompt": [7] * 1_000_000},
        {"prompt": "x", "stop": ["y"] * 1_000_000},
        {"prompt": "x", "logit_bias": {str(n): 1.0 for n in range(100_000)}},
    ],
    ids=["text", "ids", "stops", "biases"],
)
def test_a_body_of_megabytes_holds_nobody_up_for_long(server, body):
    content = json.dumps(body).encode()
    replies, waits = [], []

    def ask():
        replies.append(server.http.post("/v1/completions", content=content, headers=JSON))

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        begin = time.process_time()  # what other processes take does not count
        assert serves(server)
        waits.append(time.process_time() - begin)
    assert replies[0].status_code == 400
    assert max(waits) < 5.0


def test_noise_on_the_line(server):
    for text in (b"\x00" * 100, b"GET /\r\n\r\n", b"POST\r\n\r\n", b"x" * 200_000):
        # The server may close the connection before all of it is sent.
        with connect(server) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(text)
            assert b" 200 " not in connection.recv(1000)
    assert serves(server)
