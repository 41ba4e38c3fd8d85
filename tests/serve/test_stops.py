"""Stop strings: found wherever the text is cut, never shown in part."""

from hypothesis import given
from hypothesis import strategies as st

from k3jax.serve.stops import StopMatcher


def by_hand(text, stops):
    """Read letter by letter until the text ends with a stop string, the longest if several."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


few_letters = st.text(alphabet="abc", max_size=12)


@given(few_letters, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_any_cut_gives_what_reading_letter_by_letter_gives(text, stops, data):
    matcher = StopMatcher(stops)
    want, stop = by_hand(text, stops)
    shown = ""
    while text:
        size = data.draw(st.integers(1, len(text)))
        shown += matcher.push(text[:size])
        text = text[size:]
        assert want.startswith(shown)
    assert shown + matcher.flush() == want
    assert matcher.matched == stop


def test_only_what_may_begin_a_stop_string_is_held():
    matcher = StopMatcher(["END"])
    assert matcher.push("a E") == "a "
    assert matcher.push("N") == ""
    assert matcher.push("E") == "EN"
    assert matcher.push("ND of") == ""
    assert matcher.matched == "END"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
