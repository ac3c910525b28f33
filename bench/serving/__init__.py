"""What the demo and the benches share: a trace, servers, a client, their metrics and the arithmetic between them."""
