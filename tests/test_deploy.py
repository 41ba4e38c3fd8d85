"""What deploy/ says of flags and metrics is what the server has."""

import asyncio
import configparser
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from k3jax.request import Delta, Stats
from k3jax.serve.__main__ import _parser, front_settings
from k3jax.serve.link import ReadyInfo
from k3jax.serve.metrics import Metrics

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
TEXT = (DEPLOY / "README.md").read_text()


@pytest.fixture(scope="module")
def metrics():
    """The names of all metrics, as a scrape gives them."""
    metrics = Metrics()
    metrics.engine = os.getpid()
    metrics.info = ReadyInfo(model="m", vocab_size=1, max_context=1, slots=1, pages=1)
    numbers = dict.fromkeys(
        [
            "waiting",
            "running",
            "slots_in_use",
            "slots",
            "pages_in_use",
            "pages",
            "prompt_tokens",
            "generated_tokens",
            "preemptions",
        ],
        1,
    )
    metrics.stats = Stats(**numbers, finished={}, steps={"specialized/": 1, "stock/prefill": 1})
    metrics.count(Delta(request_id="r", token_ids=[1, 2]), first=False)
    metrics.observe_first(1.0)
    metrics.observe_last(1.0, 2)

    async def scrape():
        return metrics.text().decode()

    text = asyncio.run(scrape())
    samples = set(re.findall(r"^(k3jax_\w+)(?=[ {])", text, re.MULTILINE))
    return {name for name in samples if not name.endswith("_created")}


def base(name):
    return re.sub(r"_(bucket|count|sum)$", "", name)


def test_the_table_of_metrics(metrics):
    told = set(re.findall(r"`(k3jax_\w+?)(?:\{[\w,]+\})?`", TEXT))
    assert told == {base(name) for name in metrics}


def test_the_table_of_flags():
    table = TEXT.partition("## Flags")[2].partition("## Metrics")[0]
    told = set(re.findall(r"`(--[\w-]+)", table))
    there = {flag for action in _parser()._actions for flag in action.option_strings}
    assert told == {flag for flag in there if flag.startswith("--")} - {"--help"}


def test_the_dashboard_asks_for_metrics_that_exist(metrics):
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for expression in asked for name in re.findall(r"k3jax_\w+", expression)}
    assert used <= metrics
    shown = {base(name) for name in used}
    assert {base(name) for name in metrics} == shown
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(covered)) == len(covered)  # no panel lies on another


def test_the_unit_starts_the_server(tmp_path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "k3jax.service")
    keys = tmp_path / "api-keys"
    keys.write_text("one\n")
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[1:3] == ["-m", "k3jax.serve"]
    flags = [word.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for word in command[3:]]
    assert flags.pop() == "$K3JAX_ARGS"
    settings = front_settings(flags)
    assert settings.limits.keys.allow(b"Bearer one")
    assert int(unit["Service"]["TimeoutStopSec"]) > settings.drain_seconds


def test_the_image_copies_what_there_is():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
    (entry,) = [line for line in lines if line.startswith("ENTRYPOINT")]
    flags = json.loads(entry.removeprefix("ENTRYPOINT"))[3:]
    assert front_settings(flags).host == "0.0.0.0"
