"""Memory over a step as an SVG: one bar a phase, stacked by category, and the card's line. No library needed."""

from __future__ import annotations

from html import escape

from overspill.forecast.device.result import DeviceForecast
from overspill.units import GiB, format_nbytes

__all__ = ["COLOURS", "svg_of"]

#: Distinct in print and for the colour-blind (Okabe and Ito's palette).
COLOURS = {
    "weights": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#009E73",
    "activations": "#E69F00",
    "logits": "#D55E00",
    "communication": "#CC79A7",
    "temporaries": "#999999",
}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900, 420, 70, 70, 60


def svg_of(forecast: DeviceForecast) -> str:
    """The picture as text."""
    top = max([phase.total_nbytes for phase in forecast.phases] + [forecast.usable_nbytes or 0]) * 1.05 or 1
    height = _HEIGHT - _BOTTOM - _TOP
    step = (_WIDTH - _LEFT - 20) / max(1, len(forecast.phases))

    def y(nbytes: float) -> float:
        return _TOP + height * (1 - nbytes / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(forecast.model)}: {escape(_title(forecast))}</text>',
    ]
    for tick in _ticks(top):
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick / GiB:g} GiB</text>')
    for number, phase in enumerate(forecast.phases):
        base, x = 0, _LEFT + number * step + step * 0.15
        for name, colour in COLOURS.items():
            nbytes = phase.by_category.get(name, 0)
            if nbytes:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y(base + nbytes):.1f}" width="{step * 0.7:.1f}" '
                    f'height="{height * nbytes / top:.1f}" fill="{colour}"><title>{escape(phase.phase)}: {name} '
                    f"{format_nbytes(nbytes)}</title></rect>"
                )
                base += nbytes
        label = phase.phase.replace("backward of ", "bwd: ")
        parts.append(
            f'<text x="{x + step * 0.35:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{escape(label)}</text>'
        )
    if forecast.usable_nbytes:
        line = y(forecast.usable_nbytes)
        ends = f'x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{line:.1f}" y2="{line:.1f}"'
        parts.append(f'<line {ends} stroke="black" stroke-dasharray="6 4"/>')
        name = escape(forecast.gpu or "")
        parts.append(f'<text x="{_WIDTH - 24}" y="{line - 5:.1f}" text-anchor="end">{name}</text>')
    x = float(_LEFT)
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x:.0f}" y="{_HEIGHT - 28}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{_HEIGHT - 18}">{name}</text>')
        x += 112
    return "\n".join([*parts, "</svg>", ""])


def _title(forecast: DeviceForecast) -> str:
    verdict = f"{forecast.verdict} on the {forecast.gpu}" if forecast.verdict else "no card"
    return f"{format_nbytes(forecast.allocated.likely_nbytes)} allocated at the peak, {verdict}"


def _ticks(top: float) -> list[float]:
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000) if top / (size * GiB) <= 8)
    return [number * step * GiB for number in range(int(top // (step * GiB)) + 1)]
