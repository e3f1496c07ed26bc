"""A model and clusters to plan for."""

from jaxpar.models.transformer import TransformerConfig
from jaxpar.planner import Cluster

SMALL = TransformerConfig(
    vocab_size=512, num_layers=8, embed_dim=256, num_heads=8, max_positions=128
)


def node(**changes):
    given = {
        "memory_bytes": 80e9,
        "peak_flops": 1e14,
        "memory_bandwidth": 1e12,
        "node_bandwidth": 1e11,
    }
    return Cluster(**({"network_bandwidth": 1e10} | given | changes))
