"""Plain SVG, written by hand: boxes, text, lines and arrows."""

from __future__ import annotations

from html import escape

INK, GREY, PALE, PAPER = "#22303c", "#8796a5", "#e6ebef", "#ffffff"
RED, BLUE, GREEN, SAND = "#d1495b", "#30638e", "#2a9d8f", "#edae49"
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


class Drawing:
    """A figure of fixed size on white paper.

    Args:
        width, height: in pixels.
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
        ]

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = PAPER, stroke: str = INK,
        label: str = "", size: float = 13, ink: str = INK,
    ) -> None:  # fmt: skip
        """A box, with a label in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )
        if label:
            self.text(x + w / 2, y + h / 2 + size * 0.35, label, size, "middle", ink)

    def text(
        self, x: float, y: float, words: str, size: float = 13, anchor: str = "start",
        ink: str = INK, bold: bool = False,
    ) -> None:  # fmt: skip
        """A line of text; y is its base line."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{ink}"{weight}>{escape(words)}</text>'
        )

    def line(
        self, *points: tuple[float, float], ink: str = INK, width: float = 1.4,
        arrow: bool = False, dashed: bool = False,
    ) -> None:  # fmt: skip
        """Through the points, with an arrow's head at the last."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        more = ' marker-end="url(#head)"' if arrow else ""
        more += ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{ink}" stroke-width="{width:g}"{more}/>'
        )

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"
