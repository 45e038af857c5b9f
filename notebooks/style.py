"""How the notebooks draw: a method or a strategy looks the same in every figure.

Colours are Okabe and Ito's, apart for every kind of colour vision; line styles and markers differ too, so
that a figure can be read in grey.

    style.use()
    figure, axis = plt.subplots()
    axis.plot(steps, std, **style.METHOD["sage"])
    style.show(figure)
"""

import io

import PIL.Image
from IPython.display import Image, display
from matplotlib import pyplot
from matplotlib.figure import Figure

BLACK, GREY, BLUE, SKY = "#000000", "#777777", "#0072b2", "#56b4e9"
ORANGE, GREEN, PINK, YELLOW = "#d55e00", "#009e73", "#cc79a7", "#e69f00"

METHOD = {
    "sage": {"color": BLUE, "linestyle": "-", "marker": "o", "label": "SAGE-GRPO"},
    "sage_exact": {"color": SKY, "linestyle": "--", "marker": "D", "label": "sage_exact"},
    "flow_grpo": {"color": ORANGE, "linestyle": "--", "marker": "s", "label": "FlowGRPO"},
    "dance_grpo": {"color": GREEN, "linestyle": "-.", "marker": "^", "label": "DanceGRPO"},
    "cps": {"color": PINK, "linestyle": ":", "marker": "v", "label": "CPS"},
    "ode": {"color": GREY, "linestyle": "-", "marker": "", "label": "ODE"},
}

STRATEGY = {
    "none": {"color": GREY, "linestyle": "-", "marker": "x", "label": "none"},
    "fixed": {"color": BLACK, "linestyle": ":", "marker": "s", "label": "fixed"},
    "stepwise": {"color": ORANGE, "linestyle": "--", "marker": "^", "label": "step-wise"},
    "moving": {"color": GREEN, "linestyle": "-.", "marker": "D", "label": "moving"},
    "dual": {"color": BLUE, "linestyle": "-", "marker": "o", "label": "dual"},
}

PRINTED = {"color": YELLOW, "linestyle": "--", "marker": "x"}  # the paper's or its code's reading, not ours


def show(figure: Figure) -> None:
    """Puts the figure below the cell, with a palette of 128 colours: a quarter of the bytes."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, bbox_inches="tight")
    PIL.Image.open(full).convert("RGB").quantize(128).save(small, "png", optimize=True)
    pyplot.close(figure)
    display(Image(small.getvalue()))


def use() -> None:
    """Sizes and a light grid for every figure that follows."""
    pyplot.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": 11,
            "figure.constrained_layout.use": True,
            "figure.dpi": 90,
            "savefig.dpi": "figure",
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.linewidth": 1.6,
            "lines.markersize": 4,
        }
    )
