"""Every route, fuzzed from the server's own description: no 5xx, and replies as described."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = int(os.environ.get("K3JAX_FUZZ_EXAMPLES", "10"))  # of each route
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


ROUTES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models",
    "/v1/models/{name}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/metrics",
    "/admin/trace",
]

WITH_BODY = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/admin/trace",
]


@pytest.fixture(scope="module")
def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [operation.ok() for operation in schema.get_all_operations()]
    assert sorted(operation.path for operation in found) == sorted(ROUTES)
    return {operation.path: operation for operation in found}


@pytest.mark.parametrize(
    ("route", "mode"),
    [(route, GenerationMode.POSITIVE) for route in ROUTES]
    + [(route, GenerationMode.NEGATIVE) for route in WITH_BODY],
)
def test_routes(server, operations, route, mode):
    operation = operations[route]

    @settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=HealthCheck)
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(checks=CHECKS, timeout=30)

    check()
    assert server.http.get("/ready").status_code == 200
    assert server.client.open_requests == 0
