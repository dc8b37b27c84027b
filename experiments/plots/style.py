"""One look for every figure: a system or popularity has one colour, marker and hatch. Ours is filled and solid, the
paper's open and dashed; a cross marks what other work disturbed.
"""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.facts.systems import entries, name_of
from experiments.workload import WORKLOADS

COLUMN, PAGE = 3.3, 7.0  # inches: one column of a paper, and two
MOST_LETTERS = 17.5  # of 8 pt, in an inch
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # 0.5, 1, 20: no powers of ten
PAPER_GREY = "0.5"
PAPER_LABEL = "paper, A100"
FLOOR: dict[str, Any] = {"color": "0.2", "linestyle": ":", "linewidth": 1.0, "zorder": 1}  # of bytes alone
GREY: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1.0, "zorder": 1}  # of another bound
OPEN: dict[str, Any] = {
    "color": "0.3", "marker": "o", "linestyle": "--", "linewidth": 0.8, "markerfacecolor": "white",
    "markeredgewidth": 0.8, "zorder": 2,
}  # fmt: skip
BEHIND: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}  # of text


PALETTE = sns.color_palette("colorblind")
OTHERS = [sns.color_palette("dark")[place] for place in (4, 3, 9, 5, 6, 2, 0, 7, 1, 8)]
"""Colours of lines that have none here, e.g. a new operator's; no other line has one of these."""


class Look(NamedTuple):
    """Colour, marker and hatch by which a line, or bar, differs from others."""

    colour: tuple[float, float, float]
    marker: str
    hatch: str

    @classmethod
    def at(cls, place: int, colour: tuple[float, float, float], marker: str = "") -> "Look":
        """The look of the line at `place` of those drawn together."""
        return cls(colour, marker or "osD^vPX"[place % 7], _HATCHES[place % len(_HATCHES)])


_HATCHES = ("", "/////", "\\\\\\\\\\", "xxxxx", ".....", "|||||", "-----", "+++++", "ooo", "OO", "**",
            "//oo", "||..", "xx..", "--oo", "++..")  # fmt: skip
# the i-th entry of a group gets the i-th colour, marker and hatch; names in one tuple are one thing
_GROUPS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("SGMV",), ("Loop",), ("Gather-BMM",), ("BMM",), ("Gather",), ("backbone X@W",), ("grouped_mm", "SGMV expand")),
    tuple((name,) for name in WORKLOADS.names()),
    (("len 128",), ("len 512",), ("len 1024",), ("len 1536",), ("len 2048",)),
    (("fused",), ("unfused", "FP8 w8a8", "pageable"), ("batch invariant", "FP8 e5m2"),
     ("FP8 e4m3", "per_tensor"), ("vllm",), (), ("vllm_dual_stream",), ("vllm_as_shipped",), ("vllm_punica",)),
)  # fmt: skip
_COLOURS = ((0, 3, 1, 2, 4, 5, 9), range(10), range(10), (0, 3, 2, 1, 4, 9, 7, 8, 5))
_LINES = {
    name: Look.at(i, PALETTE[_COLOURS[g][i % 10]])
    for g, group in enumerate(_GROUPS)
    for i, names in enumerate(group)
    for name in names
}


def _system_looks() -> dict[str, Look]:
    """Looks of serving systems; one without a colour gets the next free one; a shade below 1 is mixed with white."""
    taken = {entry.colour for entry in entries()}
    free, looks = iter([i for i in range(len(PALETTE)) if i not in taken]), dict[str, Look]()
    for place, entry in enumerate(entries()):
        colour = next(free, place % len(PALETTE)) if entry.colour is None else entry.colour
        red, green, blue = (1 - entry.shade * (1 - channel) for channel in PALETTE[colour])
        look = Look.at(place, (red, green, blue), entry.marker)
        looks |= dict.fromkeys((entry.name, *entry.paper), look)
    return looks


_KNOWN = _LINES | _system_looks()
_unknown: dict[str, int] = {}  # in the figure at hand, in the order of drawing


def look(name: str) -> Look:
    """The look of the system, popularity or other line called `name`; unknown ones get colours of `OTHERS`."""
    if name in _KNOWN:
        return _KNOWN[name]
    place = _unknown.setdefault(name, len(_unknown))
    return Look.at(place, OTHERS[place % len(OTHERS)])


@contextmanager
def themed() -> Iterator[None]:
    """The theme of every figure, whatever the user's matplotlibrc says."""
    _unknown.clear()
    with plt.rc_context():
        plt.rcdefaults()
        sns.set_theme("paper", "whitegrid", palette="colorblind")
        plt.rcParams.update(
            {
                "pdf.fonttype": 42, "ps.fonttype": 42, "figure.dpi": 200, "savefig.dpi": 200,
                "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8,
                "legend.fontsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.titlepad": 4,
                "lines.linewidth": 1.2, "lines.markersize": 3.6, "hatch.linewidth": 0.6, "axes.labelpad": 2,
                "grid.linewidth": 0.4, "grid.color": "0.9", "axes.edgecolor": "0.6", "axes.linewidth": 0.6,
                "xtick.major.pad": 1, "ytick.major.pad": 1,
            }
        )  # fmt: skip
        yield


def grid(depth: int, columns: int, width: float, height: float, **more: Any) -> tuple[Figure, Any]:
    """A figure of `width` by `height` inches with `depth` rows of axes, each of one vertical scale by default."""
    more = {"sharex": True, "sharey": "row", "layout": "constrained", **more}
    return plt.subplots(depth, columns, figsize=(width, height), squeeze=False, **more)


def finish(figure: Figure | SubFigure, words: str, handles: Sequence[Artist], ncols: int = 4) -> None:
    """One legend above all axes in at most `ncols` columns, and the caption below them."""
    box = figure.bbox.width
    looks: dict[str, Any] = {"frameon": False, "columnspacing": 1.2, "handlelength": 1.8, "borderpad": 0.1}
    for columns in range(min(ncols, len(handles)), 0, -1):  # fewer where these are wider than the figure
        legend = figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, **looks)
        if columns == 1 or legend.get_window_extent().width <= box:
            break
        legend.remove()
    for letters in range(int(MOST_LETTERS * box / figure.dpi), 20, -1):
        caption = figure.supxlabel("\n".join(textwrap.wrap(words, letters)), x=0.01, ha="left", fontsize=8)
        if caption.get_window_extent().width <= 0.98 * box:
            return


def labelled(axes: Iterable[Axes]) -> list[Artist]:
    """Legend entries of what has a label in `axes`, one for each label."""
    found = [zip(*reversed(axis.get_legend_handles_labels()), strict=True) for axis in axes]
    return [*{text: handle for entries in found for text, handle in entries}.values()]


def sides(paper: bool = True, floor: bool = False) -> list[Artist]:
    """Legend entries that tell ours, the paper's and the floor apart."""
    looks = [{"color": "0.3", "marker": "o", "label": "ours"}, {"label": PAPER_LABEL, **OPEN}] if paper else []
    looks += [{"label": "bytes / bandwidth", **FLOOR}] if floor else []
    return [Line2D([], [], **look) for look in looks]


def note(axis: Axes, text: str, x: float, y: float, lift: float = 2, **looks: Any) -> None:
    """`text` in small letters, `lift` points above the place (x, y), centred unless `looks` says else."""
    looks = {"ha": "center", "fontsize": 6.5, "textcoords": "offset points", "in_layout": False, **looks}
    axis.annotate(text, (x, y), xytext=(0, lift), **looks)


def corner(axis: Axes, text: str, size: float = 6.5) -> None:
    looks: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": size, "bbox": BEHIND, "zorder": 7}
    axis.text(0.03, 0.97, text, transform=axis.transAxes, in_layout=False, **looks)


def log_x(axis: Axes) -> None:
    """A horizontal axis of powers of two, labelled in plain numbers."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(PLAIN)
    axis.tick_params(which="minor", length=0)


def log_y(axis: Axes) -> None:
    """A logarithmic vertical axis labelled at 1, 2 and 5 of every decade; at 1 alone over many decades."""
    axis.set_yscale("log")
    label_decades(axis.yaxis)
    axis.tick_params(which="minor", length=0)


def headroom(axis: Axes, share: float) -> None:
    """Leave a `share` of the height of `axis`, and of those that share its scale, free above what is drawn."""
    low, high = axis.get_ylim()
    if axis.get_yscale() == "log":
        axis.set_ylim(low, high * (high / low) ** (share / (1 - share)))
        label_decades(axis.yaxis)
    else:
        axis.set_ylim(low, high + (high - low) * share / (1 - share))


def label_decades(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of every decade; at 1 alone where these are many."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1,) if low > 0 and high / low > 2000 else (1, 2, 5)))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def measured_style(name: str) -> dict[str, Any]:
    return {"color": look(name).colour, "marker": look(name).marker, "linestyle": "-", "zorder": 3}


def paper_style(name: str) -> dict[str, Any]:
    return {**OPEN, "color": look(name).colour, "marker": look(name).marker}


def patch(name: str, paper: bool = False) -> dict[str, Any]:
    """A bar of `name`: filled and hatched in white; the paper's open and hatched in its colour."""
    colour, _, hatch = look(name)
    if paper:
        return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "linestyle": "--", "linewidth": 0.8}
    return {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "linewidth": 0.3}


def patches(names: Iterable[str]) -> list[Artist]:
    return [Patch(label=name_of(name), **patch(name)) for name in names]


def crossed(axis: Axes, xs: Iterable[float], ys: Iterable[float], at: Collection[float] | None = None) -> None:
    """Cross out the points that are disturbed: those at x in `at` (None: all)."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if at is None or x in at]
    if points:
        looks: dict[str, Any] = {"linestyle": "", "marker": "x", "color": "0.1", "markersize": 3, "zorder": 6}
        axis.plot(*zip(*points, strict=True), markeredgewidth=0.7, **looks)
