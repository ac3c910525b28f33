"""The `elasticmoe` command: one module per subcommand."""
