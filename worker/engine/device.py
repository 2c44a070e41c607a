"""What kind of device MLX computes on."""

import mlx.core as mx


def is_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def is_asynchronous() -> bool:
    """Whether a launch returns before the device has computed it.

    On the CPU it does not: MLX lets only a few operations wait, so launching a step takes
    nearly as long as the step, and nothing would overlap with it.
    """
    return not is_cpu()
