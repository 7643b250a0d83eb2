"""What differs between families of models."""
