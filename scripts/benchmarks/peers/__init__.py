"""The systems that `bench_peers.py` compares, a file each, and what they share."""
