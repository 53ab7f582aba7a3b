"""Plain text for terminals and logs: aligned tables, and times as people write them."""

from collections.abc import Sequence

_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart under their header.

    >>> print(align(("stage", "device"), [("0", "old"), ("1", "fast")]))
    stage  device
    0      old
    1      fast
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)


def format_seconds(seconds: float) -> str:
    """Three digits and the unit that needs no leading zeros.

    >>> format_seconds(1.5), format_seconds(0.02), format_seconds(3e-5), format_seconds(0)
    ('1.50 s', '20.0 ms', '30.0 us', '0')
    """
    if seconds == 0:
        return "0"
    unit, value = next(
        ((unit, seconds * scale) for unit, scale in _UNITS if abs(seconds) * scale >= 1),
        ("us", seconds * 1e6),
    )
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"
