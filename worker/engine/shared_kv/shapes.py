"""Few different array shapes: a device's graph cache holds few."""


def bucket(num: int) -> int:
    """Round *num* up, by less than an eighth; up to 16 nothing is rounded."""
    step = max(1, 1 << (num.bit_length() - 4)) if num > 8 else 1
    return -(-num // step) * step
