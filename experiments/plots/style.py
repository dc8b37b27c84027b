"""One look for every figure: the same colour and marker is the same system, or popularity, everywhere."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.facts.systems import entries
from punica.workload import WORKLOADS

PAPER_GREY = "0.55"
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # 0.5, 1, 20: no powers of ten
PAPER_LABEL = "paper, A100"
PANEL_WIDTH, PANEL_HEIGHT = 2.1, 1.9  # inches; 3.3 in is one column of the paper, 7 in two

Shared = bool | Literal["none", "all", "row", "col"]
"""Which axes have one scale."""
LETTERS_PER_INCH = 14.5  # of a title, so that it stays within the figure

PALETTE = sns.color_palette("colorblind")
OTHERS = [sns.color_palette("dark")[place] for place in (4, 3, 9, 5, 6, 2, 0, 7, 1, 8)]
"""Colours of lines that have none here, e.g. a new operator's; no other line has one of these."""
# the i-th entry of a group gets the i-th colour and marker; names in one tuple are one thing under several spellings
_GROUPS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("SGMV",), ("Loop",), ("Gather-BMM",), ("BMM",), ("Gather",), ("backbone X@W",), ("grouped_mm", "SGMV expand")),
    tuple((name,) for name in WORKLOADS.names()),
    (("len 128",), ("len 512",), ("len 1024",), ("len 1536",), ("len 2048",)),
)
_COLOURS = ((0, 3, 1, 2, 4, 5, 9), range(10), range(10))
_MARKERS = "osD^vPX"
_LINES = {
    name: (PALETTE[_COLOURS[g][i % 10]], _MARKERS[i % len(_MARKERS)])
    for g, group in enumerate(_GROUPS)
    for i, names in enumerate(group)
    for name in names
}


def _system_looks() -> dict[str, tuple[tuple[float, float, float], str]]:
    """Colour and marker of each serving system, ours and the paper's; one without a colour gets the next free one."""
    taken = {entry.colour for entry in entries()}
    free = iter([i for i in range(len(PALETTE)) if i not in taken])
    looks: dict[str, tuple[tuple[float, float, float], str]] = {}
    for place, entry in enumerate(entries()):
        colour = next(free, place % len(PALETTE)) if entry.colour is None else entry.colour
        look = PALETTE[colour], entry.marker or _MARKERS[place % len(_MARKERS)]
        looks |= dict.fromkeys((entry.name, *entry.paper), look)
    return looks


_KNOWN = _LINES | _system_looks()
_unknown: dict[str, int] = {}  # in the figure at hand, in the order of drawing


def look(name: str) -> tuple[tuple[float, float, float], str]:
    """Colour and marker of the system, popularity or other line called `name`; unknown ones get those of `OTHERS`."""
    if name in _KNOWN:
        return _KNOWN[name]
    place = _unknown.setdefault(name, len(_unknown))
    return OTHERS[place % len(OTHERS)], _MARKERS[place % len(_MARKERS)]


@contextmanager
def themed() -> Iterator[None]:
    """The theme of every figure, whatever the user's matplotlibrc says: fonts stay text in the PDF (type 42), thin
    lines, light grid.
    """
    _unknown.clear()
    with plt.rc_context():
        plt.rcdefaults()
        sns.set_theme("paper", "whitegrid", palette="colorblind")
        plt.rcParams.update(
            {
                "pdf.fonttype": 42, "ps.fonttype": 42, "figure.dpi": 160, "savefig.dpi": 160,
                "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7.5,
                "xtick.labelsize": 7, "ytick.labelsize": 7, "lines.linewidth": 1.3, "lines.markersize": 3.6,
                "grid.linewidth": 0.4, "grid.color": "0.9", "axes.edgecolor": "0.6", "axes.linewidth": 0.6,
            }
        )  # fmt: skip
        yield


def grid(
    depth: int, columns: int, width: float, height: float, sharex: Shared = True, sharey: Shared = "row"
) -> tuple[Figure, Any]:
    """A figure of `width` by `height` inches with `depth` rows of axes, each of one vertical scale by default."""
    return plt.subplots(
        depth, columns, figsize=(width, height), sharex=sharex, sharey=sharey, squeeze=False, layout="constrained"
    )


def caption(figure: Figure, title: str, measured: str, handles: Sequence[Artist], ncols: int, **spacing: float) -> None:
    """The title with what was `measured` below it, and one legend under all axes in at most `ncols` columns."""
    lines = textwrap.wrap(f"measured: {measured}", int(LETTERS_PER_INCH * figure.get_figwidth()))
    figure.suptitle("\n".join([title, *lines]), fontsize=8.5)
    for columns in range(ncols, 0, -1):  # fewer where these are wider than the figure, which would cut them off
        legend = figure.legend(
            handles=list(handles), loc="outside lower center", ncols=columns, frameon=False, **spacing
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def note(axis: Axes, text: str, x: float, y: float, lift: float = 2, **looks: Any) -> None:
    """`text` in small letters, `lift` points above the place (x, y), centred unless `looks` says else."""
    looks = {"ha": "center", "fontsize": 6.5, **looks}
    axis.annotate(text, (x, y), xytext=(0, lift), textcoords="offset points", **looks)


def log_x(axis: Axes) -> None:
    """A horizontal axis of powers of two, labelled in plain numbers."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(PLAIN)
    axis.tick_params(which="minor", length=0)


def log_y(axis: Axes) -> None:
    """A logarithmic vertical axis that is labelled at 1, 2 and 5 of every decade."""
    axis.set_yscale("log")
    label_decades(axis.yaxis)
    axis.tick_params(which="minor", length=0)


def label_decades(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of every decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def measured_style(name: str) -> dict[str, Any]:
    """Solid line in the colour of `name`."""
    colour, marker = look(name)
    return {"color": colour, "marker": marker, "linestyle": "-", "zorder": 3}


def hollow(
    axis: Axes, xs: Iterable[float], ys: Iterable[float], looks: dict[str, Any], at: Collection[float] | None = None
) -> None:
    """Draw white markers over those points of a line with `looks` that are disturbed: at x in `at` (None: at all)."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if at is None or x in at]
    if not points:
        return
    looks = {**looks, "linestyle": "", "markerfacecolor": "white", "markeredgewidth": 1.0, "zorder": 4}
    looks = {name: value for name, value in looks.items() if name not in ("label", "markevery")}
    axis.plot(*zip(*points, strict=True), **looks)


def paper_style(name: str) -> dict[str, Any]:
    """Dashed grey line with the hollow marker of `name`."""
    return {
        "color": PAPER_GREY, "marker": look(name)[1], "linestyle": "--", "linewidth": 0.9, "markersize": 3.4,
        "markerfacecolor": "white", "markeredgewidth": 0.8, "zorder": 2,
    }  # fmt: skip
