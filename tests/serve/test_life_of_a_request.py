"""Clients that go, engines that are not there, too many requests; what an operator asks."""

import re
import socket
import threading
import time

import pytest
from fake_engine import INFO, TOKENIZER, ids_of, script
from waiting import eventually

import k3jax.serve.client
import k3jax.serve.sse
from k3jax.serve.link import Fatal, Progress, Ready

LONG = script("a" * 200, delay=0.05)


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


ROUTES = [
    ("/v1/completions", {"prompt": LONG, "max_tokens": 200}),
    ("/v1/chat/completions", chat(LONG)),
]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_client_that_leaves_a_stream_frees_its_slots_at_once(make_server, route, body):
    server = make_server()
    with server.http.stream("POST", route, json={**body, "stream": True, "n": 2}) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.client.open_requests == 2
    eventually(lambda: len(server.link.aborted) == 2)
    assert sorted(server.link.aborted) == sorted(server.link.requests)
    assert server.client.open_requests == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_client_that_leaves_before_the_first_token(make_server, route, body, streamed):
    server = make_server()
    slow = script("a", delay=60)
    request = server.http.build_request(
        "POST", route, json={**body, "prompt": slow, **chat(slow), "stream": streamed}
    )
    head = f"POST {route} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in request.headers.items()
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n" + request.content)
        eventually(lambda: server.client.open_requests == 1)
    eventually(lambda: len(server.link.aborted) == 1)
    assert server.client.open_requests == 0


def test_a_finished_request_is_not_aborted(make_server):
    server = make_server()
    assert server.http.post("/v1/completions", json={"prompt": script("a■")}).status_code == 200
    assert server.link.aborted == []
    assert server.client.open_requests == 0


def test_one_choice_that_fails_ends_the_others(make_server):
    server = make_server()
    prompts = [LONG, script("a", error="a value is not finite")]
    response = server.http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 100})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["message"]) == ("server_error", "a value is not finite")
    assert len(server.link.aborted) == 1


def test_too_many_requests_are_told_to_come_again(make_server):
    server = make_server(max_waiting=2)  # beside the four slots
    with server.http.stream("POST", ROUTES[0][0], json={**ROUTES[0][1], "stream": True, "n": 6}):
        response = server.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
    eventually(lambda: server.client.open_requests == 0)
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_more_answers_than_ever_fit_are_refused_before_their_prompts_are_read(server):
    body = {"prompt": ["x"] * 300_000, "n": 128}
    begin = time.process_time()
    response = server.http.post("/v1/completions", json=body)
    assert time.process_time() - begin < 10  # to read them all takes minutes
    assert response.status_code == 400
    assert "38400000 answers" in response.json()["error"]["message"]


def test_a_silent_stream_is_kept_alive(make_server, monkeypatch):
    monkeypatch.setattr(k3jax.serve.sse, "KEEP_ALIVE_SECONDS", 0.05)
    server = make_server()
    body = {"prompt": script("■", delay=1.0), "stream": True}
    text = server.http.post("/v1/completions", json=body).text
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")


def test_states_of_the_engine(make_server):
    server = make_server(ready=False)
    server.call(server.client.handle, Progress("loads shard 3 of 96"))
    assert server.http.get("/health").status_code == 200
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()["detail"]) == (503, "loads shard 3 of 96")
    response = server.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert "loads shard 3 of 96" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"
    server.link.client = server.client
    server.call(server.client.handle, Ready(INFO))
    assert server.http.get("/ready").json()["status"] == "ready"
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    server.call(server.client.drain)
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 503
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503


def test_an_engine_that_dies_ends_open_requests_with_an_error(make_server):
    server = make_server()
    replies = []

    def post(body):
        replies.append(server.http.post("/v1/completions", json=body))

    bodies = [{"prompt": LONG, "max_tokens": 200, "stream": stream} for stream in (True, False)]
    threads = [threading.Thread(target=post, args=[body]) for body in bodies]
    for thread in threads:
        thread.start()
    eventually(lambda: server.client.open_requests == 2)
    server.call(server.client.handle, Fatal("rank 0: BIT_SLOT", kernels=True))
    for thread in threads:
        thread.join()
    stream, whole = sorted(replies, key=lambda reply: reply.status_code)
    assert stream.status_code == 200
    assert '"message":"the engine failed: rank 0: BIT_SLOT"' in stream.text
    assert "[DONE]" not in stream.text
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert "BIT_SLOT" in health.json()["detail"]
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    assert server.http.get("/metrics").text.count('k3jax_health{rank="0"} 1.0') == 1


def test_metrics(make_server):
    server = make_server()
    server.http.post("/v1/completions", json={"prompt": script("abcd■", group=2), "max_tokens": 9})
    server.http.post("/v1/completions", json={"prompt": script("■", error="no")})
    text = server.http.get("/metrics").text
    values = dict(re.findall(r"^(k3jax_[^ ]+) ([0-9.e+-]+)$", text, re.MULTILINE))
    assert values['k3jax_tokens_total{kind="generated"}'] == "5.0"
    assert float(values['k3jax_tokens_total{kind="prompt"}']) > 20
    assert values['k3jax_accepted_total{position="1"}'] == "2.0"
    assert values['k3jax_steps_total{path="stock",reason="backend"}'] == "7.0"
    assert (values["k3jax_slots_in_use"], values["k3jax_pages_in_use"]) == ("1.0", "2.0")
    assert (values["k3jax_ttft_seconds_count"], values["k3jax_tpot_seconds_count"]) == ("1.0",) * 2
    assert values['k3jax_health{rank="0"}'] == "0.0"
    assert values["k3jax_compilations_total"] == "0.0"


def test_tokenize_and_detokenize(server):
    ids = ids_of("hé⟨")
    reply = server.http.post("/tokenize", json={"prompt": "hé<|open|>"}).json()
    assert reply == {
        "count": 11,
        "max_model_len": 4000,
        "tokens": TOKENIZER.encode("hé<|open|>"),
    }
    conversation = server.http.post("/tokenize", json=chat("Hi")).json()["tokens"]
    assert TOKENIZER.decode(conversation).endswith('role="assistant"<|sep|><|open|>think<|sep|>')
    told = chat("Hi", reasoning_effort="low", max_tokens=2)
    server.http.post("/v1/chat/completions", json=told)
    prompt = list(server.link.requests.values())[-1].prompt_ids
    assert server.http.post("/tokenize", json=told).json()["tokens"] == prompt != conversation
    back = server.http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": "hé<|open|>"}
    for route, body, param in [
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/tokenize", {}, None),
    ]:
        response = server.http.post(route, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_what_is_not_there(server):
    for response, message in (
        (server.http.get("/v1/nothing"), "there is no GET /v1/nothing here: /docs says what"),
        (server.http.post("/chat/completions", json={}), "there is no POST /chat/completions here"),
        (server.http.get("/v1/models/other"), "there is no model 'other' here"),
        (server.http.get("/v1/completions"), "/v1/completions takes POST, not GET"),
    ):
        assert response.status_code in (404, 405)
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert message in response.json()["error"]["message"]
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 4000


@pytest.mark.parametrize("route", ["/", "/health", "/v1/models", "/v1/completions"])
def test_a_head_is_that_of_a_get(server, route):
    get, head = server.http.get(route), server.http.head(route)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_a_profile_of_the_next_steps(make_server, tmp_path, monkeypatch):
    assert make_server().http.post("/admin/trace", json={}).status_code == 400  # no --trace-dir
    monkeypatch.setattr(k3jax.serve.client, "TRACE_SECONDS", 0.2)
    server = make_server(trace_directory=tmp_path)
    reply = server.http.post("/admin/trace", json={"steps": 3}).json()
    (trace,) = server.link.traces
    assert (trace.steps, trace.directory) == (3, reply["directory"])
    assert reply["directory"].startswith(str(tmp_path))
    failed = server.http.post("/admin/trace", json={"steps": 99})
    assert (failed.status_code, "no room" in failed.text) == (500, True)
    assert server.http.post("/admin/trace", json={"steps": 100}).status_code == 408
    assert server.http.post("/admin/trace", json={"steps": 0}).status_code == 400
    assert server.http.post("/admin/trace", json={}).json()["steps"] == 16
