"""What is hooked into SGLang: one table, and what each hook does, by when it runs."""
