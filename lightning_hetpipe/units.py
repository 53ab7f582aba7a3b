"""Reads quantities as people write them: ``512MiB``, ``200Mbit/s``, ``0.2ms``."""

import re

_BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BITS_PER_S = {"BIT/S": 1, "KBIT/S": 1e3, "MBIT/S": 1e6, "GBIT/S": 1e9}
_SECONDS = {"": 1.0, "S": 1.0, "MS": 1e-3, "US": 1e-6, "NS": 1e-9}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def parse_bytes(text: str | float) -> int:
    """Bytes from a number or text.

    >>> parse_bytes("1.5 KiB"), parse_bytes("2GB"), parse_bytes(7)
    (1536, 2000000000, 7)
    """
    return int(_scaled(text, _BYTES, "bytes, such as 512MiB"))


def parse_bytes_per_s(text: str | float) -> float:
    """Bytes per second from a number (bytes/s) or text in bits or bytes.

    >>> parse_bytes_per_s("200Mbit/s"), parse_bytes_per_s("1.2GB/s")
    (25000000.0, 1200000000.0)
    """
    units = {unit: bits / 8 for unit, bits in _BITS_PER_S.items()}
    units |= {f"{unit}/S": size for unit, size in _BYTES.items() if unit} | {"": 1.0}
    return _scaled(text, units, "a bandwidth, such as 200Mbit/s or 1.2GB/s")


def parse_seconds(text: str | float) -> float:
    """Seconds from a number or text.

    >>> parse_seconds("0.2 ms"), parse_seconds(3)
    (0.0002, 3.0)
    """
    return _scaled(text, _SECONDS, "a time, such as 0.2ms")


def format_bytes(size_bytes: float) -> str:
    """The shortest binary form people read.

    >>> format_bytes(1536), format_bytes(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _scaled(text: str | float, units: dict[str, float], wanted: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2].upper() not in units:
        raise ValueError(f"{text!r} is not {wanted}")
    return float(match[1]) * units[match[2].upper()]
