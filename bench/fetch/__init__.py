"""The pieces of the fetch bench: experts in an arena and on the host, copies alone, a step with fetches beside it."""
