"""Arithmetic of cyclic redundancy checks: the CRC of two ranges, from the CRCs of each.

A CRC is the remainder of the bytes, read as a polynomial over GF(2), divided by the algorithm's own. So that of
``a + b`` is that of ``a`` times ``x ** (8 * len(b))``, plus that of ``b``, modulo the polynomial; what an algorithm
adds at both ends cancels out where it is the same, as it is in all of these. Numbers are reflected: the highest bit
is the coefficient of x to the power of 0. As in zlib's ``crc32_combine``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

__all__ = ["CRCS", "Crc"]

_MOST_LENGTH_BITS = 64


class Crc:
    """One algorithm.

    Args:
        bits: of the remainder.
        polynomial: reflected, without its highest term.
    """

    __slots__ = ("_powers", "_shift", "bits", "polynomial")

    def __init__(self, bits: int, polynomial: int) -> None:
        self.bits = bits
        self.polynomial = polynomial
        power = 1 << (bits - 1 - 8)  # x ** 8: one byte
        powers = []
        for _ in range(_MOST_LENGTH_BITS):
            powers.append(power)
            power = self._multiply(power, power)
        self._powers = tuple(powers)
        # Requests and tensors have few different lengths, and a load of a hundred gigabytes has 20,000 ranges.
        self._shift: Callable[[int], int] = functools.lru_cache(maxsize=1024)(self._power)

    def combine(self, first: int, second: int, second_bytes: int) -> int:
        """Return the CRC of two ranges, one after the other; costs well below a millisecond.

        Args:
            second_bytes: length of the second range, below 2 ** 64.
        """
        return self._multiply(first, self._shift(second_bytes)) ^ second

    def _power(self, nbytes: int) -> int:
        """Return x ** (8 * nbytes)."""
        power = 1 << (self.bits - 1)
        for number in range(nbytes.bit_length()):
            if nbytes >> number & 1:
                power = self._multiply(self._powers[number], power)
        return power

    def _multiply(self, left: int, right: int) -> int:
        product, bit = 0, 1 << (self.bits - 1)
        while left:
            if left & bit:
                product ^= right
                left ^= bit
            bit >>= 1
            right = right >> 1 ^ self.polynomial if right & 1 else right >> 1
        return product


#: By the names that S3 has for them. Polynomials: ISO-HDLC, iSCSI and NVMe in
#: https://reveng.sourceforge.io/crc-catalogue/all.htm
CRCS: Mapping[str, Crc] = MappingProxyType(
    {
        "CRC32": Crc(32, 0xEDB88320),
        "CRC32C": Crc(32, 0x82F63B78),
        "CRC64NVME": Crc(64, 0x9A6C9329AC4BC9B5),
    }
)
