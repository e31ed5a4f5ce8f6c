"""What a device can compute at best: dense bfloat16 products with sums in float32, by the makers' data sheets."""

import re

_TFLOPS = {
    r"\bH100 PCIe": 756.0,
    r"\bH100 NVL": 835.0,
    r"\bH100\b": 989.0,
    r"\bH200 NVL": 835.0,
    r"\bH200\b": 989.0,
    r"\bB200\b": 2250.0,
    r"\bA100\b": 312.0,
    r"\bL4\b": 121.0,
    r"\bRTX 4090$": 165.0,
    r"^TPU v4$": 275.0,
    r"^TPU v5 lite|^TPU v5e": 197.0,
    r"^TPU v5": 459.0,
    r"^TPU v6 lite|^TPU v6e": 918.0,
}
"""By what JAX calls the device; the first that fits."""


def peak_flops(device_kind: str) -> float | None:
    """Operations a second of one device; None where it isn't known.

    Arguments:
        device_kind: as `jax.Device.device_kind` has it, such as `NVIDIA H100 80GB HBM3`.
    """
    if "MIG" in device_kind:  # a part of a card
        return None
    for pattern, tflops in _TFLOPS.items():
        if re.search(pattern, device_kind):
            return tflops * 1e12
    return None
