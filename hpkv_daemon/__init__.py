"""hpkvd: one daemon per node that keeps the KV cache outside the engines."""
