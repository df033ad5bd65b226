"""Draws docs/figures/*.svg; with --check, says if a file is not what would be drawn.

    PYTHONPATH=src python tools/docs/figures.py

What can be computed is: masks' tiles by ``core.mask``, statistics of the softmax by its recurrence,
time lines by a simulation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

from drawing import BLUE, GREEN, GREY, INK, PALE, PAPER, RED, SAND, Drawing
from time_lines import SCHEDULES, Span, busy

from tilewise.core.mask import MaskSpec

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
SCORES = (1.0, 2.5, 0.5, 2.0, 1.5, 0.0, 2.2, 1.0, 4.0, 3.0, 0.5, 2.8, 1.2, 2.0, 3.5, 0.8)


def online_softmax() -> Drawing:
    """A row's scores block by block, the running maximum, and what becomes of l."""
    d = Drawing(720, 330, "Online softmax over one row: scores, running maximum, rescaling")
    left, base, step, unit = 110, 190, 36, 32
    m, total = -math.inf, 0.0
    for block in range(4):
        x0 = left + block * 4 * step
        scores = SCORES[4 * block : 4 * block + 4]
        new = max(m, *scores)
        alpha = math.exp(m - new)
        total = alpha * total + sum(math.exp(s - new) for s in scores)
        d.rect(x0 - 4, 30, 4 * step, base - 24, PALE if block % 2 else PAPER, PALE)
        for j, s in enumerate(scores):
            fill = RED if s == new and new > m else BLUE
            d.rect(x0 + j * step + 4, base - s * unit, step - 16, s * unit, fill, fill)
        d.line(
            (x0 - 4, base - new * unit), (x0 + 4 * step - 4, base - new * unit), ink=RED, width=2
        )
        if block and new > m:
            d.line((x0 - 4, base - m * unit), (x0 - 4, base - new * unit), ink=RED, width=2)
        middle = x0 + 2 * step - 4
        d.text(middle, 24, f"keys {4 * block} to {4 * block + 3}", 12, "middle", GREY)
        for line, words in enumerate((f"{new:.1f}", f"{alpha:.3f}", f"{total:.3f}")):
            d.text(middle, 224 + 26 * line, words, 14, "middle")
        m = new
    for line, words in enumerate(("m", "alpha", "l")):
        d.text(left - 24, 224 + 26 * line, words, 14, "end", bold=True)
    d.text(left - 24, base - 3.2 * unit, "score", 12, "end", GREY)
    whole = max(SCORES)
    exact = sum(math.exp(s - whole) for s in SCORES)
    d.text(
        left, 312, f"all at once: m = {whole:.1f}, l = {exact:.3f}; log-sum-exp = "
        f"{whole + math.log(exact):.3f} either way", 13, ink=GREY,
    )  # fmt: skip
    return d


def loop_orders() -> Drawing:
    """Which tile of S is visited when, and what passes through memory meanwhile."""
    d = Drawing(720, 330, "Loop orders of FlashAttention and FlashAttention-2")
    told = (
        ("FlashAttention: keys outside", "one pass down for each block of keys",
         "on chip: K and V of the column", "through memory at each tile: O, l, m"),
        ("FlashAttention-2: queries outside", "one pass across for each block of queries",
         "on chip: Q, O, l, m of the row", "through memory once: O, lse"),
    )  # fmt: skip
    for side, (title, how, held, moved) in enumerate(told):
        x0, y0, cell = 70 + 350 * side, 72, 46
        d.text(x0, 26, title, 15, bold=True)
        d.text(x0, 46, how, 12, ink=GREY)
        for i in range(4):
            for j in range(4):
                number = 4 * j + i if side == 0 else 4 * i + j
                same = j == 0 if side == 0 else i == 0
                d.rect(
                    x0 + j * cell, y0 + i * cell, cell, cell, SAND if same else PALE, PAPER,
                    str(number + 1),
                )  # fmt: skip
        for n in range(4):
            d.text(x0 - 10, y0 + n * cell + 28, f"Q{'₁₂₃₄'[n]}", 13, "end", BLUE)
            d.text(x0 + n * cell + 23, y0 - 8, f"K{'₁₂₃₄'[n]}", 13, "middle", BLUE)
        if side == 0:
            d.line((x0 + 8, y0 + 6), (x0 + 8, y0 + 4 * cell - 6), arrow=True)
        else:
            d.line((x0 + 6, y0 + 8), (x0 + 4 * cell - 6, y0 + 8), arrow=True)
        d.text(x0, y0 + 4 * cell + 28, held, 13)
        d.text(x0, y0 + 4 * cell + 50, moved, 13, ink=RED if side == 0 else INK)
    return d


def backward_graph() -> Drawing:
    """What the backward reads, recomputes and writes."""
    d = Drawing(720, 340, "The backward: P is recomputed from Q, K and lse")
    boxes: dict[str, tuple[float, float, str, str]] = {
        "Q, K": (30, 40, PALE, "Q, K"),
        "lse": (30, 120, PALE, "lse"),
        "dO, V": (30, 200, PALE, "dO, V"),
        "O, dO": (30, 280, PALE, "O, dO"),
        "S": (190, 40, PAPER, "S = scale Q Kᵀ"),
        "P": (360, 80, SAND, "P = exp(S - lse)"),
        "dP": (190, 200, PAPER, "dP = dO Vᵀ"),
        "delta": (190, 280, PAPER, "δ = rowsum(O ∘ dO)"),
        "dS": (360, 200, SAND, "dS = P ∘ (dP - δ)"),
        "dV": (560, 80, GREEN, "dV = Pᵀ dO"),
        "dK": (560, 170, GREEN, "dK = scale dSᵀ Q"),
        "dQ": (560, 230, GREEN, "dQ = scale dS K"),
    }
    for name, (x, y, fill, label) in boxes.items():
        wide = 70 if fill == PALE else 140
        ink = PAPER if fill == GREEN else INK
        d.rect(x, y - 18, wide, 36, fill, GREEN if fill == GREEN else INK, label, 13, ink)
        boxes[name] = (x, y, fill, str(wide))
    for start, stop in (
        ("Q, K", "S"), ("S", "P"), ("lse", "P"), ("dO, V", "dP"), ("O, dO", "delta"), ("P", "dV"),
        ("dP", "dS"), ("delta", "dS"), ("dS", "dK"), ("dS", "dQ"),
    ):  # fmt: skip
        x, y, _, wide = boxes[start]
        to_x, to_y, _, _ = boxes[stop]
        d.line((x + float(wide), y), (to_x - 2, to_y), arrow=True)
    d.line((430, 98), (430, 180), arrow=True)
    d.text(30, 14, "kept by the forward", 12, ink=GREY)
    d.text(190, 14, "recomputed tile by tile", 12, ink=GREY)
    d.text(560, 14, "written", 12, ink=GREY)
    return d


def tiles() -> Drawing:
    """Tiles of 64 rows and 64 keys that are whole, cut and left out, by ``core.mask``."""
    d = Drawing(720, 300, "Tiles under a causal mask and under windows")
    cases = (
        ("causal, 512 x 512", MaskSpec(None, 0), 512, 512),
        ("causal, 320 rows, 512 keys", MaskSpec(None, 0), 320, 512),
        ("window (128, 0), 512 x 512", MaskSpec(128, 0), 512, 512),
    )
    cell = 24
    for number, (title, mask, rows, keys) in enumerate(cases):
        x0, y0 = 30 + 232 * number, 46
        d.text(x0, 30, title, 13, bold=True)
        for m in range(0, rows, 64):
            first, last = mask.keys_of(m, m + 64, rows, keys)
            for n in range(0, keys, 64):
                seen = n + 64 > first and n < last
                whole = mask.covers(m, m + 64, n, n + 64, rows, keys)
                fill = PALE if not seen else BLUE if whole else SAND
                d.rect(x0 + n // 64 * cell, y0 + m // 64 * cell, cell, cell, fill, PAPER)
    for x, fill, words in (
        (30, BLUE, "whole: no mask code"), (250, SAND, "cut: scores hidden one by one"),
        (500, PALE, "not visited"),
    ):  # fmt: skip
        d.rect(x, 264, 16, 16, fill, PAPER)
        d.text(x + 24, 277, words, 13)
    return d


def warps() -> Drawing:
    """A tile of S divided among four warps, by keys and by rows."""
    d = Drawing(720, 260, "A tile's work divided among warps, by keys and by rows")
    shades = (BLUE, GREEN, SAND, RED)
    for side in (0, 1):
        x0, y0, size = 60 + 350 * side, 62, 140
        title = ("FlashAttention: warps share the keys", "FlashAttention-2: warps share the rows")
        d.text(x0, 26, title[side], 13, bold=True)
        for w in range(4):
            part = size / 4
            x, y = (x0 + w * part, y0) if side == 0 else (x0, y0 + w * part)
            wide, high = (part, size) if side == 0 else (size, part)
            d.rect(x, y, wide, high, shades[w], PAPER, f"warp {w}" if side else str(w), 12, PAPER)
        d.text(x0 + size / 2, y0 - 8, "keys", 12, "middle", GREY)
        d.text(x0 - 8, y0 + size / 2, "rows", 12, "end", GREY)
        for w in range(4):
            x = x0 + 190
            if side == 0:
                d.rect(x + 6 * w, y0 + 40 + 6 * w, 60, 60, shades[w], PAPER)
            else:
                d.rect(x, y0 + 35 * w, 60, 35, shades[w], PAPER)
        d.line((x0 + size + 10, y0 + 70), (x0 + 184, y0 + 70), arrow=True)
        told = (
            ("each warp has a partial sum of every row of O:", "added up through shared memory"),
            ("each warp owns its rows of O:", "nothing is exchanged"),
        )[side]
        d.text(x0, y0 + 166, told[0], 12)
        d.text(x0, y0 + 183, told[1], 12, ink=RED if side == 0 else INK)
    return d


def programs() -> Drawing:
    """How many programs there are for 16k tokens of 16 heads of 128."""
    d = Drawing(720, 300, "Programs of one forward, against the length of a sequence")
    lengths = (1024, 2048, 4096, 8192, 16384)
    tokens, heads, block, units = 16384, 16, 128, 132
    left, base, top = 90, 240, 40

    def y(n: float) -> float:
        return base - (base - top) * (math.log2(n) - 3) / (11.4 - 3)

    for power in range(3, 12):
        d.line((left, y(2**power)), (680, y(2**power)), ink=PALE)
        d.text(left - 10, y(2**power) + 4, str(2**power), 12, "end", GREY)
    for place, n in enumerate(lengths):
        x = left + 30 + 118 * place
        first = tokens // n * heads
        for offset, count, fill in ((0, first, SAND), (40, first * (n // block), BLUE)):
            d.rect(x + offset, y(count), 34, base - y(count), fill, fill)
            d.text(x + offset + 17, y(count) - 5, str(count), 11, "middle")
        d.text(x + 37, base + 18, f"{n // 1024}k", 13, "middle")
    d.line((left, y(units)), (680, y(units)), ink=RED, width=1.6, dashed=True)
    d.text(684, y(units) + 4, "132", 12, ink=RED)
    d.text(left, 24, "programs, 16k tokens, 16 heads, blocks of 128 rows", 13, bold=True)
    for x, fill, words in (
        (90, SAND, "FlashAttention: batch x heads"),
        (330, BLUE, "FlashAttention-2: batch x heads x blocks of rows"),
    ):
        d.rect(x, 272, 14, 14, fill, fill)
        d.text(x + 22, 284, words, 12)
    return d


def overlap() -> Drawing:
    """Time lines of one and two warpgroups on the tensor cores of a multiprocessor."""
    d = Drawing(
        720, 424, "Softmax beside products: one warpgroup and two, each without and with delay"
    )
    unit, y = 11.5, 26.0
    for title, schedule in SCHEDULES.items():
        spans = schedule()
        end = max(s.stop for s in spans)
        share = busy(spans) / end
        d.text(20, y, title, 14, bold=True)
        d.text(700, y, f"tensor cores busy {share:.0%}", 13, "end", RED)
        for s in spans:
            _span(d, s, 130 + unit * s.start, y + 12 + 34 * s.group, unit * (s.stop - s.start))
        groups = sorted({s.group for s in spans})
        for g in groups:
            d.text(20, y + 33 + 34 * g, f"warpgroup {g + 1}", 12, ink=GREY)
        y += 34 * len(groups) + 40
    for x, fill, words in (
        (130, BLUE, "S = Q Kᵀ"), (240, GREEN, "O += P V"), (350, SAND, "softmax"),
    ):  # fmt: skip
        d.rect(x, y - 14, 14, 14, fill, fill)
        d.text(x + 22, y - 2, words, 13)
    return d


def _span(d: Drawing, s: Span, x: float, y: float, wide: float) -> None:
    fill = {"S": BLUE, "O": GREEN, "softmax": SAND}[s.kind]
    lane = 15 if s.kind == "softmax" else 0
    ink = INK if s.kind == "softmax" else PAPER
    d.rect(x, y + lane, wide, 14, fill, PAPER, str(s.block), 10, ink)


def roles() -> Drawing:
    """The warps of a FlashAttention-3 program and what they hand to each other."""
    d = Drawing(720, 320, "Roles of the warps of a program of the Hopper forward")
    d.rect(30, 110, 120, 90, PALE, INK)
    for line, words in enumerate(("producer", "one warp,", "24 or 32 registers")):
        d.text(90, 140 + 22 * line, words, 13, "middle", bold=line == 0)
    d.text(90, 60, "global memory: Q, K, V", 13, "middle", GREY)
    d.line((90, 68), (90, 106), arrow=True)
    d.text(98, 92, "TMA", 12, ink=GREY)
    for stage in range(4):
        y = 70 + 48 * stage
        d.rect(270, y, 150, 36, SAND if stage < 3 else PAPER, INK, f"K, V of slot {stage}", 13)
    d.text(345, 286, "ring in shared memory, 2 to 6 slots", 12, "middle", GREY)
    d.line((150, 140), (266, 140), arrow=True)
    d.text(160, 132, "full: bytes arrived", 12, ink=BLUE)
    d.line((266, 180), (154, 180), arrow=True)
    d.text(160, 198, "empty: all read", 12, ink=RED)
    for w in range(2):
        y = 60 + 120 * w
        d.rect(540, y, 150, 90, PALE, INK)
        for line, words in enumerate((f"consumer {w}", "a warpgroup", "64 rows of Q and O")):
            d.text(615, y + 30 + 22 * line, words, 13, "middle", bold=line == 0)
        d.line((424, 160 if w else 140), (536, y + 45), arrow=True)
    d.text(434, 120, "WGMMA", 12, ink=GREY)
    return d


FIGURES: dict[str, Callable[[], Drawing]] = {
    "online-softmax": online_softmax,
    "loop-orders": loop_orders,
    "backward-graph": backward_graph,
    "tiles": tiles,
    "warps": warps,
    "programs": programs,
    "overlap": overlap,
    "roles": roles,
}


def main(arguments: list[str]) -> int:
    drawn = {FOLDER / f"{name}.svg": draw().svg() for name, draw in FIGURES.items()}
    there = set(FOLDER.glob("*.svg"))
    if "--check" in arguments:
        stale = [p for p, svg in drawn.items() if p not in there or p.read_text() != svg]
        wrong = sorted({*stale, *(there - drawn.keys())})
        print(*(f"{p.name} is not what {Path(__file__).name} draws" for p in wrong), sep="\n")
        return 1 if wrong else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, svg in drawn.items():
        path.write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
