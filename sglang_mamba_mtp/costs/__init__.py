"""What a step costs, by arithmetic on a model's configuration: its parameters, the bytes and operations of a step, the
accept length from which on speculation pays. Nothing here is measured, and nothing needs a GPU or weights."""
