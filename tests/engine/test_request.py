"""What a request may ask for."""

import pytest

from k3jax.request import SamplingParams

VOCAB = 48


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_parameters_out_of_range_name_field_value_and_range(field, value):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert str(value) in str(error.value)
    assert "must be in" in str(error.value)


def test_collections_out_of_range():
    with pytest.raises(ValueError, match="logit_bias of token 3"):
        SamplingParams(logit_bias={3: 101.0})
    with pytest.raises(ValueError, match="logit_bias entries"):
        SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=4, max_tokens=3)
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=list(range(33)))
    with pytest.raises(ValueError, match="token id in logit_bias"):
        SamplingParams(logit_bias={VOCAB: 1.0}).check_vocabulary(VOCAB)
