"""The rates of NVIDIA's GPUs by their datasheets, and their names and memory as the driver reports them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU by its datasheet, with its share of a node's network.

    Attributes:
        name: Such as h100.
        driver_name: As the driver reports it, and JAX as ``device_kind``.
        peak_flops: Peak in dense 16-bit matrix products, operations a second.
        memory_bytes: Memory, as the driver reports it: 79.1 GiB of an H100 "of 80 GB".
        memory_bandwidth: Of the memory, bytes a second.
        node_bandwidth: To other GPUs of the node, one way, bytes a second.
        network_bandwidth: To other nodes, one way, bytes a second.
    """

    name: str
    driver_name: str
    peak_flops: float
    memory_bytes: int
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float


# Dense bf16 operations a second, bytes of memory, its bytes a second, those of NVLink each way and of the network a device.
#   A100: NVIDIA A100 datasheet (June 2021): 312 TFLOP/s, 1.555 or 2.039 TB/s, NVLink 3 of 600 GB/s both ways.
#     Network: Jean Zay, where BLOOM was trained, has four Omni-Path cards of 100 Gb/s a node of eight (arXiv 2211.05100,
#     section 3.3); a DGX A100 has eight of InfiniBand 200 Gb/s, and 2104.04473, section 5, reports the same for Selene.
#   H100, H200: NVIDIA H100 and H200 datasheets (SXM): 989 TFLOP/s dense, 3.35 or 4.8 TB/s, NVLink 4 of
#     900 GB/s both ways; eight network cards of 400 Gb/s (DGX H100 datasheet; arXiv 2407.21783, section 3.3.1).
#   B200: DGX B200 datasheet, an eighth of it: 2.25 PFLOP/s dense, 8 TB/s, NVLink 5 of 1.8 TB/s both ways; eight
#     network cards of 400 Gb/s.
#   Memory: that of XLA's own descriptions (see `compile_only.py`), where the datasheets have rounded 40, 80, 141 and 180 GB.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", 312e12, 42331013120, 1.555e12, 300e9, 25e9),
        Gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", 312e12, 85100068864, 2.039e12, 300e9, 25e9),
        Gpu("a100-80gb-jeanzay", "NVIDIA A100-SXM4-80GB", 312e12, 85100068864, 2.039e12, 300e9, 6.25e9),
        Gpu("h100", "NVIDIA H100 80GB HBM3", 989e12, 84942979072, 3.35e12, 450e9, 50e9),
        Gpu("h200", "NVIDIA H200", 989e12, 151397597184, 4.8e12, 450e9, 50e9),
        Gpu("b200", "NVIDIA B200", 2250e12, 191514411008, 8.0e12, 900e9, 50e9),
    )
}
