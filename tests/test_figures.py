"""The notebooks' figures: each axis is labelled and names its unit; run with -m notebooks."""

import inspect
import re

import numpy as np
import pytest

pytestmark = pytest.mark.notebooks

RANDOM = np.random.default_rng(0)
NAMES = ["0 kda", "0 ffn", "output"]
WEIGHTS = RANDOM.random((3, 5, 4))
WEIGHTS[0, :, :3] = np.nan
ROWS = [
    {"tile": tile, "arch": arch, "vgprs": 80, "agprs": 4, "lds": 40_000}
    for tile in ("64 x 256, 4 warps", "16 x 64, 1 warps")
    for arch in ("gfx942", "gfx950")
]
MADE = {
    "decay": ({0: RANDOM.random((2, 4)), 3: RANDOM.random((2, 4))}, RANDOM.random((9, 2, 4)), 3),
    "state_norms": ({0: RANDOM.random((9, 2)), 3: RANDOM.random((9, 2))}, 3),
    "recall": ({0: (RANDOM.random(16), RANDOM.random(16))}, 16),
    "forms": (RANDOM.random(16), (16, 64), {"one": RANDOM.random(2), "other": RANDOM.random(2)}),
    "reads_by_depth": (NAMES, WEIGHTS.mean(axis=1)),
    "reads_by_token": (list("tokens")[:5], WEIGHTS[1], "0 ffn"),
    "source_count": (NAMES, RANDOM.random((3, 5)), np.array([1, 2, 2])),
    "router_load": ([1, 2], RANDOM.random((2, 8))),
    "overlap": (range(1, 5), {"rows": RANDOM.random(4)}, 10.0, 100.0),
    "quantization": (
        {"a": RANDOM.random(3), "b": RANDOM.random(3)},
        np.arange(8.0),
        {"c": RANDOM.random(8), "d": RANDOM.random(8)},
    ),
    "acceptance": ({"text": RANDOM.random(7), "code": RANDOM.random(7)},),
    "speed": ((1, 4), RANDOM.random(2), RANDOM.random(2)),
    "paths": ({"auto": {"stock/prefill": 1, "specialized/": 5}, "stock": {"stock/backend": 6}},),
    "roofline": ({"W = 1": (1e6, 1e6), "W = 8": (8e6, 1e6)},),
    "resources": (ROWS, {"gfx942": 65536, "gfx950": 163840}),
}
UNIT = re.compile(r".+ \([^()]+\)")


@pytest.fixture(scope="module")
def figures():
    import matplotlib

    matplotlib.use("agg")
    from k3jax.explore import figures

    return figures


def test_every_figure_is_tried(figures):
    public = inspect.getmembers(figures, inspect.isfunction)
    drawing = {
        name for name, each in public if inspect.signature(each).return_annotation == "Figure"
    }
    assert drawing == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_axes_name_their_units(figures, name):
    figure = getattr(figures, name)(*MADE[name])
    figure.draw_without_rendering()
    for axes in figure.axes:
        is_bar = axes.get_label() == "<colorbar>"
        labels = [axes.get_ylabel()] if is_bar else [axes.get_xlabel(), axes.get_ylabel()]
        assert all(UNIT.fullmatch(text) for text in labels), labels
        assert is_bar or axes.get_title(loc="left")
        assert is_bar or axes.xaxis.label.get_size() == figures.STYLE["axes.labelsize"]


@pytest.mark.parametrize("name", MADE)
def test_labels_do_not_touch(figures, name):
    """Titles and axis labels lie apart from each other, and inside the figure."""
    figure = getattr(figures, name)(*MADE[name])
    figure.draw_without_rendering()
    whole = figure.bbox
    boxes = [
        text.get_window_extent()
        for axes in figure.axes
        for text in (axes.xaxis.label, axes.yaxis.label, axes._left_title)
        if text.get_text()
    ]
    for place, box in enumerate(boxes):
        assert box.union([box, whole]).size == pytest.approx(whole.size, abs=2)
        assert not any(box.overlaps(other) for other in boxes[:place]), name
