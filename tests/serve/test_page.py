"""The page at `/` in headless Chromium: run with -m browser, after chromium-headless-shell and
the extra `browser` are installed."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from fake_engine import script
from waiting import eventually

from k3jax.serve.limits import Keys

pytestmark = pytest.mark.browser

CALL = (
    '⟨tools§⟨call tool="weather" index="1"§⟨argument key="city" type="string"§Bern⟩argument§'
    "⟩call§⟩tools§⟩message§■"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PHONE = {"width": 375, "height": 667}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    assert path, "install Debian's chromium-headless-shell"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """Pages at `/`; nothing may be asked of another host, and no script may fail."""
    contexts, problems = [], []

    def note(request):
        if not request.url.startswith(page_server.url):
            problems.append(request.url)

    def make(of=server, **options):
        nonlocal page_server
        page_server = of
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("request", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(of.url)
        page.get_by_role("status").get_by_text("ready").wait_for()
        return page

    page_server = server
    yield make
    for context in contexts:
        context.close()
    assert problems == []


def picture(page, name):
    """Keep a screenshot where K3JAX_PICTURES says, for people to look at."""
    if folder := os.environ.get("K3JAX_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def say(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last_request(server):
    return list(server.link.requests.values())[-1]


def test_an_answer_streams_and_its_thinking_is_folded(open_page):
    page = open_page()
    say(page, script("Let me see.⟩think§⟨response§The answer:\n```py\nx = 1\n```\nDone.", group=3))
    page.get_by_text("Done.").wait_for()
    assert page.locator("pre").inner_text() == "x = 1"
    thought = page.get_by_text("Let me see.")
    assert not thought.is_visible()
    page.get_by_text("Thoughts").click()
    assert thought.is_visible()
    page.get_by_text(re.compile(r"tokens.*a second, first after")).wait_for()
    picture(page, "answer")


def test_what_models_say_is_never_markup(open_page):
    page = open_page()
    say(page, script("⟩think§⟨response§<img src=x onerror=alert(1)> <b>bold</b>■"))
    page.get_by_text("<b>bold</b>", exact=False).last.wait_for()
    assert page.locator(".assistant b, .assistant img").count() == 0


def test_a_call_is_a_card_whose_result_goes_back(open_page, server):
    page = open_page()
    page.get_by_label("Tools, a JSON list").fill(json.dumps(TOOLS))
    say(page, "long\n" * 50 + script("Hm.⟩think§" + CALL))
    page.get_by_role("heading", name="Calls weather").wait_for()
    assert '"city": "Bern"' in page.locator(".call pre").inner_text()
    picture(page, "call")
    field = page.get_by_label("Result of weather")
    field.fill(script("⟩think§⟨response§Sunny in Bern.■"))
    give = "field => { document.getElementById('log').scrollTop = 0; field.form.requestSubmit(); }"
    field.evaluate(give)
    answer = page.get_by_text("Sunny in Bern.", exact=True)
    answer.wait_for()
    bottom = "answer => answer.getBoundingClientRect().bottom < innerHeight"
    assert answer.evaluate(bottom)  # it is seen, wherever the card stood
    assert page.locator(".assistant").count() == 2


def test_stop_frees_the_request_and_retry_asks_again(open_page, make_server):
    server = make_server()
    page = open_page(server)
    say(page, script("⟩think§⟨response§" + "a" * 200, delay=0.05))
    page.locator(".assistant .text", has_text="aaa").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    eventually(lambda: len(server.link.aborted) == 1)
    page.get_by_role("button", name="Retry").click()
    eventually(lambda: len(server.link.requests) == 2)
    first, second = server.link.requests.values()
    assert first.prompt_ids == second.prompt_ids
    page.get_by_role("button", name="Stop").click()
    eventually(lambda: len(server.link.aborted) == 2)
    assert page.locator(".assistant").count() == 1


def test_settings_reach_the_engine(open_page, server):
    page = open_page()
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Tokens at most").fill("7")
    page.get_by_label("Seed").fill("11")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("System message").fill("Be brief.")
    say(page, script("abcdefghij■"))
    page.get_by_text("Reached the token limit.").wait_for()
    params = last_request(server).params
    assert (params.temperature, params.max_tokens, params.seed) == (0.25, 7, 11)
    page.get_by_label("Tools, a JSON list").fill("[")
    say(page, "again")
    page.get_by_text("The tools are not JSON").wait_for()


def test_an_error_is_shown_and_can_be_retried(open_page):
    page = open_page()
    say(page, script("⟩think§⟨response§ab", error="a value is not finite"))
    page.get_by_role("alert").get_by_text("a value is not finite").wait_for()
    page.get_by_role("button", name="Retry").wait_for()


def test_the_live_view(open_page):
    page = open_page()
    say(page, script("⟩think§⟨response§" + "abcd" * 10, group=4, delay=0.1))
    page.locator("#accepted .bar").nth(2).wait_for()
    page.get_by_text("Steps specialized: 0.0 %").wait_for()
    page.get_by_text("stock: backend").wait_for()
    page.get_by_text("Slots in use1 of 4").wait_for()
    assert page.get_by_text("0: well").is_visible()
    assert page.locator("#prefix").text_content() == "25 %"
    page.wait_for_function("Number(document.querySelector('#rate').textContent) > 0")
    page.wait_for_function("document.querySelector('#ttft').textContent.includes('ms')")
    picture(page, "live")


def test_everything_is_reached_by_keyboard(open_page):
    page = open_page()
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(e => e.id || e.name || e.closest('details')?.id || '')(document.activeElement)"
            )
        )
    controls = {"prompt", "send", "new", "theme", "log", "live", "settings"}
    assert controls | {"temperature", "reasoning_effort", "tools", "key"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width(open_page, scheme):
    page = open_page(viewport=PHONE, color_scheme=scheme)
    said = "unbroken" * 20 + "\n```\n" + "x" * 200 + "\n```\n"
    call = CALL.replace("weather", "what_the_weather_will_be_like").replace("Bern", "Bern" * 20)
    say(page, script(f"Hm.⟩think§⟨response§{said}⟩response§{call}", group=9))
    page.get_by_label("Result of").wait_for()
    page.get_by_role("button", name="Retry").wait_for()
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) <= PHONE["width"]
    for part in page.locator(".call h3, .call pre").all():
        assert part.evaluate("part => part.scrollWidth <= part.clientWidth")
    picture(page, f"phone-{scheme}")
    page.get_by_role("button", name="Panels").click()
    assert page.get_by_text("Tokens per second").is_visible()
    assert page.evaluate(wide) <= PHONE["width"]
    picture(page, f"phone-panels-{scheme}")


def test_with_a_key(open_page, make_server):
    page = open_page(make_server(keys=Keys(["sk-1"])))
    say(page, "x")
    page.get_by_role("alert").get_by_text("Authorization: Bearer KEY").wait_for()
    page.get_by_label("API key").fill("sk-1")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("Thoughts").wait_for()
    page.get_by_text("k3-tiny").wait_for()
    page.get_by_text("Steps specialized: 0.0 %").wait_for()


def test_the_description_of_the_api(open_page):
    page = open_page()
    page.get_by_role("link", name="API").click()
    chat = page.locator("section", has_text="POST /v1/chat/completions")
    chat.get_by_text("Request", exact=True).click()
    chat.get_by_text("messages list of ChatMessage; items ≥ 1; required").wait_for()
    temperature = chat.locator("li", has_text="temperature number; ≥ 0, ≤ 2")
    temperature.get_by_text("0 takes the likeliest token always").wait_for()
    assert chat.locator("p").first.inner_text() == "the next message of a conversation."
    assert "2147483647" not in chat.inner_text()
    picture(page, "docs")


def test_light_and_dark(open_page):
    page = open_page(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(ground) != dark
    page.reload()
    assert page.evaluate(ground) != dark


def test_events_come_whole_however_they_are_cut(open_page):
    cut = """async () => {
      const { EventReader } = await import("/page/stream.js");
      const text = ': keep-alive\\n\\ndata: {"a": 1}\\n\\ndata: [DONE]\\n\\n';
      const found = new Set();
      for (let i = 0; i <= text.length; i++) for (let j = i; j <= text.length; j++) {
        const reader = new EventReader();
        const parts = [text.slice(0, i), text.slice(i, j), text.slice(j)];
        found.add(JSON.stringify(parts.flatMap((part) => reader.push(part))));
      }
      return [...found];
    }"""
    assert open_page().evaluate(cut) == ['["{\\"a\\": 1}","[DONE]"]']


def test_what_is_computed_from_metrics(open_page):
    computed = """async () => {
      const m = await import("/page/metrics.js");
      const of = (a, b, c) => m.parseMetrics(
        `# HELP x\\nt_bucket{le="0.1"} ${a}\\nt_bucket{le="0.2"} ${b}\\n` +
        `t_bucket{le="+Inf"} ${c}\\n` +
        'k3jax_steps_total{path="stock",reason="a \\\\"b"} 3.0\\n' +
        'k3jax_steps_total{path="specialized",reason=""} 1.0\\n' +
        'k3jax_request_steps_total 4.0\\nk3jax_accepted_total{position="1"} 3.0');
      return [m.quantile(of(4, 8, 8), of(4, 4, 4), "t", 0.5), m.quantile(of(0, 0, 1), [], "t", 0.5),
        m.quantile(of(1, 1, 1), of(1, 1, 1), "t", 0.5) === undefined,
        m.stepShares(of(0, 0, 0)), m.acceptance(of(0, 0, 0))];
    }"""
    middle, beyond, nothing, steps, accepted = open_page().evaluate(computed)
    assert middle == pytest.approx(0.15)
    assert beyond == pytest.approx(0.2)  # as far as the buckets tell
    assert nothing
    assert [(step["reason"], step["share"]) for step in steps] == [('a "b', 0.75), ("", 0.25)]
    assert accepted == [{"position": 1, "share": 0.75}]
