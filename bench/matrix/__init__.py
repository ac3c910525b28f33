"""What `bench/serving_h200.py` is made of: cells, forced routing, rooms of KV, workloads, and their figures."""
