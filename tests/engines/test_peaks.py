import pytest

from meshwright.engines.peaks import peak_flops


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA B200", 2250),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
    ],
)
def test_known_devices(kind, tflops):
    assert peak_flops(kind) == tflops * 1e12


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "NVIDIA L40S",
        "NVIDIA GB200X",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10",
        "TPU v4 lite",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "",
    ],
)
def test_of_a_device_not_known_no_peak_is_claimed(kind):
    assert peak_flops(kind) is None
