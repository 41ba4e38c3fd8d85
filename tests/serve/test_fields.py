"""The description of the API says what each field is for."""

from k3jax.serve import fields

REQUESTS = ("CompletionRequest", "ChatRequest", "ResponsesRequest", "TokenizeRequest")


def test_every_field_of_a_request_is_described(server):
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    for name in REQUESTS:
        for field, content in schemas[name]["properties"].items():
            assert content["description"], (name, field)


def test_no_words_are_left_over(server):
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    known = {field for schema in schemas.values() for field in schema.get("properties", ())}
    known |= {f"{name}.{field}" for name in schemas for field in schemas[name]["properties"]}
    assert set(fields.WORDS) <= known
