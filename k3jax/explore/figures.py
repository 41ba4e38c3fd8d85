"""The notebooks' figures: arrays in, matplotlib figures out; every axis names its unit.

The only module that needs matplotlib: the extra `notebooks`. Colours can be told apart by readers
with any colour vision, and lines also by their dashes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from k3jax.explore.kernels import GPUS, Gpu

# Okabe and Ito's palette, without its yellow, which is too light for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
GREY = "#666666"
WIDTH, HEIGHT = 4.8, 3.4  # inches of one panel
MOST_TICKS = 48  # labels on an axis of tokens
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "image.cmap": "cividis",
}
Drawing = ParamSpec("Drawing")


def styled(draw: Callable[Drawing, Figure]) -> Callable[Drawing, Figure]:
    """Give all that a figure is made of the one style."""

    @functools.wraps(draw)
    def in_style(*args: Drawing.args, **options: Drawing.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            return draw(*args, **options)

    return in_style


def panels(columns: int = 1, *, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Any]:
    """A figure with a row of axes (a lone one as it is); sizes of a panel in inches.

    A notebook shows the figure once, where a cell ends with it.
    """
    figure, axes = plt.subplots(1, columns, figsize=(columns * width, height))
    plt.close(figure)
    return figure, axes


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and axis labels; each label ends with its unit in brackets."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def look(number: int) -> dict[str, Any]:
    """Colour and dashes of the line of this number, no two of 49 alike."""
    colours = len(COLOURS)
    return {
        "color": COLOURS[number % colours],
        "linestyle": DASHES[(number + number // colours) % len(DASHES)],
    }


def curves(
    axes: Axes, x: Sequence[float] | np.ndarray, lines: Mapping[str, np.ndarray], **options: Any
) -> None:
    """One line for each name, and a legend."""
    for number, (name, values) in enumerate(lines.items()):
        axes.plot(x, values, label=name, **look(number), **options)
    axes.legend()


def image(axes: Axes, values: np.ndarray, unit: str, *, low: float, high: float) -> None:
    """A matrix as colours with a bar that tells them; NaN stays white. Rows go down."""
    axes.grid(False)
    shown = axes.imshow(values, aspect="auto", interpolation="nearest", vmin=low, vmax=high)
    bar = axes.figure.colorbar(shown, ax=axes, label=unit, pad=0.02)
    bar.outline.set_visible(False)


def whole_numbers(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Ticks at whole numbers only."""
    if x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if y:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def powers_of_two(axes: Axes, numbers: Sequence[int]) -> None:
    """A logarithmic x axis with these ticks, written out."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(numbers))
    axes.xaxis.set_major_formatter(ScalarFormatter())


@styled
def decay(lives: Mapping[int, np.ndarray], kept: np.ndarray, layer: int) -> Figure:
    """Half-lives [H, K] by layer, and what one layer keeps at each token [T, H, K]."""
    figure, (left, right) = panels(2)
    for number, (layer_number, values) in enumerate(lives.items()):
        percent = 100 * np.arange(1, values.size + 1) / values.size
        left.plot(np.sort(values.ravel()), percent, label=f"layer {layer_number}", **look(number))
    left.set_xscale("log")
    left.set_xlim(min(0.1, *left.get_xlim()), max(1e3, *left.get_xlim()))  # decades to compare by
    left.legend(loc="lower right")
    label(left, "How long channels remember", "half-life (tokens)", "channels up to that (%)")
    image(right, kept.mean(axis=-1).T, "kept, mean of the channels (share)", low=0, high=1)
    label(right, f"Layer {layer}, token by token", "position (tokens)", "head (index)")
    whole_numbers(right, y=True)
    return figure


@styled
def state_norms(norms: Mapping[int, np.ndarray], layer: int) -> Figure:
    """Frobenius norms of the states [T, H] by layer."""
    figure, (left, right) = panels(2)
    means = {f"layer {number}": values.mean(axis=1) for number, values in norms.items()}
    curves(left, np.arange(len(norms[layer])), means, linewidth=1)
    left.set_ylim(0, 1.4 * max(values.max() for values in means.values()))  # room for the legend
    left.legend(ncols=3, loc="upper center")
    label(left, "Mean of the heads", "position (tokens)", "norm of the state (unit of the values)")
    shown = norms[layer]
    image(right, shown.T, "norm of the state (unit of the values)", low=0, high=float(shown.max()))
    label(right, f"The heads of layer {layer}", "position (tokens)", "head (index)")
    whole_numbers(right, y=True)
    return figure


@styled
def recall(found: Mapping[int, tuple[np.ndarray, np.ndarray]], longest: int) -> Figure:
    """The probe's recall and control by lag, up to `longest` tokens, by layer."""
    figure, axes = panels(width=7.2)
    lags = np.arange(1, longest + 1)  # a lag of 0 has its place at 1, on a logarithmic axis
    curves(axes, lags, {f"layer {n}": values[0][:longest] for n, values in found.items()})
    control = np.mean([values[1][:longest] for values in found.values()], axis=0)
    axes.plot(lags, control, color=GREY, linewidth=1, label="asked with another key")
    axes.legend(ncols=2)
    powers_of_two(axes, [2**n for n in range(longest.bit_length())])
    where = "written so long ago (tokens, the last one is 1)"
    label(axes, "What the state answers for an earlier token", where, "cosine to its value (1)")
    return figure


@styled
def forms(
    difference: np.ndarray, lengths: Sequence[int], times: Mapping[str, np.ndarray]
) -> Figure:
    """Difference of the recurrent and the chunked form by position, and the time of both."""
    figure, (left, right) = panels(2)
    left.semilogy(np.maximum(difference, 1e-9), color=COLOURS[0])
    ulp = float(np.finfo(np.float32).eps)
    left.axhline(ulp, color=GREY, linestyle=":", label="a float32 rounding")
    left.legend()
    label(left, "Both forms, one layer", "position (tokens)", "difference (share of the output)")
    curves(right, lengths, times, marker="o")
    right.set_ylim(bottom=0)
    powers_of_two(right, lengths)
    label(right, "Time on this machine", "prompt (tokens)", "time (µs per token)")
    return figure


@styled
def reads_by_depth(names: Sequence[str], weights: np.ndarray) -> Figure:
    """Mean weights [sublayers, M + 1] of the blocks and the running sum, by depth."""
    figure, axes = panels(width=6.4, height=max(HEIGHT, 0.9 + 0.26 * len(names)))
    image(axes, weights, "weight, mean over the tokens (share)", low=0, high=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(weights.shape[1]), source_names(weights.shape[1]))
    for row, column in np.argwhere(~np.isnan(weights)):
        value = weights[row, column]
        dark = "white" if value < 0.5 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=dark, fontsize=8)
    label(axes, "What each sublayer reads", "source (block)", "sublayer (layer and half)")
    return figure


@styled
def reads_by_token(tokens: Sequence[str], weights: np.ndarray, name: str) -> Figure:
    """The weights [T, M + 1] of one sublayer, token by token, for the first tokens."""
    tokens, weights = tokens[:MOST_TICKS], weights[:MOST_TICKS]
    figure, axes = panels(width=9.6, height=2.0 + 0.3 * weights.shape[1])
    image(axes, weights.T, "weight (share)", low=0, high=1)
    axes.set_yticks(range(weights.shape[1]), source_names(weights.shape[1]))
    axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontfamily="monospace")
    label(axes, f"Sublayer {name}, token by token", "position (tokens)", "source (block)")
    return figure


def source_names(columns: int) -> list[str]:
    """The columns of a mix: M blocks and the running sum."""
    return [*(f"block {n}" for n in range(columns - 1)), "running sum"]


@styled
def source_count(names: Sequence[str], sources: np.ndarray, most: np.ndarray) -> Figure:
    """How many sources each sublayer's mix has in effect [sublayers, T], of `most` [sublayers]."""
    figure, axes = panels(width=7.2)
    at = np.arange(len(names))
    low, middle, high = np.percentile(sources, (10, 50, 90), axis=1)
    axes.step(at, most, where="mid", color=GREY, linestyle=":", label="that exist")
    axes.fill_between(at, low, high, color=COLOURS[0], alpha=0.25, label="8 in 10 tokens")
    axes.plot(at, middle, color=COLOURS[0], marker="o", markersize=4, label="median token")
    axes.set_xticks(at, names, rotation=90)
    axes.set_ylim(bottom=0)
    axes.legend()
    label(
        axes, "Sources in effect", "sublayer (layer and half)", "sources, exp of entropy (number)"
    )
    return figure


@styled
def router_load(layers: Sequence[int], load: np.ndarray) -> Figure:
    """Load of each expert relative to an even one [layers, E]: sorted, and expert by expert."""
    figure, (left, right) = panels(2)
    ranks = np.arange(1, load.shape[1] + 1)
    sorted_load = {f"layer {n}": np.sort(row)[::-1] for n, row in zip(layers, load, strict=True)}
    curves(left, ranks, sorted_load)
    left.axhline(1, color=GREY, linewidth=1)
    left.set_ylim(bottom=0)
    label(left, "Busiest expert first", "rank of the expert (index)", "load (times an even one)")
    high = max(2.0, float(np.ceil(load.max())))
    image(right, load, "load (times an even one)", low=0, high=high)
    right.set_yticks(range(len(layers)), layers)
    label(right, "Expert by expert", "expert (index)", "layer (index)")
    whole_numbers(right, x=True)
    return figure


@styled
def overlap(
    rows: Sequence[int], found: Mapping[str, np.ndarray], each: float, other: float
) -> Figure:
    """Distinct experts of a step by its rows, and the bytes that they cost.

    `found` is their number [rows] by name; `each` and `other` are the bytes of an expert and of
    what a layer reads anyway.
    """
    figure, (left, right) = panels(2)
    curves(left, rows, found, marker="o", markersize=4)
    label(
        left, "Experts that a step wakes", "rows of the step (tokens)", "distinct experts (number)"
    )
    read = {name: (other + values * each) / 1e3 for name, values in found.items()}
    curves(right, rows, read, marker="o", markersize=4)
    right.axhline(other / 1e3, color=GREY, linestyle=":", label="whatever the rows")
    right.legend()
    label(right, "What it reads", "rows of the step (tokens)", "read in a layer (kB)")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        whole_numbers(axes, x=True)
    return figure


@styled
def quantization(
    errors: Mapping[str, np.ndarray], values: np.ndarray, shares: Mapping[str, np.ndarray]
) -> Figure:
    """Relative errors by layer of each matrix, and how often each magnitude is used (percent)."""
    figure, (left, right) = panels(2, width=5.6, height=3.8)
    for number, (name, error) in enumerate(errors.items()):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": "os^Dv<>P"[number % 8]}
        left.plot(100 * error, label=name, linewidth=0.8, markersize=5, **style)
    left.set_ylim(bottom=-0.5)
    left.legend(ncols=2, loc="center")
    whole_numbers(left, x=True)
    label(left, "Rounding a matrix to MXFP4", "layer (index)", "change, RMS (% of the matrix)")
    width = 0.8 / len(shares)
    places = np.arange(len(values))
    for number, (name, share) in enumerate(shares.items()):
        at = places + (number - (len(shares) - 1) / 2) * width
        right.bar(at, share, width, label=name, color=COLOURS[number % len(COLOURS)])
    right.set_xticks(places, [f"{value:g}" for value in values])
    right.legend()
    right.grid(False, axis="x")
    label(right, "Use of the codes", "magnitude (times the group's scale)", "weights (%)")
    return figure


@styled
def acceptance(rates: Mapping[str, np.ndarray]) -> Figure:
    """The share of steps (percent) that accept each position of the draft, by name."""
    figure, axes = panels(width=6.4)
    longest = max(map(len, rates.values()))
    for number, (name, values) in enumerate(rates.items()):
        axes.plot(np.arange(1, len(values) + 1), values, marker="o", label=name, **look(number))
    axes.set_ylim(-3, 103)
    axes.set_xlim(0.5, longest + 0.5)
    axes.legend()
    whole_numbers(axes, x=True)
    label(axes, "Drafts accepted", "position in the draft (tokens)", "steps that accept it (%)")
    return figure


@styled
def speed(rows: Sequence[int], per_second: np.ndarray, per_step: np.ndarray) -> Figure:
    """Tokens a second and tokens a step by the rows of a step."""
    figure, (left, right) = panels(2)
    left.plot(rows, per_second, marker="o", color=COLOURS[0])
    label(left, "Speed on this machine", "rows of a step (tokens)", "speed (tokens per second)")
    right.plot(rows, per_step, marker="o", color=COLOURS[0], label="came")
    right.plot(rows, rows, color=GREY, linestyle=":", label="at most")
    right.legend()
    label(right, "What a step brings", "rows of a step (tokens)", "brought (tokens per step)")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_xticks(list(rows))
    return figure


@styled
def paths(steps: Mapping[str, Mapping[str, int]]) -> Figure:
    """How many steps ran on each path and why, for each way to run, as bars."""
    names = sorted({name for counts in steps.values() for name in counts})
    figure, axes = panels(width=8.4, height=max(2.6, 1.4 + 0.25 * len(steps) * len(names)))
    height = 0.8 / len(steps)
    for number, (run, counts) in enumerate(steps.items()):
        at = np.arange(len(names)) + (number - (len(steps) - 1) / 2) * height
        values = [counts.get(name, 0) for name in names]
        bars = axes.barh(at, values, height, label=run, color=COLOURS[number])
        axes.bar_label(bars, [str(value or "") for value in values], padding=3, fontsize=9)
    axes.set_yticks(range(len(names)), [name.strip("/").replace("/", ": ") for name in names])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    label(axes, "The path of each step", "steps (number)", "path and reason (name)")
    return figure


@styled
def roofline(work: Mapping[str, tuple[float, float]], gpus: Sequence[Gpu] = GPUS) -> Figure:
    """Ceilings of some GPUs, and where cases of (operations, bytes) stand below them."""
    figure, axes = panels(width=7.2, height=4.2)
    intensity = np.logspace(-0.5, 3.5, 200)
    for number, gpu in enumerate(gpus):
        ceiling = np.minimum(intensity * gpu.bandwidth, gpu.matrix) / 1e12
        axes.loglog(intensity, ceiling, label=f"{gpu.name}, {gpu.source}", **look(number))
    for name, (operations, moved) in work.items():
        at = operations / moved
        axes.axvline(at, color=GREY, linewidth=0.8)
        low = min(gpu.bandwidth for gpu in gpus) * 0.35e-12
        axes.text(at * 1.05, low, name, rotation=90, va="bottom", color=GREY, fontsize=9)
    axes.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="none")
    unit = "work for each byte moved (FLOP per byte)"
    label(axes, "What memory and arithmetic allow", unit, "at most (TFLOP per second)")
    return figure


@styled
def resources(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, int]) -> Figure:
    """Registers and shared memory of a kernel by tile and AMD architecture.

    `rows` are those of `kernels.amd_resources`, `limits` the bytes of LDS of each architecture.
    """
    figure, (left, right) = panels(2, width=5.2, height=1.6 + 0.45 * len({r["tile"] for r in rows}))
    tiles = list(dict.fromkeys(row["tile"] for row in rows))
    places = np.arange(len(tiles))
    height = 0.8 / len(limits)
    for number, (arch, limit) in enumerate(limits.items()):
        mine = {row["tile"]: row for row in rows if row["arch"] == arch}
        at = places + (number - (len(limits) - 1) / 2) * height
        registers = [mine[tile]["vgprs"] + mine[tile]["agprs"] for tile in tiles]
        left.barh(at, registers, height, label=arch, color=COLOURS[number])
        shared = [mine[tile]["lds"] / 1024 for tile in tiles]
        right.barh(at, shared, height, label=arch, color=COLOURS[number])
        name = f"all that {arch} has"
        right.axvline(limit / 1024, color=COLOURS[number], linestyle="--", label=name)
    for axes in (left, right):
        axes.set_yticks(places, tiles)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    label(left, "Registers", "VGPRs and AGPRs (number per lane)", "tile (features x depth)")
    label(right, "Shared memory", "LDS (KiB per workgroup)", "tile (features x depth)")
    return figure
