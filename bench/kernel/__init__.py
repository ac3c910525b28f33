"""The pieces of the kernel bench: shapes and routing, timing in graphs, the tuner, the comparison with vLLM."""
